"""Middleware of a worker's HTTP server: only requests with the supervisor's token pass."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from jspec.serving.openai.errors import ApiError

HEADER = "x-jspec-supervisor"
CLIENT = "x-jspec-client"  # the address of the client, which the supervisor adds


class RequireToken:
    """Passes requests on to ``app`` that have the token in the header ``HEADER``; others get 403.

    A worker listens on loopback or in a private network, where others can connect, too.
    """

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        token = next((value for name, value in scope.get("headers", ()) if name == HEADER.encode()), b"")
        if scope["type"] == "http" and not hmac.compare_digest(token, self._token):
            error = ApiError(403, "only the supervisor of the server may use this address")
            await error.response(scope["path"])(scope, receive, send)
            return
        client = next(
            (value.decode("latin-1") for name, value in scope.get("headers", ()) if name == CLIENT.encode()), ""
        )
        scope["client"] = (client, 0) if client else None
        await self._app(scope, receive, send)
