"""The largest values that fit in a body, in every field, and grammars that were written to do harm: nobody else notices.

Beside each of them a steady client asks for the same seeded text, and ``/health`` has to answer within a second.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator

import httpx
import psutil
import pytest
from loops import in_a_loop
from server_process import serving
from tiers import in_tiers

from benchmarks.soak.bodies import LARGEST, MANY, PATHS, body, fields, flooded
from benchmarks.soak.hostile_grammars import ENDLESS, HOSTILE
from jspec.sampling.params import MAX_STOP_TOKENS
from jspec.serving.generation.list_limits import most_entries
from jspec.serving.http.limits import Limits

SIZES = [2**19, pytest.param(LARGEST, marks=pytest.mark.long)]
MOST_SECONDS = 1.0  # of /health
MOST_MEMORY = 100 * 2**20  # bytes that a server may have grown by
STEADY = {"prompt": "import os\n", "temperature": 0.9, "seed": 3, "max_tokens": 12}
SECONDS = 2  # of CPU for each of the endless ones, which two processes try at a time


def test_every_list_has_a_limit():
    """A field that is added later is in one of the two lists, or this fails."""
    unlooked_at = {"prompt", "token_ids", "system"}  # with entries of type Any: the server looks at them itself
    most = most_entries(Limits(), 1000, 1000)
    assert {name for _, name, takes in fields() if takes & {list, dict}} == most.keys() | unlooked_at
    assert Limits().max_stop_token_ids == MAX_STOP_TOKENS


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[tuple[psutil.Process, str]]:
    options = ("--max-grammar-seconds", str(SECONDS), "--max-grammar-wait", "1")
    with serving(tmp_path_factory.mktemp("floods"), *options) as (process, address):
        assert tried(process) == []  # the process that tries grammars is there before anybody asks
        yield process, address


@contextlib.asynccontextmanager
async def steady(address: str) -> AsyncIterator[list[float]]:
    """A client that asks the same again and again, and how long ``/health`` takes meanwhile, in seconds."""
    delays: list[float] = []
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        expected = (await client.post("/v1/completions", json=STEADY)).json()["choices"][0]["text"]
        over = asyncio.Event()

        async def ask():
            while not over.is_set():
                answer = await client.post("/v1/completions", json=STEADY)
                assert answer.json()["choices"][0]["text"] == expected
                await asyncio.sleep(0.2)

        async def look():
            while not over.is_set():
                started = time.monotonic()
                assert (await client.get("/health")).status_code == 200
                delays.append(time.monotonic() - started)
                await asyncio.sleep(0.05)

        beside = [asyncio.ensure_future(ask()), asyncio.ensure_future(look())]
        await asyncio.sleep(0)
        try:
            yield delays
        finally:
            over.set()
            await asyncio.gather(*beside)
        assert (await client.post("/v1/completions", json=STEADY)).json()["choices"][0]["text"] == expected


async def send(address: str, path: str, content: bytes) -> tuple[int, str]:
    """The status of an answer, and its beginning."""
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=address, timeout=300) as client:
        answer = await client.post(path.partition(" ")[0], content=content, headers=headers)
        return answer.status_code, answer.text[:300]


async def endless_ones(address: str) -> list[asyncio.Task]:
    """Requests with grammars whose compilation does not end, of which some are tried by now."""
    path = "/v1/completions"
    bodies = (body(path, "structured_outputs", json.dumps(form)) for form in ENDLESS)
    tasks = [asyncio.ensure_future(send(address, path, content)) for content in bodies]
    await asyncio.sleep(0.5)
    return tasks


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("every", in_tiers((4, 1), test=(4,)))
@pytest.mark.parametrize("path", in_tiers(PATHS, test=("/v1/chat/completions",)))
def test_no_field_is_too_large_for_the_others(server, path, size, every):
    process, address = server
    before, slow, wrong = process.memory_info().rss, [], []
    most = most_entries(Limits(), 1000, 1000)

    async def flood():
        async with steady(address) as delays:
            for name, flood, value in flooded(path, size, every):
                del delays[:]
                status, text = await send(address, path, body(path, name, value))
                if max(delays, default=0) > MOST_SECONDS:
                    slow.append((name, flood, round(max(delays), 2)))
                if status >= 500 or (name in most and flood in MANY and status != 400):
                    wrong.append((name, flood, status, text))

    asyncio.run(flood())
    assert (slow, wrong) == ([], [])
    assert process.memory_info().rss < before + MOST_MEMORY


@pytest.mark.parametrize(
    ("name", "entries", "others"),
    [
        ("allowed_token_ids", range(2048), {"n": 8}),
        ("stop_token_ids", range(1000, 1120), {"n": 8}),
        ("truncate_prompt_tokens", None, {"prompt": "ab c" * (LARGEST // 4)}),
    ],
)
@in_a_loop
async def test_largest_valid_values_are_accepted(server, name, entries, others):
    _, address = server
    value = json.dumps(20 if entries is None else list(entries))

    async with steady(address) as delays:
        status, text = await send(address, "/v1/completions", body("/v1/completions", name, value, **others))
        assert status == 200, text
    assert max(delays) < MOST_SECONDS


@pytest.mark.parametrize("path", in_tiers(("/v1/completions", "/v1/chat/completions"), test=("/v1/completions",)))
def test_hostile_grammars_are_refused(server, path):
    process, address = server
    before = process.memory_info().rss

    async def ask():
        async with steady(address) as delays:
            for name, (form, message) in HOSTILE.items():
                content = body(path, "structured_outputs", json.dumps(form))
                status, text = await send(address, path, content)
                assert (status, message in text) == (400, True), (name, status, text)
        assert max(delays) < MOST_SECONDS

    asyncio.run(ask())
    assert process.memory_info().rss < before + MOST_MEMORY


def test_endless_grammars_are_refused(server):
    """Four are tried two at a time, until their CPU time is over. Meanwhile plain requests are served, and a grammar that
    finds no process free is told to come again."""
    process, address = server
    before, path = process.memory_info().rss, "/v1/completions"
    good = body(path, "structured_outputs", json.dumps({"regex": "[0-9]{4}"}))

    async def ask():
        async with steady(address) as delays:
            endless = await endless_ones(address)
            status, text = await send(address, path, good)
            assert (status, "try again later" in text) == (503, True), text
            for status, text in await asyncio.gather(*endless):
                assert (status, "CPU seconds" in text or "MB of memory" in text) == (400, True) or status == 503, text
            status, text = await send(address, path, good)
            assert status == 200, text
        assert max(delays) < MOST_SECONDS

    asyncio.run(ask())
    assert process.memory_info().rss < before + MOST_MEMORY


@in_a_loop
async def test_work_for_a_disconnected_client_is_cancelled(server):
    process, address = server

    async with steady(address) as delays:
        tasks = await endless_ones(address)
        assert len(tried(process)) == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        deadline = time.monotonic() + SECONDS / 2
        while tried(process):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    assert max(delays) < MOST_SECONDS


def tried(process: psutil.Process) -> list[psutil.Process]:
    """The processes in which grammars are tried at the moment."""
    (compiler,) = [child for child in process.children() if "jspec.text.grammar.worker" in child.cmdline()]
    return [child for child in compiler.children() if child.status() != psutil.STATUS_ZOMBIE]


def test_the_server_ends_while_grammars_are_tried(tmp_path):
    """``serving`` sends SIGTERM, and waits for the process to end in order."""
    with serving(tmp_path, "--max-grammar-seconds", "60", "--shutdown-timeout", "1") as (process, address):

        async def ask():
            tasks = await endless_ones(address)
            children = [process, *process.children(recursive=True)]
            process.terminate()
            statuses = [status for status, _ in await asyncio.gather(*tasks)]
            assert statuses == [503] * len(ENDLESS)
            return children

        children = asyncio.run(ask())
        assert process.wait(30) == 0
        _, alive = psutil.wait_procs(children[1:], timeout=10)
        assert alive == []
