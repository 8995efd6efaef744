"""Start, serving and graceful shutdown of a server process."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import socket
import sys
from collections.abc import Callable, Iterator

import jspec
from jspec.serving.generation.service import Service
from jspec.serving.http.server import LAST_WORDS, TICK, Server, address_of, make_public_server, signalled, until_started
from jspec.serving.http.settings import ServerSettings
from jspec.serving.server.app import make_app
from jspec.serving.server.rl_routes import RLRoutes

log = logging.getLogger("jspec.serve")

MMAP_THRESHOLD = -3  # of mallopt, M_MMAP_THRESHOLD
LARGE_BUFFER = 2 * 2**20  # bytes

Stopping = Callable[[], contextlib.AbstractContextManager[asyncio.Queue[int]]]


def run(service: Service, bound: socket.socket, settings: ServerSettings, rl_routes: RLRoutes | None = None):
    """Serve until SIGTERM or SIGINT.

    Then ``/health`` gives 503, new requests are refused with 503, and requests under way have the settings'
    ``shutdown_timeout`` to end; after that, or at a second signal, they are cancelled.

    Args:
      service: the model and its settings.
      bound: the socket to listen at, of ``http.server.listener``.
      settings: of the server.
      rl_routes: the routes for a trainer; None for none.
    """
    server = make_public_server(make_app(service, rl_routes), bound, settings)
    where = address_of(bound, settings.certificate)

    def started():
        keys = "needs an API key" if service.keys.needed else "needs no API key"
        print(f"jspec serve: {jspec.__version__}, {service.llm!r}, {keys}", file=sys.stderr)
        print(f"jspec serve: {', '.join(service.names)} at {where}", file=sys.stderr, flush=True)

    serve_until(signalled, server, service, bound, settings.shutdown_timeout, started)


def serve_until(
    stopping: Stopping,
    server: Server,
    service: Service,
    bound: socket.socket,
    shutdown_timeout: float,
    started: Callable[[], None],
):
    """Run an event loop that serves until it is told to stop, and then shut down as ``run`` does.

    Args:
      stopping: gives the running loop a queue, whose first item ends the service; a second one cancels what is under way.
      server: of the service's application.
      service: the model and its settings.
      bound: the socket to listen at.
      shutdown_timeout: seconds that requests under way have to end.
      started: called once the server listens.
    """

    async def serve():
        with stopping() as stops:
            serving = asyncio.ensure_future(server.serve([bound]))
            try:
                async with service.loop_monitor.running():
                    await until_started(server, serving)
                    if not serving.done():
                        started()
                    stop = asyncio.ensure_future(stops.get())
                    await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
                    stop.cancel()
                    await _drain(service, stops, shutdown_timeout)
                    server.should_exit = True
                    await serving
            finally:
                await service.engine.close()

    _return_large_buffers()
    with _frozen_heap():
        asyncio.run(serve())


def _return_large_buffers():
    """Have glibc give buffers of the size of a large body back to the system when they are freed.

    By default it keeps up to 32 MiB of freed buffers for each of its arenas, as soon as it has seen such a buffer."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE_BUFFER)


@contextlib.contextmanager
def _frozen_heap() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection: modules, the vocabulary, the programs.

    They are so many that one collection stopped the threads of an 8B server for 0.6 seconds."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def _drain(service: Service, stops: "asyncio.Queue[int]", seconds: float):
    """Refuse new requests, and wait for those under way; after ``seconds``, cancel them."""
    service.draining = True
    log.info("new requests are refused; %d are under way", service.in_flight)
    deadline = asyncio.get_running_loop().time() + seconds
    while service.in_flight and stops.empty() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(TICK)
    await service.engine.close()  # each request left gets a last delta with the finish reason ``abort``
    deadline = asyncio.get_running_loop().time() + LAST_WORDS
    while service.in_flight and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(TICK)
