"""The ASGI application of a supervisor: it forwards requests to the leader's worker, and gives 503 while there is none."""

import asyncio
import contextlib
import functools
import io
import logging
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import aiohttp
from multidict import CIMultiDict
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send
from yarl import URL

from jspec.serving.http.auth import OPEN, Keys
from jspec.serving.http.errors import ANTHROPIC, ApiError, anthropic_body, as_api_error, shown
from jspec.serving.http.limits import Limits
from jspec.serving.http.request_body import Bodies
from jspec.serving.http.streaming import DONE, event, named_event, while_connected
from jspec.serving.supervisor.messages import CLIENT, HEADER

log = logging.getLogger("jspec.serve")

RETRY_AFTER = 5  # seconds
LAST_BYTES = 5.0  # seconds in which a worker's last bytes, sent before it ended, may still reach the client
# The last event of Anthropic's streams, longer than ``DONE``.
STOP = named_event("message_stop", {"type": "message_stop"})
CONNECT = 5.0  # seconds within which a ready worker accepts a connection
# Headers that are not forwarded: those of one connection, and those that server or client set themselves.
_OWN = {HEADER.encode(), CLIENT.encode(), b"connection", b"keep-alive", b"trailer", b"transfer-encoding", b"upgrade"}
_OWN |= {b"expect", b"content-length", b"date", b"te", b"proxy-authenticate", b"proxy-authorization"}
_OWN |= {b"proxy-connection"}


class Lost(Exception):
    """The worker is gone."""


class Upstream:
    """HTTP client of a worker.

    Every request has a new connection: the worker may close an idle one at the moment in which it is used again, and then
    it is unknown whether the request arrived. Requests for completions are never sent twice.

    Args:
      address: where the worker listens, ``http://127.0.0.1:12345`` for example.
      token: the secret that it requires.
    """

    def __init__(self, address: str, token: str):
        self._address, self._token = URL(address), token
        self._gone = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._count = 0  # of requests under way
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
        )

    def request(
        self, method: str, path: str, query: str = "", headers: Iterable[tuple[str, str]] = (), body: bytes = b""
    ):
        """The response to a request, as a context manager. ``path`` and ``query`` are quoted already."""
        there = self._address
        url = URL.build(
            scheme=there.scheme, host=there.host or "", port=there.port, path=path, query_string=query, encoded=True
        )
        shown_headers = CIMultiDict(headers)
        shown_headers[HEADER] = self._token
        data = io.BytesIO(body) if body else None  # aiohttp sends that in pieces
        return self._session.request(method, url, headers=shown_headers, data=data, allow_redirects=False)

    async def while_alive(self, work: Coroutine[Any, Any, None]):
        """Run a coroutine that uses this worker. When the worker is gone, it has ``LAST_BYTES`` seconds left.

        Raises:
          Lost: the coroutine had not ended by then.
        """
        working, gone = asyncio.ensure_future(work), asyncio.ensure_future(self._gone.wait())
        with self._counted():
            try:
                await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    await asyncio.wait((working,), timeout=LAST_BYTES)
                if not working.done():
                    raise Lost
                working.result()
            finally:
                for task in (working, gone):
                    task.cancel()
                await asyncio.gather(working, gone, return_exceptions=True)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count a request as under way. The count is right even if the client's disconnection cancels the request."""
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._idle.set()

    async def drain(self):
        """Close the client of a lost worker once no request is under way."""
        self._gone.set()
        await self._idle.wait()
        await self.close()

    async def close(self):
        """Close all connections."""
        await self._session.close()


