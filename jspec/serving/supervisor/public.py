"""The public address of a server whose model runs in worker processes; it stays open while they are restarted."""

import asyncio
import socket
import sys
from collections.abc import Sequence

import aiohttp

from jspec.serving.http.server import Server, address_of, listener, make_public_server, until_started
from jspec.serving.http.settings import ServerSettings
from jspec.serving.supervisor.proxy import Proxy, Upstream

HEALTH_TIMEOUT = 10.0  # seconds within which a worker that reported ``Ready`` has to respond to /health


class Public:
    """The public HTTP server. It accepts connections from the first ready worker on, also while no worker is ready.

    Args:
      settings: of the server.
      names: the names of the model.

    Raises:
      ValueError: the address cannot be used.
      OSError: the certificate cannot be read.
    """

    def __init__(self, settings: ServerSettings, names: Sequence[str]):
        self._names, self._certificate = names, settings.certificate
        self._proxy = Proxy(settings.keys, settings.limits)
        self._bound: socket.socket = listener(settings.host, settings.port)
        try:
            self._server: Server = make_public_server(self._proxy, self._bound, settings)
        except BaseException:
            self._bound.close()
            raise
        self._serving: asyncio.Task | None = None
        self._draining: set[asyncio.Task] = set()

    async def open(self, address: str, token: str):
        """Forward requests to a worker from now on, once it responds to ``/health``.

        Raises:
          OSError: it does not respond, or the public server cannot start.
        """
        upstream = Upstream(address, token)
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT), upstream.request("GET", "/health") as response:
                if response.status != 200:
                    raise OSError(f"its /health says {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await upstream.close()
            raise OSError(f"it reported that it was ready, and did not respond ({error!r})") from error
        self._proxy.upstream = upstream
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._server.serve([self._bound]))
            await until_started(self._server, self._serving)
            if self._serving.done():
                self._serving.result()  # raises the reason
        where = address_of(self._bound, self._certificate)
        print(f"jspec serve: {', '.join(self._names)} at {where}", file=sys.stderr, flush=True)

    def shut(self, why: str):
        """Respond with 503 and the reason ``why`` from now on, because the worker is gone."""
        self._proxy.why = why
        upstream, self._proxy.upstream = self._proxy.upstream, None
        if upstream is not None:
            draining = asyncio.ensure_future(upstream.drain())
            self._draining.add(draining)
            draining.add_done_callback(self._draining.discard)

    async def close(self):
        """Stop once responses that have ended have reached their clients."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
        await asyncio.gather(*self._draining)
        self._bound.close()
