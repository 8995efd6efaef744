"""HTTP connections that are closed when the head of a request does not arrive in time."""

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's connection with a deadline for the method, the path and the headers of each request.

    uvicorn itself waits for them forever, so slow clients could use up all connections of the process. The body has its
    own deadline, ``Limits.max_body_seconds``.

    Attributes:
      max_header_seconds: the most seconds from the connection, or from the end of the last response.
    """

    max_header_seconds: ClassVar[float]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport):  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes):
        super().data_received(data)
        self._watch()

    def on_response_complete(self):
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None):
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self):
        """Start the timer if a head is due, and stop it if the head has arrived."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.max_header_seconds, self.timeout_keep_alive_handler)

    def _unwatch(self):
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection_type(max_header_seconds: float) -> type[Connection]:
    """The connection class of a server with this deadline."""
    return type("Connection", (Connection,), {"max_header_seconds": max_header_seconds})