class Proxy:
    """An ASGI application that forwards requests to a worker and its responses to clients.

    API keys and the limits of headers and bodies are checked here, before the worker gets a request. Request bodies are
    buffered completely, and so are responses that are not streams.

    Args:
      keys: the API keys of clients.
      limits: of bodies.

    Attributes:
      upstream: the worker; None while there is none.
      why: the message of the 503 while there is none.
    """

    def __init__(self, keys: Keys, limits: Limits):
        self._keys, self._bodies = keys, Bodies(limits)
        self.upstream: Upstream | None = None
        self.why = "the server has not started yet"

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        assert scope["type"] == "http", scope["type"]
        path = scope["path"]
        reply = _Reply(send, path)
        try:
            upstream = self._authorize(scope)
            async with self._bodies.read(Request(scope, receive)) as body:
                await while_connected(receive, self._forward(upstream, scope, body, reply))
        except (ClientDisconnect, OSError):  # the 499 below is only for the log
            if not reply.begun:
                await ApiError(499, "the client disconnected").response(path)(scope, receive, send)
        except Exception as error:
            if reply.begun:
                raise
            await as_api_error(error, "a request could not be passed on").response(path)(scope, receive, send)

    def _authorize(self, scope: Scope) -> Upstream:
        """Check the API key and the path; returns the worker.

        Raises:
          ApiError: 401, 404 or 503.
        """
        if scope["path"] not in OPEN:
            self._keys.tenant(scope)
        if not scope["raw_path"].startswith(b"/"):  # an absolute URL, as a forward proxy gets it
            raise ApiError(404, f"Not Found: {scope['method']} {shown(scope['path'])}")
        if self.upstream is None:
            raise self._unavailable()
        return self.upstream

    def _unavailable(self) -> ApiError:
        return ApiError(503, self.why, headers={"Retry-After": str(RETRY_AFTER)})

    async def _forward(self, upstream: Upstream, scope: Scope, body: bytes, reply: "_Reply"):
        """Forward a request to the worker, and the response to the client.

        Raises:
          ApiError: 503; the worker was lost before it sent anything.
        """
        headers = [(_text(name), _text(value)) for name, value in scope["headers"] if name not in _OWN]
        if scope.get("client"):
            headers.append((CLIENT, scope["client"][0]))
        path, query = _text(scope["raw_path"]), _text(scope["query_string"])
        request = functools.partial(upstream.request, scope["method"], path, query, headers, body)
        try:
            await upstream.while_alive(_pass_back(request, reply))
        except (Lost, aiohttp.ClientError, OSError, TimeoutError) as error:
            if isinstance(error, _ClientGone):
                raise
            log.info("a request was lost with its worker: %r", error)
            message = "the request was lost with a process that runs the model: try again"
            await reply.fail(ApiError(503, message, headers={"Retry-After": str(RETRY_AFTER)}))


class _ClientGone(OSError):
    """The connection to the client has ended."""


class _Reply:
    """What a client gets.

    Args:
      send: of ASGI.
      path: that it asked for.

    Attributes:
      begun: whether it has got anything.
    """

    def __init__(self, send: Send, path: str):
        self._send, self._path, self.begun = send, path, False
        self._tail = b""  # of the events that were sent

    async def start(self, response: aiohttp.ClientResponse, length: int | None = None):
        """Send the status and the headers."""
        headers = [(name.lower(), value) for name, value in response.raw_headers if name.lower() not in _OWN]
        if length is not None:
            headers.append((b"content-length", b"%d" % length))
        await self._say({"type": "http.response.start", "status": response.status, "headers": headers})

    async def add(self, data: bytes, more: bool = True):
        """Send a part of the body; the last one without ``more``."""
        self._tail = (self._tail + data)[-len(STOP) :]
        await self._say({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: ApiError):
        """End with an error: as a last event of a stream that has begun.

        Raises:
          ApiError: ``error``; nothing has begun yet.
        """
        if not self.begun:
            raise error
        last, told = DONE, event(error.body) + DONE
        if self._path.startswith(ANTHROPIC):
            last, told = STOP, named_event("error", anthropic_body(error))
        await self.add(b"" if self._tail.endswith(last) else told, more=False)

    async def _say(self, message: Message):
        self.begun = True
        try:
            await self._send(message)
        except OSError as error:
            raise _ClientGone from error


async def _pass_back(request: Callable[[], Any], reply: _Reply):
    """Send a worker's response to the client: a stream event by event, anything else completely."""
    async with request() as response:
        if response.content_type != "text/event-stream":
            content = await response.read()  # so that a response that breaks off becomes an error
            await reply.start(response, None if response.status in (204, 304) else len(content))
            await reply.add(content, more=False)
            return
        await reply.start(response)
        rest = b""  # the beginning of an incomplete event
        async for data in response.content.iter_any():
            events, end, rest = (rest + data).rpartition(b"\n\n")
            if end:
                await reply.add(events + end)
        await reply.add(rest, more=False)


def _text(value: bytes) -> str:
    """A part of the request's head as text that is encoded to the same bytes again."""
    with contextlib.suppress(UnicodeDecodeError):
        return value.decode()
    return value.decode("latin-1")
