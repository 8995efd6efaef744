"""Clients that take too long over the head of a request lose their connection; others keep theirs."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import uvicorn

from jspec.serving.openai.connection import connection_type

SECONDS = 0.4  # that a head may take
HEAD = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n"


async def echo(scope, receive, send):
    """Answers with the request's body, after twice the time that a head may take."""
    body = await receive()
    while body["more_body"]:
        body["body"] += (more := await receive())["body"]
        body["more_body"] = more["more_body"]
    await asyncio.sleep(2 * SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": body["body"]})


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server with the deadline."""
    config = uvicorn.Config(echo, port=0, http=connection_type(SECONDS), lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


async def closed(reader: asyncio.StreamReader) -> bool:
    """Whether the server closes the connection in good time, without an answer."""
    return await asyncio.wait_for(reader.read(), 20 * SECONDS) == b""


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20 * SECONDS)
    return head[:12] + await reader.readexactly(2)


def test_silent_client_is_disconnected():
    async def ask():
        async with connected() as (reader, _):
            assert await closed(reader)

    asyncio.run(ask())


def test_slow_client_is_timed_out():
    async def drip(writer):
        for letter in HEAD * 100:
            writer.write(bytes([letter]))
            await asyncio.sleep(SECONDS / 8)

    async def ask():
        async with connected() as (reader, writer):
            dripping = asyncio.create_task(drip(writer))
            assert await closed(reader)
            dripping.cancel()

    asyncio.run(ask())


def test_unfinished_second_request_is_timed_out():
    async def ask():
        async with connected() as (reader, writer):
            writer.write(HEAD + b"ab")
            assert await answer(reader) == b"HTTP/1.1 200ab"
            writer.write(HEAD[:-2])
            assert await closed(reader)

    asyncio.run(ask())


def test_slow_responses_and_bodies_are_not_timed_out():
    async def ask():
        async with connected() as (reader, writer):
            for body in (b"ab", b"cd"):
                writer.write(HEAD + body[:1])
                await asyncio.sleep(2 * SECONDS)
                writer.write(body[1:])
                assert await answer(reader) == b"HTTP/1.1 200" + body

    asyncio.run(ask())
