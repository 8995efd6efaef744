"""A soak: streams, wrong and large bodies, hostile grammars and idle connections, beside a steady client.

    python -m benchmarks.soak.run --minutes 30 --streams 2000 --bodies 10000 --out DIR
    python -m benchmarks.soak.run --minutes 0.5 --streams 40 --bodies 100     # a try

It starts ``jspec serve`` with the shipped models on the CPU, in a process of its own. It fails unless

- every answer of the steady client is the same text,
- every stream ends as it may (``streams.check``), and no answer has a status of 500 or above but 503 for grammars,
- ``/health`` never takes longer than ``MOST_SECONDS``,
- after the first tenth of the time, the server's memory grows by at most ``MOST_MEMORY`` above its largest until then,
- SIGTERM, while streams are under way, lets them end, and ends the process with exit code 0,
- nothing is left: no page, no request, no file, and no traceback in the log.

It prints what the steady client waited for and how much memory the server took, by tenths of the time, and writes the same
to ``soak.json``.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx
import numpy as np
import psutil

from benchmarks.soak.bodies import LARGEST, PATHS, body, fields, floods
from benchmarks.soak.hostile_grammars import ENDLESS, HOSTILE
from benchmarks.soak.streams import Answer, Asked, check, settled, soak
from jspec.commands.demo import FAMILY

STEADY = {"prompt": "import os\n", "temperature": 0.9, "seed": 3, "max_tokens": 12}
LAST = {"prompt": "class Queue:", "stream": True, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
SIZES = (2**10, 2**10, 2**14, 2**14, 2**17, LARGEST)  # bytes of the values of bodies; small ones are likelier
CLIENTS, SENDERS, IDLE = 10, 4, 100  # of streams, of bodies, and connections that say nothing
MOST_SECONDS, MOST_MEMORY = 1.0, 100 * 2**20
TENTHS = 10


@dataclasses.dataclass
class Seen:
    """What was measured, each with the seconds since the start.

    Attributes:
      steady: (when, seconds that the steady client waited).
      health: the same of ``/health``.
      memory: (when, bytes of the server's resident memory, without its child processes).
      statuses: how many bodies were answered with each status.
      wrong: what must not happen, in words.
      ended: what became of each stream.
    """

    steady: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    health: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    memory: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    statuses: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    wrong: list[str] = dataclasses.field(default_factory=list)
    ended: list[tuple[Asked, str, Answer]] = dataclasses.field(default_factory=list)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=2_000)
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, server(pathlib.Path(folder)) as (process, address, log):
        seen = asyncio.run(attack(psutil.Process(process.pid), address, args))
        statuses = asyncio.run(terminated(process, address))
        seen.wrong += [
            f"a stream under way at SIGTERM ended with {status}" for status in statuses if status != "[DONE]"
        ]
        if (code := process.wait(90)) != 0:
            seen.wrong.append(f"exit code {code}")
        text = log.read_text()
        if "Traceback" in text:
            seen.wrong.append(f"a traceback in the log: {text[text.index('Traceback') :][:2000]}")
    report(seen, args)
    sys.exit(bool(seen.wrong))


@contextlib.contextmanager
def server(folder: pathlib.Path) -> Iterator[tuple[subprocess.Popen, str, pathlib.Path]]:
    """A server of the shipped models: its process, its address and its log."""
    (template := folder / "chat.jinja").write_text(
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    command = [sys.executable, "-m", "jspec.cli", "serve", str(FAMILY / "target"), "--draft", str(FAMILY / "draft")]
    command += ["--num-speculative-tokens", "3", "--served-model-name", "family", "--port", "0", "--reproducible"]
    command += ["--max-num-seqs", "8", "--max-waiting", "32", "--max-model-len", "256", "--block-size", "32"]
    command += ["--dtype", "float32", "--chat-template", str(template), "--num-gpu-blocks-override", "40"]
    command += ["--log-level", "warning", "--shutdown-timeout", "60"]
    log = folder / "log"
    with log.open("w") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            while not (found := re.search(r"at (http://127.0.0.1:\d+)\n", log.read_text())):
                if process.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
            yield process, found[1], log
        finally:
            process.kill()


async def attack(process: psutil.Process, address: str, args: argparse.Namespace) -> Seen:
    """Everything at once, for so many minutes; returns what was seen."""
    seen, rng, seconds = Seen(), np.random.default_rng(args.seed), 60 * args.minutes
    values = {size: list(floods(size).values()) for size in set(SIZES)}  # before anything is timed in this process
    started = time.monotonic()
    over = asyncio.Event()
    before = await asyncio.to_thread(settled, address)
    files = process.num_fds()

    def now() -> float:
        return time.monotonic() - started

    beside = [
        asyncio.create_task(steady(address, seen, now, over)),
        asyncio.create_task(health(address, seen, now, over)),
        asyncio.create_task(memory(process, seen, now, over)),
        asyncio.create_task(idle(address, over)),
        asyncio.create_task(grammars(address, seen, over)),
    ]
    streams = soak(address, rng, args.streams, CLIENTS, pause=seconds * CLIENTS / args.streams)
    senders = [
        send_bodies(address, np.random.default_rng([args.seed, i]), values, args.bodies // SENDERS, seconds, seen)
        for i in range(SENDERS)
    ]
    seen.ended, *_ = await asyncio.gather(streams, *senders)
    over.set()
    await asyncio.gather(*beside)
    try:
        check(seen.ended)
    except AssertionError as error:
        seen.wrong.append(f"streams: {error}")
    after = await asyncio.to_thread(settled, address)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        if after[name]:
            seen.wrong.append(f"{name} is {after[name]}")
    if after["jspec:num_compilations_total"] != before["jspec:num_compilations_total"]:
        seen.wrong.append("programs were compiled")
    if process.num_fds() > files + 2:  # the probes' own connections may still be closing
        seen.wrong.append(f"{process.num_fds()} files are open, {files} were")
    return seen


async def steady(address: str, seen: Seen, now, over: asyncio.Event):
    """Ask for the same text twice a second."""
    async with httpx.AsyncClient(base_url=address, timeout=120, headers={"x-request-id": "steady"}) as client:
        expected = None
        while not over.is_set():
            asked = now()
            answer = await client.post("/v1/completions", json=STEADY)
            seen.steady.append((asked, now() - asked))
            text = answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text
            expected = text if expected is None else expected
            if answer.status_code != 429 and text != expected:
                seen.wrong.append(f"the steady client got {text!r} in place of {expected!r} after {asked:.0f} s")
            await asyncio.sleep(0.5)


async def health(address: str, seen: Seen, now, over: asyncio.Event):
    async with httpx.AsyncClient(base_url=address, timeout=60) as client:
        while not over.is_set():
            asked = now()
            await client.get("/health")
            seen.health.append((asked, now() - asked))
            if now() - asked > MOST_SECONDS:
                seen.wrong.append(f"/health took {now() - asked:.1f} s after {asked:.0f} s")
            await asyncio.sleep(0.1)


async def memory(process: psutil.Process, seen: Seen, now, over: asyncio.Event):
    while not over.is_set():
        seen.memory.append((now(), process.memory_info().rss))
        await asyncio.sleep(0.5)


async def idle(address: str, over: asyncio.Event):
    """Connections that say nothing, or half a head; those that the server closes are opened again."""
    host, port = address.removeprefix("http://").split(":")

    async def one(said: bytes):
        while not over.is_set():
            with contextlib.suppress(OSError, TimeoutError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(said)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(20):
                        await reader.read()
                writer.close()
            await asyncio.sleep(0.5)

    async with asyncio.TaskGroup() as group:
        for i in range(IDLE):
            group.create_task(one(b"" if i % 2 else b"POST /v1/completions HTTP/1.1\r\nHost: "))


async def grammars(address: str, seen: Seen, over: asyncio.Event):
    """Hostile grammars, one after the other."""
    forms = [*(form for form, _ in HOSTILE.values()), *ENDLESS]
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        index = 0
        while not over.is_set():
            answer = await client.post(
                "/v1/completions", json={"prompt": "x", "structured_outputs": forms[index % len(forms)]}
            )
            seen.statuses[f"grammar {answer.status_code}"] += 1
            if answer.status_code not in (400, 429, 503):
                seen.wrong.append(f"hostile grammar {index % len(forms)}: {answer.status_code} {answer.text[:200]}")
            index += 1
            await asyncio.sleep(2)


async def send_bodies(address: str, rng: np.random.Generator, values, count: int, seconds: float, seen: Seen):
    """Bodies whose fields have the largest or wrong ``values``, by their size, spread over ``seconds``."""
    every = list(fields())
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        for index in range(count):
            path, name, _ = every[rng.integers(len(every))]
            size = SIZES[rng.integers(len(SIZES) if index % 20 == 0 else 4)]
            content = body(path, name, values[size][rng.integers(len(values[size]))], **_short(path))
            started = time.monotonic()
            headers = {"content-type": "application/json"}
            answer = await client.post(path.partition(" ")[0], content=content, headers=headers)
            seen.statuses[str(answer.status_code)] += 1
            if answer.status_code >= 500:
                seen.wrong.append(f"{path} {name}: {answer.status_code} {answer.text[:200]}")
            await asyncio.sleep(max(0.0, seconds / count - (time.monotonic() - started)))


def _short(path: str) -> dict:
    """What keeps the answer to a body short, where it is one of tokens."""
    return {"max_tokens": 2} if "max_tokens" in PATHS[path].model_fields else {}


async def terminated(process: subprocess.Popen, address: str) -> list[str]:
    """The last events of streams that are under way when the server gets SIGTERM."""

    async def last(client: httpx.AsyncClient, begun: asyncio.Event) -> str:
        event = ""
        async with client.stream("POST", "/v1/completions", json=LAST) as answer:
            async for line in answer.aiter_lines():
                begun.set()
                event = line.removeprefix("data: ") or event
        return event

    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        begun = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(last(client, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*streams)


def report(seen: Seen, args: argparse.Namespace):
    """Print the table, and write it."""
    seconds = seen.steady[-1][0] + 1e-9
    rows = []
    for tenth in range(TENTHS):
        low, high = tenth * seconds / TENTHS, (tenth + 1) * seconds / TENTHS
        waits = sorted(wait for when, wait in seen.steady if low <= when <= high)
        rows.append(
            {
                "minutes": round(high / 60, 1),
                "steady p50 ms": round(1e3 * statistics.median(waits)) if waits else None,
                "steady p99 ms": round(1e3 * waits[min(int(0.99 * len(waits)), len(waits) - 1)]) if waits else None,
                "health max ms": round(1e3 * max((w for when, w in seen.health if low <= when <= high), default=0)),
                "memory MiB": round(max((b for when, b in seen.memory if low <= when <= high), default=0) / 2**20),
            }
        )
    first, largest = rows[0]["memory MiB"], max(row["memory MiB"] for row in rows)
    if largest - first > MOST_MEMORY / 2**20:
        seen.wrong.append(f"memory grew from {first} to {largest} MiB")
    became = collections.Counter(became for _, became, _ in seen.ended)
    print("".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value!s:>16}" for value in row.values()))
    print(f"streams: {dict(became)}\nbodies: {dict(seen.statuses)}")
    print("nothing wrong" if not seen.wrong else "\n".join(["WRONG:", *seen.wrong[:50]]))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        found = {"minutes": args.minutes, "rows": rows, "streams": became, "bodies": seen.statuses, "wrong": seen.wrong}
        (args.out / "soak.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
