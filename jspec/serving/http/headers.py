"""ASGI middleware of every public server: which hosts it answers for, how a body is framed, and the id of a request."""

import ipaddress
import re
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jspec.serving.http.errors import ApiError, shown

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY = "*"
REQUEST_ID = b"x-request-id"
_VALID_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class HeaderChecks:
    """Refuses requests for other hosts, and those whose end is ambiguous; gives each request an id.

    A web page can let its own name point at 127.0.0.1 (DNS rebinding), and then the browser sends the page's requests to a
    server of this machine; the header ``Host`` has the page's name. A body with both Content-Length and Transfer-Encoding
    may end at different bytes for a proxy before the server and for the server itself (request smuggling).

    The id is the client's ``x-request-id`` if it has up to 128 letters, digits, dots, dashes or underscores, and else a new
    one. It is a header of the request from here on, and of the response.

    Args:
      app: handles the requests.
      allowed_hosts: names and addresses without a port, ``[::1]`` for example; None or ``*`` among them allows all.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str] | None = None):
        self._app = app
        every = allowed_hosts is None or ANY in allowed_hosts
        self._allowed = None if every else tuple(host.lower() for host in allowed_hosts or ())

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope).encode()
        others = [(name, value) for name, value in scope["headers"] if name != REQUEST_ID]
        scope["headers"] = [*others, (REQUEST_ID, request_id)]

        async def sending(message: Message):
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message.get("headers", ()) if name.lower() != REQUEST_ID]
                message = {**message, "headers": [*headers, (REQUEST_ID, request_id)]}
            await send(message)

        try:
            self._check(scope)
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, sending)
            return
        await self._app(scope, receive, sending)

    def _check(self, scope: Scope):
        """Check the headers.

        Raises:
          ApiError: 400 or 403. The connection is closed after it, because a body may follow.
        """
        names = [name for name, _ in scope["headers"]]
        if b"content-length" in names and b"transfer-encoding" in names:
            message = "the request has both Content-Length and Transfer-Encoding: expected one of them"
            raise ApiError(400, message, headers={"Connection": "close"})
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)
        if self._allowed is not None and host is not None and _without_port(host) not in self._allowed:
            message = f"Host is {shown(host)}: expected one of {', '.join(self._allowed)} (--allowed-hosts)"
            raise ApiError(403, message, headers={"Connection": "close"})


def allowed_hosts_of(given: Sequence[str] | None, address: str, host: str) -> tuple[str, ...] | None:
    """The hosts that a server answers for: the given ones, or else those of this machine if it listens on loopback alone.

    Args:
      given: of ``--allowed-hosts``; None if it was not given.
      address: the address at which the server listens, ``127.0.0.1`` for example.
      host: the name or address by which ``--host`` gave it.

    Returns:
      names and addresses, or None for any.
    """
    if given is not None:
        return tuple(given)
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return None
    literal = f"[{address}]" if ":" in address else address
    return tuple(dict.fromkeys((*LOOPBACK, literal, f"[{host}]" if ":" in host else host.lower())))


def request_id_of(scope: Scope) -> str:
    """The id of a request: the client's, if it is valid, or else a new one."""
    id = header_of(scope, REQUEST_ID)
    return id.decode() if _VALID_ID.fullmatch(id) else uuid.uuid4().hex


def header_of(scope: Scope, name: bytes) -> bytes:
    """The first header of a request with this name, in small letters; empty if there is none."""
    return next((value for other, value in scope["headers"] if other == name), b"")


def _without_port(host: str) -> str:
    return re.sub(r":\d*$", "", host.strip()).lower()
