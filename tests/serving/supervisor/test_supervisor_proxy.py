"""Responses of a supervisor to clients while its worker, a script, responds, hangs or dies."""

import asyncio
import json
import os
import time

import httpx
import pytest
from loops import in_a_loop
from supervised_worker import CHUNK, EVENT, PATIENCE, STREAM, TOKEN, FakeMember, chunk, running, whole

from jspec.serving.supervisor import proxy
from jspec.serving.supervisor.messages import CLIENT, HEADER


def error_of(response: httpx.Response, status: int = 503) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if status == 503:
        assert int(response.headers["retry-after"]) > 0
    return error["message"]


@in_a_loop
async def test_requests_and_responses_pass_unchanged():
    async def answer(asked, reader, writer):
        content = asked.body[::-1]
        writer.write(
            whole(b"418 Teapot", content, b"x-mine: 1", b"x-mine: 2", b"content-type: text/plain", b"date: then")
        )

    async with running(answer) as (worker, _, client):
        sent = {
            "authorization": "Bearer \u00e9",
            "x-sent": "a",
            "connection": "close",
            HEADER: "wrong",
            CLIENT: "10.0.0.1",
            "x-request-id": "mine",
            "cookie": "a=b",
        }
        body = os.urandom(3 * 2**20)
        path = "/v1/models/a%2Fb%20c?x=%20&y=1+2"
        response = await client.post(path, headers=httpx.Headers(sent, encoding="utf-8"), content=body)
        assert (response.status_code, response.content) == (418, body[::-1])
        assert response.headers.get_list("x-mine") == ["1", "2"]
        assert len(response.headers.get_list("date")) == len(response.headers.get_list("content-length")) == 1
        (asked,) = worker.asked
        assert asked.line == f"POST {path} HTTP/1.1"
        assert asked.body == body
        headers = dict(asked.headers)
        assert headers["x-sent"] == "a"
        assert headers["cookie"] == "a=b"
        assert [value for name, value in asked.headers if name == CLIENT] == ["127.0.0.1"]
        assert headers["x-request-id"] == response.headers["x-request-id"] == "mine"
        assert headers["authorization"].encode("latin-1").decode() == "Bearer \u00e9"
        assert headers["content-length"] == str(len(body))
        response = await client.get("/version")
        assert response.status_code == 418
        assert "content-length" not in dict(worker.asked[1].headers)


@in_a_loop
async def test_events_pass_as_they_come():
    go = asyncio.Event()

    async def answer(asked, reader, writer):
        writer.write(STREAM + chunk(EVENT) + chunk(EVENT[:9]))
        await writer.drain()
        await go.wait()
        writer.write(chunk(EVENT[9:]) + chunk(b"data: [DONE]\n\n") + chunk(b""))

    async with running(answer) as (_, _, client), client.stream("POST", "/v1/completions", json=CHUNK) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        parts = response.aiter_raw()
        assert await anext(parts) == EVENT  # while the worker waits
        go.set()
        assert b"".join([part async for part in parts]) == EVENT + b"data: [DONE]\n\n"


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("sent", [b"", STREAM[:30], whole(b"200 OK", b"0123456789")[:-4]], ids=["none", "head", "body"])
@in_a_loop
async def test_worker_death_before_the_first_byte_is_503(sent, reset):
    """What is no stream is an answer as a whole, or an error."""

    async def die(asked, reader, writer):
        writer.write(sent)
        await writer.drain()
        if reset:
            writer.transport.abort()

    async with running(die) as (worker, _, client):
        message = error_of(await client.post("/v1/completions", json=CHUNK))
        assert message == "the request was lost with a process that runs the model: try again"
        assert len(worker.asked) == 1  # it is not asked a second time


@in_a_loop
async def test_worker_that_accepts_no_connection_is_503():
    async with running(None) as (worker, _, client):
        worker.close()
        error_of(await client.post("/v1/completions", json=CHUNK))
        error_of(await client.get("/health"))


@pytest.mark.parametrize("half", [b"", EVENT[:11], EVENT[:-1]], ids=["between", "within", "almost"])
@in_a_loop
async def test_worker_death_in_a_stream_ends_it_with_an_error(half):
    async def die(asked, reader, writer):
        writer.write(STREAM + chunk(EVENT) + (chunk(half) if half else b""))

    async with running(die) as (_, _, client):
        response = await client.post("/v1/completions", json=CHUNK)
        first, error, done, rest = response.text.split("\n\n")
        assert (response.status_code, first.encode() + b"\n\n", done, rest) == (200, EVENT, "data: [DONE]", "")
        assert "was lost" in json.loads(error.removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ],
)
@in_a_loop
async def test_worker_death_after_a_stream_is_not_an_error(path, last):
    async def die(asked, reader, writer):
        writer.write(STREAM + chunk(EVENT) + chunk(last))

    async with running(die) as (_, _, client):
        response = await client.post(path, json=CHUNK)
        assert response.content == EVENT + last


