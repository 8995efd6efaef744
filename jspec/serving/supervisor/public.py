"""The public side of a server whose model runs in other processes: its address, which outlives them."""

import asyncio
import socket
import sys
from collections.abc import Sequence

import aiohttp

from jspec.serving.openai.http_server import TICK, Server, address_of, listener, make_server
from jspec.serving.openai.server_settings import Settings
from jspec.serving.supervisor.proxy import Proxy, Upstream

ANSWER = 10.0  # seconds within which a member that says that it is ready has to answer


class Public:
    """The address of a server. Nobody is answered before the first member is there; afterwards everybody always is.

    Args:
      settings: of the server.
      names: by which clients may ask for the model.

    Raises:
      ValueError: the address cannot be used.
      OSError: the certificate cannot be read.
    """

    def __init__(self, settings: Settings, names: Sequence[str]):
        self._names, self._certificate = names, settings.certificate
        self._proxy = Proxy(settings.keys, settings.limits)
        self._server: Server = make_server(
            self._proxy,
            max_header_seconds=settings.limits.max_header_seconds,
            log_level=settings.log_level,
            certificate=settings.certificate,
        )
        self._bound: socket.socket = listener(settings.host, settings.port)
        self._serving: asyncio.Task | None = None
        self._leaving: set[asyncio.Task] = set()

    async def open(self, address: str, token: str):
        """Have a member answer, once it does so.

        Raises:
          OSError: it does not, or nobody can be answered at the public address.
        """
        upstream = Upstream(address, token)
        try:
            async with asyncio.timeout(ANSWER), upstream.ask("GET", "/health") as response:
                if response.status != 200:
                    raise OSError(f"its /health says {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await upstream.close()
            raise OSError(f"it said that it was ready, and did not answer ({error!r})") from error
        self._proxy.upstream = upstream
        if self._serving is None:
            self._serving = asyncio.ensure_future(self._server.serve([self._bound]))
            while not (self._server.started or self._serving.done()):
                await asyncio.sleep(TICK)
            if self._serving.done():
                self._serving.result()  # why it could not begin
        where = address_of(self._bound, self._certificate)
        print(f"jspec serve: {', '.join(self._names)} at {where}", file=sys.stderr, flush=True)

    def shut(self, why: str):
        """The member is gone: answer 503, and tell clients why."""
        self._proxy.why = why
        upstream, self._proxy.upstream = self._proxy.upstream, None
        if upstream is not None:
            leaving = asyncio.ensure_future(upstream.leave())
            self._leaving.add(leaving)
            leaving.add_done_callback(self._leaving.discard)

    async def close(self):
        """Stop, when answers that have ended have reached their clients."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
        await asyncio.gather(*self._leaving)
        self._bound.close()
