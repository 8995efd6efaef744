"""Clients that take too long over the head of a request lose their connection; others keep theirs."""

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from loops import in_a_loop

from jspec.serving.http.connection import Connection
from jspec.serving.http.limits import Limits

SECONDS = 0.4  # that a head may take
MOST = 3  # connections
HEAD = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\n\r\n"


async def echo(scope, receive, send):
    """Answers with the request's body, after twice the time that a head may take."""
    body = await receive()
    while body["more_body"]:
        more = await receive()
        if more["type"] == "http.disconnect":
            return
        body["body"] += more["body"]
        body["more_body"] = more["more_body"]
    await asyncio.sleep(2 * SECONDS)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": body["body"]})


@contextlib.asynccontextmanager
async def connected(
    app: Any = echo, seconds: float = SECONDS
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a server with the deadline."""
    config = uvicorn.Config(
        app,
        port=0,
        http=functools.partial(Connection, Limits(max_header_seconds=seconds, max_connections=MOST)),
        lifespan="off",
        log_level="critical",
    )
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


@in_a_loop
async def test_silent_client_is_disconnected():
    async with connected() as (reader, _):
        assert await closed(reader)


@in_a_loop
async def test_slow_client_is_timed_out():
    async def drip(writer):
        for letter in HEAD * 100:
            writer.write(bytes([letter]))
            await asyncio.sleep(SECONDS / 8)

    async with connected() as (reader, writer):
        dripping = asyncio.create_task(drip(writer))
        assert await closed(reader)
        dripping.cancel()


@in_a_loop
async def test_unfinished_second_request_is_timed_out():
    async with connected() as (reader, writer):
        writer.write(HEAD + b"ab")
        assert await answer(reader) == b"HTTP/1.1 200ab"
        writer.write(HEAD[:-2])
        assert await closed(reader)


@in_a_loop
async def test_slow_responses_and_bodies_are_not_timed_out():
    async with connected() as (reader, writer):
        for body in (b"ab", b"cd"):
            writer.write(HEAD + body[:1])
            await asyncio.sleep(2 * SECONDS)
            writer.write(body[1:])
            assert await answer(reader) == b"HTTP/1.1 200" + body


async def asked_until_served(host: str, port: int) -> bytes:
    """The answer of the first connection that the server keeps: it takes a moment to notice that another was closed."""
    for _ in range(100):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(HEAD + b"cd")
            return await answer(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            await asyncio.sleep(SECONDS / 8)
        finally:
            writer.close()
    raise AssertionError("no connection was kept")


@in_a_loop
async def test_more_connections_than_the_limit_are_closed():
    async with connected(seconds=60) as (reader, writer):
        host, port = writer.get_extra_info("peername")[:2]
        others = [await asyncio.open_connection(host, port) for _ in range(MOST)]
        assert await closed(others[-1][0])
        writer.write(HEAD + b"ab")
        assert await answer(reader) == b"HTTP/1.1 200ab"
        others[0][1].close()
        assert await asked_until_served(host, port) == b"HTTP/1.1 200cd"
        for _, other in others:
            other.close()


def chunked(sizes) -> bytes:
    """A request whose body comes in chunks of these sizes."""
    head = HEAD.replace(b"content-length: 2", b"transfer-encoding: chunked")
    return head + b"".join(b"%x\r\n%s\r\n" % (size, b"x" * size) for size in sizes)


@in_a_loop
async def test_bodies_in_tiny_chunks_are_refused():
    """A million chunks of a byte cost a hundred times what the same bytes do in one."""

    async with connected() as (reader, writer):
        loop = asyncio.get_running_loop()
        writer.write(chunked([1] * 20_000))
        started = loop.time()
        assert (await reader.read()).startswith(b"HTTP/1.1 400")
        assert loop.time() - started < 20 * SECONDS


@in_a_loop
async def test_bodies_in_chunks_are_read():
    for sizes in ([1] * 200, [1000] * 500, [1] * 100 + [10_000] * 300):
        async with connected() as (reader, writer):
            writer.write(chunked([*sizes, 0]) + b"")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20 * SECONDS)
            assert head.startswith(b"HTTP/1.1 200")


async def begin(scope, receive, send):
    """Begins its answer before the body has come."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"x", "more_body": True})
    await asyncio.sleep(SECONDS)
    await send({"type": "http.response.body", "body": b"x"})


@pytest.mark.parametrize("app", [echo, begin])
def test_malformed_chunks_end_the_connection_without_a_traceback(caplog, monkeypatch, app):
    """While the body is read, and after the answer has begun."""
    errors, log = list[dict](), logging.getLogger("uvicorn.error")

    async def ask():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with connected(app) as (reader, writer):
            monkeypatch.setattr(log, "handlers", [caplog.handler])
            log.setLevel("WARNING")
            writer.write(chunked([2]))
            await asyncio.sleep(SECONDS / 4)
            writer.write(b"zzz\r\n")
            await asyncio.wait_for(reader.read(), 20 * SECONDS)

    asyncio.run(ask())
    assert errors == []
    assert [record.exc_info for record in caplog.records] == [None]