@in_a_loop
async def test_streams_of_a_lost_worker_end_with_open_connections(monkeypatch):
    """As those of a host that has vanished. What it has sent before has a moment to arrive."""
    monkeypatch.setattr(proxy, "LAST_BYTES", 0.5)

    half = asyncio.Event()

    async def hang(asked, reader, writer):
        if "completions" in asked.line:
            writer.write(STREAM + chunk(EVENT))
            await writer.drain()
        half.set()
        await asyncio.sleep(PATIENCE)

    async with running(hang) as (_, side, client):
        asking = [asyncio.ensure_future(client.post(path, json=CHUNK)) for path in ("/v1/completions", "/tokenize")]
        await half.wait()
        await asyncio.sleep(0.2)
        began = time.monotonic()
        side.shut("it was lost")
        stream, answer = await asyncio.gather(*asking)
        assert 0.4 < time.monotonic() - began < 10
        assert "was lost" in stream.text
        assert stream.text.endswith("data: [DONE]\n\n")
        error_of(answer)
        for path in ("/health", "/v1/models", "/metrics"):
            assert error_of(await client.get(path)) == "it was lost"


@in_a_loop
async def test_next_worker_gets_the_requests():
    async def first(asked, reader, writer):
        writer.write(whole(b"200 OK", b"first"))

    async def second(asked, reader, writer):
        writer.write(whole(b"200 OK", b"second"))

    async with running(first) as (_, side, client):
        assert (await client.get("/version")).text == "first"
        side.shut("it was lost")
        error_of(await client.get("/version"))
        other = FakeMember(second)
        async with await asyncio.start_server(other.serve, "127.0.0.1", 0) as server:
            address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            other.health = b"503 Not yet"
            with pytest.raises(OSError, match="it reported that it was ready, and did not respond"):
                await side.open(address, TOKEN)
            error_of(await client.get("/version"))
            other.health = b"200 OK"
            await side.open(address, TOKEN)
            assert (await client.get("/version")).text == "second"


@pytest.mark.parametrize("streams", [False, True])
@in_a_loop
async def test_disconnected_client_closes_the_workers_connection(streams):
    begun, gone = asyncio.Event(), asyncio.Event()

    async def wait(asked, reader, writer):
        if streams:
            writer.write(STREAM + chunk(EVENT))
            await writer.drain()
        begun.set()
        assert await reader.read() == b""
        gone.set()

    async with running(wait) as (_, side, client):
        asking = asyncio.ensure_future(client.post("/v1/completions", json=CHUNK))
        await begun.wait()
        assert not gone.is_set()
        asking.cancel()
        await asyncio.wait_for(gone.wait(), 10)
        assert side._proxy.upstream._idle.is_set()


@in_a_loop
async def test_slow_client_slows_only_its_own_stream():
    events = EVENT * 2000

    written = 0

    async def flood(asked, reader, writer):
        nonlocal written
        if "version" in asked.line:
            writer.write(whole(b"200 OK", b"1"))
            return
        writer.write(STREAM)
        for _ in range(2000):
            writer.write(chunk(events))
            await writer.drain()
            written += len(events)
        writer.write(chunk(b""))

    async with running(flood) as (_, _, client), client.stream("POST", "/v1/completions", json=CHUNK) as response:
        before = -1
        while written > before:
            before = written
            await asyncio.sleep(0.5)
        assert written < 2000 * len(events) / 2  # neither side keeps what the client does not take
        assert (await client.get("/version")).text == "1"
        size = 0
        async for part in response.aiter_raw():
            size += len(part)
        assert size == 2000 * len(events)


@in_a_loop
async def test_supervisor_refuses_bad_requests_itself():
    async def never(asked, reader, writer):
        raise AssertionError("the worker has heard of it")

    async def dripping(body: bytes):
        for i in range(len(body)):
            yield body[i : i + 1]
            await asyncio.sleep(0.3)

    limits = {"max_body_bytes": 1000, "max_body_seconds": 0.5}
    async with running(never, keys=["a-key"], **limits) as (_, side, client):
        assert "no API key" in error_of(await client.post("/v1/completions", content=b"x" * 5000), 401)
        assert (await client.get("/health")).status_code == 200
        client.headers["authorization"] = "Bearer a-key"
        assert "--max-body-bytes" in error_of(await client.post("/v1/completions", content=b"x" * 1001), 413)
        assert "did not arrive" in error_of(await client.post("/v1/completions", content=dripping(b"abcdef")), 408)
        reader, writer = await asyncio.open_connection("127.0.0.1", side._bound.getsockname()[1])
        for target in (b"@127.0.0.2:1/", b"http://127.0.0.2:1/health"):
            head = b"GET " + target + b" HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer a-key\r\n\r\n"
            writer.write(head)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
            await reader.readuntil(b"}}")
        writer.close()


@in_a_loop
async def test_errors_of_messages_have_anthropics_form():
    """Anthropic's clients leave out events without a name, and would take what has come for the whole message."""

    async def die(asked, reader, writer):
        writer.write(STREAM + chunk(EVENT))

    async with running(die, keys=["secret"]) as (_, side, client):
        refused = await client.post("/v1/messages", json=CHUNK)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        assert refused.json()["type"] == "error"
        client.headers["x-api-key"] = "secret"
        name, data = (await client.post("/v1/messages", json=CHUNK)).content.removeprefix(EVENT).split(b"\n", 1)
        assert name == b"event: error"
        told = json.loads(data.removeprefix(b"data: "))
        assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
        side.shut("it was lost")
        lost = await client.post("/v1/messages", json=CHUNK)
        assert (lost.status_code, lost.json()["error"]) == (529, {"type": "overloaded_error", "message": "it was lost"})
        other = await client.post("/v1/messages", json=CHUNK, headers={"host": "evil.example"})
        assert (other.status_code, other.json()["error"]["type"]) == (403, "permission_error")
