"""The public side of a supervisor over a worker that is a script, and a client that asks it."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from jspec.serving.http.auth import Keys
from jspec.serving.http.limits import Limits
from jspec.serving.http.settings import ServerSettings
from jspec.serving.supervisor.messages import HEADER
from jspec.serving.supervisor.public import Public

TOKEN = "a-token"
PATIENCE = 60  # seconds
EVENT = b'data: {"text":"a"}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = {"prompt": "a", "stream": True}

Script = Callable[["Asked", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Asked:
    """A request as it has reached the worker."""

    def __init__(self, head: bytes, body: bytes):
        line, *headers = head.decode("latin-1").split("\r\n")
        self.line, self.body = line, body
        pairs = [header.split(": ", 1) for header in headers if header]
        self.headers = [(name.lower(), value) for name, value in pairs]


class FakeMember:
    """A worker that answers ``/health``, and anything else as a script does."""

    def __init__(self, script: Script):
        self.script, self.asked, self.writers = script, [], []
        self.health = b"200 OK"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.writers.append(writer)
        with contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            lengths = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            asked = Asked(head, await reader.readexactly(sum(lengths)))
            assert (HEADER, TOKEN) in asked.headers
            if asked.line.startswith("GET /health"):
                writer.write(b"HTTP/1.1 " + self.health + b"\r\ncontent-length: 0\r\n\r\n")
            else:
                self.asked.append(asked)
                await self.script(asked, reader, writer)
            with contextlib.suppress(OSError):
                await writer.drain()


def whole(status: bytes, content: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"HTTP/1.1 " + status, b"content-length: %d" % len(content), *headers, b"", content])


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@contextlib.asynccontextmanager
async def running(
    script: Script, keys=(), certificate=None, **limits
) -> AsyncIterator[tuple[FakeMember, Public, httpx.AsyncClient]]:
    """A worker, the public side over it, and a client."""
    worker = FakeMember(script)
    server = await asyncio.start_server(worker.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    settings = ServerSettings(
        port=0,
        keys=Keys(keys),
        limits=Limits(**limits),
        certificate=certificate,
        shutdown_timeout=5.0,
        log_level="critical",
    )
    side = Public(settings, ["model"])
    await side.open(f"http://127.0.0.1:{port}", TOKEN)
    url = f"{'https' if certificate else 'http'}://127.0.0.1:{side._bound.getsockname()[1]}"
    trusted = ssl.create_default_context(cafile=certificate[0]) if certificate else True
    worker.close = server.close
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False, verify=trusted) as client:
        try:
            yield worker, side, client
        finally:
            side.shut("the test ends")
            for writer in worker.writers:
                writer.close()
            server.close()
            await client.aclose()
            await side.close()


def run(test: Callable[[], Awaitable[None]]):
    asyncio.run(asyncio.wait_for(test(), PATIENCE))
