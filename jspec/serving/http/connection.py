"""HTTP connections with limits: the time of a head, the size of chunks, and the number of connections."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from jspec.serving.http.limits import Limits

COUNTED_CHUNKS = 256  # chunks of a body before their size matters
LEAST_CHUNK = 64  # bytes that the chunks of a body have to have on average


class Connection(H11Protocol):
    """uvicorn's connection with a deadline for the method, the path and the headers of each request.

    uvicorn itself waits for them forever, so slow clients could use up all connections of the process. The body has its
    own deadline, ``Limits.max_body_seconds``.

    Args:
      limits: of the server. ``max_header_seconds`` count from the connection, or from the end of the last response.
        Connections beyond ``max_connections`` are closed at once.
      args, kwargs: uvicorn's.
    """

    def __init__(self, limits: Limits, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.conn = _Reader(self.config.h11_max_incomplete_event_size)
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport):  # pyright: ignore[reportIncompatibleMethodOverride]
        if len(self.connections) >= self._limits.max_connections:
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes):
        if self.transport.is_closing():  # refused, or after an error; the rest of the bytes is not for us
            return
        super().data_received(data)
        self._watch()

    def on_response_complete(self):
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str):
        """Refuse what is no HTTP, and close the connection. A response that has begun cannot be followed by another."""
        if self.cycle is not None:
            self.cycle.disconnected = True  # what it sends from now on is dropped
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None):
        self._unwatch()
        if self in self.connections:
            super().connection_lost(exc)

    def _watch(self):
        """Start the timer if a head is due, and stop it if the head has arrived."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._limits.max_header_seconds, self.timeout_keep_alive_handler)

    def _unwatch(self):
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Reader(h11.Connection):
    """h11's parser, which gives up on bodies in tiny chunks: each of them costs as much as a large one."""

    def __init__(self, max_incomplete_event_size: int | None):
        size = {} if max_incomplete_event_size is None else {"max_incomplete_event_size": max_incomplete_event_size}
        super().__init__(h11.SERVER, **size)
        self._chunks, self._bytes = 0, 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks, self._bytes = 0, 0
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > COUNTED_CHUNKS and self._bytes < LEAST_CHUNK * self._chunks:
                raise h11.RemoteProtocolError(f"chunks of less than {LEAST_CHUNK} bytes")
        return event
