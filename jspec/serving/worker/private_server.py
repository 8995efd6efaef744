"""A worker's HTTP server: only requests with the supervisor's token pass."""

import hmac
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from jspec.serving.generation.service import Service
from jspec.serving.http.errors import ApiError
from jspec.serving.http.headers import header_of
from jspec.serving.http.server import MAX_HEADER_BYTES, address_of, make_server
from jspec.serving.http.settings import ServerSettings
from jspec.serving.server.app import make_app
from jspec.serving.server.lifecycle import serve_until
from jspec.serving.supervisor.messages import CLIENT, HEADER, Ready
from jspec.serving.worker.link import Link


class RequireToken:
    """Passes requests on to ``app`` that have the token in the header ``HEADER``; others get 403.

    A worker listens on loopback or in a private network, where others can connect, too.
    """

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        token = header_of(scope, HEADER.encode())
        if scope["type"] == "http" and not hmac.compare_digest(token, self._token):
            error = ApiError(403, "only the supervisor of the server may use this address")
            await error.response(scope["path"])(scope, receive, send)
            return
        client = header_of(scope, CLIENT.encode()).decode("latin-1")
        scope["client"] = (client, 0) if client else None
        await self._app(scope, receive, send)


def run_privately(service: Service, bound: socket.socket, link: Link, settings: ServerSettings):
    """Serve only the supervisor of this process, until its ``END``; then shut down as ``lifecycle.run`` does.

    Args:
      service: the model and its settings.
      bound: the socket to listen at.
      link: the connection to the supervisor.
      settings: of the public server.
    """
    server = make_server(
        RequireToken(make_app(service), link.task.token),
        service.limits,
        log_level=settings.log_level,
        max_header_bytes=2 * MAX_HEADER_BYTES,  # the supervisor adds a header
        access_log=False,  # the supervisor has one
    )
    ready = Ready(address_of(bound))
    serve_until(link.serving, server, service, bound, settings.shutdown_timeout, lambda: link.send(ready))
