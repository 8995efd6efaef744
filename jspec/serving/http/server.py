"""Listening socket, uvicorn server and shutdown signals of every HTTP process, for any ASGI application."""

import asyncio
import contextlib
import copy
import dataclasses
import errno
import functools
import logging
import math
import resource
import signal
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LOGGING_CONFIG

from jspec.serving.http.connection import Connection
from jspec.serving.http.headers import HeaderChecks, allowed_hosts_of
from jspec.serving.http.limits import Limits
from jspec.serving.http.settings import ServerSettings

log = logging.getLogger("jspec.serve")

MAX_HEADER_BYTES = 64 * 2**10
BACKLOG = 128  # connections that the kernel holds until they are accepted
KEPT_FILES = 128  # file descriptors that are not for connections: the engine's, the log's, the model's
LAST_WORDS = 5  # seconds for responses to reach their clients after all requests have ended
TICK = 0.05  # seconds
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would stop listening at the first signal and raise it again, and
    with a deadline for the handshake of TLS.

    Args:
      config: of uvicorn.
      max_header_seconds: seconds for a handshake.
    """

    def __init__(self, config: uvicorn.Config, max_header_seconds: float):
        super().__init__(config)
        self._handshake_seconds = max_header_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None):
        """Listen. uvicorn has no argument for the handshake, which asyncio lets take a minute.

        Raises:
          OSError: another process listens at an address.
        """
        for bound in sockets or ():
            _listen(bound, self.config.backlog)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_LoopErrors())
        create_server = loop.create_server
        if self.config.is_ssl:
            loop.create_server = functools.partial(create_server, ssl_handshake_timeout=self._handshake_seconds)
        try:
            await super().startup(sockets=sockets)
        finally:
            loop.create_server = create_server


class _LoopErrors:
    """An exception handler of an event loop that logs a failure to accept connections once a minute.

    asyncio reports it for every connection that waits, with a traceback, and tries again a second later."""

    def __init__(self):
        self._last = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]):
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif loop.time() >= self._last + 60:
            self._last = loop.time()
            log.error("connections cannot be accepted (%s): raise the limit of open files (ulimit -n)", error)


def most_connections(wanted: int) -> int:
    """How many connections a server can have, at most ``wanted``: as the process may have open files, whose soft limit is
    raised to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - KEPT_FILES))


def listener(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, so that a bad address is found before the model is loaded.

    Until it listens, no other process can bind to its address, even one that asks to reuse it: two servers that are started
    at the same time would both load their models, and one of them would find out afterwards.

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
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        bound.close()
        raise ValueError(_taken(host, port, error)) from None
    return bound


def _listen(bound: socket.socket, backlog: int):
    """Have a socket of ``listener`` listen. Its connections let a later server bind to its address while they end.

    Raises:
      OSError: another process listens at its address.
    """
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.listen(backlog)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        raise OSError(_taken(host, port, error)) from None


def _taken(host: str, port: int, error: OSError) -> str:
    return f"port={port}: expected a free port of {host!r} ({error}); 0 takes any"


def make_server(app: ASGIApp, limits: Limits, max_header_bytes: int = MAX_HEADER_BYTES, **options: Any) -> Server:
    """A server of ``app``, which ``serve([bound])`` runs.

    Args:
      app: handles the requests.
      limits: of headers and connections.
      max_header_bytes: the longest head of a request.
      **options: further ones of uvicorn: ``log_level``, and the files of a certificate for example.

    Raises:
      OSError: the certificate cannot be read.
    """
    limits = dataclasses.replace(limits, max_connections=most_connections(limits.max_connections))
    config = uvicorn.Config(
        app,
        http=cast(Any, functools.partial(Connection, limits)),
        h11_max_incomplete_event_size=max_header_bytes,
        ws="none",
        lifespan="off",
        log_config=_log_config(),
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_WORDS,
        **options,
    )
    config.load()  # refuses certificates that cannot be read
    return Server(config, limits.max_header_seconds)


def make_public_server(app: ASGIApp, bound: socket.socket, settings: ServerSettings) -> Server:
    """``make_server`` for clients: with the checks of headers, and with the settings' certificate and log level.

    Args:
      app: handles the requests.
      bound: the socket to listen at, of ``listener``.
      settings: of the server.

    Raises:
      OSError: the certificate cannot be read.
    """
    hosts = allowed_hosts_of(settings.allowed_hosts, bound.getsockname()[0], settings.host)
    chain, key = settings.certificate or (None, None)
    options = {"log_level": settings.log_level, "ssl_certfile": chain, "ssl_keyfile": key}
    return make_server(HeaderChecks(app, hosts), settings.limits, **options)


def _log_config() -> dict[str, Any]:
    """uvicorn's configuration of logging, with the time in every line."""
    config = copy.deepcopy(LOGGING_CONFIG)
    for formatter in config["formatters"].values():
        formatter["fmt"] = f"%(asctime)s {formatter['fmt']}"
    return config


def address_of(bound: socket.socket, certificate: tuple[str, str] | None = None) -> str:
    """The URL of a server at this socket, ``http://127.0.0.1:8000`` for example."""
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if certificate is None else 'https'}://{shown}:{port}"


async def until_started(server: Server, serving: asyncio.Future[None]):
    """Wait until a server listens, or until ``serving``, which serves, has ended."""
    while not (server.started or serving.done()):
        await asyncio.sleep(TICK)


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
