"""What runs out: open files, connections, and memory for bodies. Each is told, and ends with those who caused it."""

import asyncio
import errno
import resource

import pytest
from loops import in_a_loop
from starlette.requests import Request

from jspec.serving.http.errors import ApiError
from jspec.serving.http.limits import Limits
from jspec.serving.http.loop_monitor import LoopMonitor
from jspec.serving.http.request_body import Bodies
from jspec.serving.http.server import KEPT_FILES, _LoopErrors, most_connections


def request(chunks, length: int | None = None) -> Request:
    """A request whose body comes in these chunks; None waits for ever."""
    headers = [] if length is None else [(b"content-length", b"%d" % length)]
    rest = iter(chunks)

    async def receive():
        chunk = next(rest, b"")
        if chunk is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": chunk, "more_body": chunk != b""}

    return Request({"type": "http", "headers": headers}, receive)


LIMITS = Limits(max_body_bytes=100, max_pending_bytes=150, max_body_seconds=5)


async def read(bodies: Bodies, asked: Request, entered: asyncio.Event, left: asyncio.Event):
    async with bodies.read(asked) as body:
        entered.set()
        await left.wait()
        return body


@pytest.mark.parametrize("announced", [True, False])
@in_a_loop
async def test_bodies_under_way_have_a_budget(announced):
    bodies, entered, left = Bodies(LIMITS), asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(read(bodies, request([b"a" * 90], 90 if announced else None), entered, left))
    await entered.wait()
    assert bodies.pending_bytes == 90
    with pytest.raises(ApiError) as refused:
        await read(bodies, request([b"b" * 70], 70 if announced else None), asyncio.Event(), left)
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "1"})
    assert bodies.pending_bytes == 90
    left.set()
    assert await first == b"a" * 90
    assert bodies.pending_bytes == 0
    assert await read(bodies, request([b"b" * 70]), asyncio.Event(), left) == b"b" * 70


@in_a_loop
async def test_an_announced_body_counts_before_it_comes():
    bodies = Bodies(LIMITS)
    waiting = asyncio.create_task(read(bodies, request([None], 80), asyncio.Event(), asyncio.Event()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bodies.pending_bytes == 80
    waiting.cancel()  # its client leaves
    await asyncio.gather(waiting, return_exceptions=True)
    assert bodies.pending_bytes == 0


def test_the_budget_holds_a_body():
    with pytest.raises(ValueError, match="max_pending_bytes=99: expected at least max_body_bytes=100"):
        Limits(max_body_bytes=100, max_pending_bytes=99)


def test_connections_leave_files_for_the_rest(monkeypatch):
    limits = {"now": (256, 1024)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(now=new))
    assert most_connections(4096) == 1024 - KEPT_FILES
    assert limits["now"] == (1024, 1024)
    assert most_connections(100) == 100
    limits["now"] = (64, 64)
    assert most_connections(4096) == 1


def test_used_up_files_are_told_once_a_minute(caplog):
    loop, now = asyncio.new_event_loop(), [0.0]
    try:
        loop.time = lambda: now[0]
        handler, full = _LoopErrors(), {"message": "socket.accept()", "exception": OSError(errno.EMFILE, "too many")}
        for _ in range(1000):
            now[0] += 0.1
            handler(loop, full)
        assert [record.exc_info for record in caplog.records] == [None, None]
        assert "ulimit -n" in caplog.text
        handler(loop, {"message": "other", "exception": ZeroDivisionError("other")})
        assert caplog.records[-1].exc_info is not None
    finally:
        loop.close()


@in_a_loop
async def test_the_longest_pause_of_an_event_loop_is_measured():
    monitor = LoopMonitor()
    assert monitor.longest_pause == 0
    async with monitor.running():
        await asyncio.sleep(0.05)
        end = asyncio.get_running_loop().time() + 0.3
        while asyncio.get_running_loop().time() < end:
            pass
        await asyncio.sleep(0.05)
        assert monitor.longest_pause >= 0.25
