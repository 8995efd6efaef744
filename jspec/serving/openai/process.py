"""The process of a server: it listens, serves, and ends when it is told to, without cutting answers off."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from jspec.serving.openai.app import make_app
from jspec.serving.openai.connection import connection_type
from jspec.serving.openai.service import Service

log = logging.getLogger("jspec.serve")

MAX_HEADER_BYTES = 64 * 2**10
LAST_WORDS = 5  # seconds for answers to reach their clients after everything has ended
TICK = 0.05  # seconds
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def listener(host: str, port: int) -> socket.socket:
    """A socket that is bound, but does not listen yet: before minutes go into loading a model.

    Raises:
      ValueError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"host={host!r}: expected a name or an address of this machine ({error})") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        raise ValueError(f"port={port}: expected a free port of {host!r} ({error}); 0 takes any") from None
    return found


def run(
    service: Service,
    bound: socket.socket,
    *,
    shutdown_timeout: float,
    log_level: str = "info",
    certificate: tuple[str, str] | None = None,
):
    """Serve until SIGTERM or SIGINT.

    Then ``/health`` says 503, new requests are refused with 503, and those that are being answered have so many seconds to
    end; after that, or at a second signal, they are given up.

    Args:
      service: what is served.
      bound: where to listen, of ``listener``.
      shutdown_timeout: seconds that answers have to end.
      log_level: how much uvicorn logs, ``info`` for example.
      certificate: the files of a certificate and of its key, for HTTPS.
    """
    chain, key = certificate or (None, None)
    config = uvicorn.Config(
        make_app(service),
        http=connection_type(service.limits.max_header_seconds),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="off",
        log_level=log_level,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=LAST_WORDS,
        ssl_certfile=chain,
        ssl_keyfile=key,
    )
    config.load()  # refuses certificates that cannot be read
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    where = f"{'http' if certificate is None else 'https'}://{shown}:{port}"
    with _frozen_heap():
        asyncio.run(_serve(_Server(config), service, bound, shutdown_timeout, where))


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Have the garbage collector pass over the objects that exist now: modules, the vocabulary, the programs.

    There are so many that one look at all of them stopped the threads of an 8B server for 0.6 seconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _serve(server: "_Server", service: Service, bound: socket.socket, shutdown_timeout: float, where: str):
    stops: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stops.put_nowait, number)
    serving = asyncio.ensure_future(server.serve([bound]))
    try:
        while not (server.started or serving.done()):
            await asyncio.sleep(TICK)
        if not serving.done():
            print(f"jspec serve: {', '.join(service.names)} at {where}", file=sys.stderr, flush=True)
        stopping = asyncio.ensure_future(stops.get())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await _drain(service, stops, shutdown_timeout)
        server.should_exit = True
        await serving
    finally:
        await service.engine.close()
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _drain(service: Service, stops: "asyncio.Queue[int]", seconds: float):
    """Refuse new requests, and let those end that are being answered; after so many seconds, give them up."""
    service.draining = True
    log.info("no new requests are taken; %d are being answered", service.in_flight)
    deadline = asyncio.get_running_loop().time() + seconds
    while service.in_flight and stops.empty() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(TICK)
    await service.engine.close()  # whoever is left gets a last delta, which says that it was given up
    deadline = asyncio.get_running_loop().time() + LAST_WORDS
    while service.in_flight and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(TICK)


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals alone: it would stop listening at the first one, and raise it again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
