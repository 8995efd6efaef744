"""Listening socket, uvicorn server and shutdown signals of every HTTP process, for any ASGI application."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from jspec.serving.openai.connection import connection_type

MAX_HEADER_BYTES = 64 * 2**10
LAST_WORDS = 5  # seconds for responses to reach their clients after all requests have ended
TICK = 0.05  # seconds
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would stop listening at the first signal and raise it again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listener(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a bad address is found before the model is loaded.

    Raises:
      ValueError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host={host!r}: expected a name or an address of this machine ({error})") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ValueError(f"port={port}: expected a free port of {host!r} ({error}); 0 takes any") from None
    return bound


def make_server(
    app: ASGIApp,
    *,
    max_header_seconds: float,
    log_level: str = "info",
    certificate: tuple[str, str] | None = None,
    max_header_bytes: int = MAX_HEADER_BYTES,
    access_log: bool = True,
) -> Server:
    """A server of ``app``, which ``serve([bound])`` runs.

    Args:
      app: handles the requests.
      max_header_seconds: seconds within which the head of a request has to arrive.
      log_level: of uvicorn, ``info`` for example.
      certificate: the files of a certificate and of its key, for HTTPS.
      max_header_bytes: the longest head of a request.
      access_log: whether a line is logged for each request.

    Raises:
      OSError: the certificate cannot be read.
    """
    chain, key = certificate or (None, None)
    config = uvicorn.Config(
        app,
        http=connection_type(max_header_seconds),
        h11_max_incomplete_event_size=max_header_bytes,
        ws="none",
        lifespan="off",
        log_level=log_level,
        access_log=access_log,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_WORDS,
        ssl_certfile=chain,
        ssl_keyfile=key,
    )
    config.load()  # refuses certificates that cannot be read
    return Server(config)


def address_of(bound: socket.socket, certificate: tuple[str, str] | None = None) -> str:
    """The URL of a server at this socket, ``http://127.0.0.1:8000`` for example."""
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if certificate is None else 'https'}://{shown}:{port}"


@contextlib.contextmanager
def signalled() -> "Iterator[asyncio.Queue[int]]":
    """A queue of the SIGTERM and SIGINT signals that come."""
    stops: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stops.put_nowait, number)
    try:
        yield stops
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
