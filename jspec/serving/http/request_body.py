"""Reads the bodies of requests within limits of size and time, and of bytes in all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect, Request

from jspec.serving.http.errors import ApiError
from jspec.serving.http.limits import Limits


class Bodies:
    """Reads the bodies of a server's requests, of which only so many bytes may be in memory at a time.

    Args:
      limits: of a body and of all of them.

    Attributes:
      pending_bytes: bytes of bodies that are arriving or being parsed; a body whose length is announced counts in full.
    """

    def __init__(self, limits: Limits):
        self._limits, self.pending_bytes = limits, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request; it counts until the context ends.

        Raises:
          ApiError: 408, 413, or 429 if there are too many bytes of others.
          ClientDisconnect: the client disconnected before the body had arrived.
        """
        limits, reserved = self._limits, 0
        too_long = ApiError(
            413, f"the body is too large: expected at most {limits.max_body_bytes} bytes (--max-body-bytes)"
        )

        def reserve(size: int):
            nonlocal reserved
            if size > limits.max_body_bytes:
                raise too_long
            if self.pending_bytes + size - reserved > limits.max_pending_bytes:
                message = (
                    "the bodies of other requests fill the server's memory for them: try again (--max-pending-bytes)"
                )
                raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
            self.pending_bytes += size - reserved
            reserved = size

        try:
            length = request.headers.get("content-length", "")
            if length.isdecimal() and length.isascii():
                reserve(int(length) if len(length) <= 18 else limits.max_body_bytes + 1)
            body = bytearray()
            try:
                async with asyncio.timeout(limits.max_body_seconds):
                    async for chunk in request.stream():
                        body += chunk
                        reserve(max(len(body), reserved))
            except TimeoutError:
                raise ApiError(408, f"the body did not arrive within {limits.max_body_seconds:g} seconds") from None
            except RuntimeError:  # Starlette's, where the stream ended early
                raise ClientDisconnect from None
            yield bytes(body)
        finally:
            self.pending_bytes -= reserved
