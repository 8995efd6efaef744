"""Server-sent events, and the cancellation of work when its client disconnects."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"

T = TypeVar("T")


def event(data: Mapping[str, Any]) -> bytes:
    """One event of a stream: ``data: {..}`` and an empty line."""
    return b"data: " + json_of(data) + b"\n\n"


def json_of(data: Any) -> bytes:
    """The JSON of a value, as events have it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def named_event(name: str, data: Mapping[str, Any]) -> bytes:
    """One event with its name: ``event: ..``, ``data: {..}`` and an empty line."""
    return named_json_event(name, json_of(data))


def named_json_event(name: str, data: bytes) -> bytes:
    """The same of data that is JSON already."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream(Response):
    """Sends events as they come, until there are no more or the client disconnects.

    Args:
      events: the events, as ``event`` makes them.
      close: cancels the requests behind them; called in any case.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]):
        self.status_code, self.background, self._events, self._close = 200, None, events, close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        try:
            with contextlib.suppress(ClientDisconnect, OSError):  # there is no client to get an error
                await while_connected(receive, self._send(send))
        finally:
            self._close()
            await self._events.aclose()

    async def _send(self, send: Send):
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects. The body has to be read before.

    Raises:
      ClientDisconnect: the client disconnected.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive):
    while (await receive())["type"] != "http.disconnect":
        pass
