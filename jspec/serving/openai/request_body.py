"""Reads the body of a request within limits of size and time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from jspec.serving.openai.errors import ApiError
from jspec.serving.openai.limits import Limits


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
      ApiError: 408 or 413.
      ClientDisconnect: the client disconnected before the body had arrived.
    """
    most = limits.max_body_bytes
    too_long = ApiError(413, f"the body is too large: expected at most {most} bytes (--max-body-bytes)")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and length.isascii() and (len(length) > 18 or int(length) > most):
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(limits.max_body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.max_body_seconds:g} seconds") from None
    except RuntimeError:  # Starlette's, where the stream ended early
        raise ClientDisconnect from None
    return bytes(body)
