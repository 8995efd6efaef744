"""Answers while the client is there: streams of events, and work that ends when its client leaves."""

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
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"


class EventStream(Response):
    """Sends events as they come, until there are no more or the client leaves.

    Args:
      events: yields them, as ``event`` makes them.
      close: gives up what they come from. It is called in any case, and at once.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], close: Callable[[], None]):
        self.status_code, self.background, self._events, self._close = 200, None, events, close
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send):
        try:
            with contextlib.suppress(ClientDisconnect, OSError):  # nobody is there to be told
                await while_there(receive, self._send(send))
        finally:
            self._close()
            await self._events.aclose()

    async def _send(self, send: Send):
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves. The request's body has been read before.

    Raises:
      ClientDisconnect: the client left.
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
