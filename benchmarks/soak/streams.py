"""Random streamed requests over HTTP: who asks for what, who hangs up, who gives up, and who speaks no HTTP."""

import asyncio
import collections
import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np

PAUSE = 0.1  # seconds until one that was refused asks again
PATIENCE = 240  # seconds for one answer, which nobody should need
PROMPTS = (
    "import os\nimport sys\n\n\ndef main(argv=None):",
    "class Queue:",
    "x = ",
    "def fibonacci(n):\n    if n < 2:\n" * 6,
)
MALFORMED: tuple[dict[str, Any], ...] = (
    {"temperature": -1},
    {"prompt": 5},
    {"n": 0},
    {"max_draft": 2},
    {"model": "nobody"},
    {"logit_bias": {"a": 1}},
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """One request of the soak.

    Attributes:
      path, body: of the request.
      leaves: after so many chunks its client hangs up; None if it stays.
      deadline: after so many seconds its client gives up; None if it waits.
      malformed: whether the server has to refuse it.
    """

    path: str
    body: dict[str, Any]
    leaves: int | None = None
    deadline: float | None = None
    malformed: bool = False

    @staticmethod
    def random(rng: np.random.Generator) -> "Asked":
        def one_of(*choices):
            return choices[rng.integers(len(choices))]

        body: dict[str, Any] = {
            "stream": True,
            "temperature": one_of(0, 0, 0.7, 1.2),
            "seed": int(rng.integers(2**63)),
            "max_tokens": int(rng.integers(1, 33)),
            "ignore_eos": one_of(True, False),
            "n": one_of(1, 1, 1, 2, 3),
            "stop": [one_of("return", "\n\n", "self", "(")] if rng.random() < 0.2 else None,
            "repetition_penalty": one_of(1.0, 1.0, 1.0, 1.3),
            "presence_penalty": one_of(0.0, 0.0, 0.0, 0.5),
            "max_drafts": one_of(None, None, None, 0, 1),
            "return_token_sources": one_of(None, True),
        }
        counted = rng.random() < 0.2
        if rng.random() < 0.3:
            path = "/v1/chat/completions"
            body |= {"messages": [{"role": "user", "content": one_of(*PROMPTS)}], "logprobs": counted}
        else:
            path = "/v1/completions"
            body |= {"prompt": one_of(*PROMPTS), "logprobs": 2 if counted else None}
        fate = rng.random()
        if fate < 0.15:
            return Asked(path, body, leaves=int(rng.integers(6)))
        if fate < 0.25:
            return Asked(path, body, deadline=float(rng.choice([0.001, 0.02, 0.1, 0.5])))
        if fate < 0.35:
            return Asked("/v1/completions", {"prompt": "x", "stream": True, **one_of(*MALFORMED)}, malformed=True)
        return Asked(path, body)


Answer = dict[int, tuple[str, str]]  # choice -> its text, and why it ended


async def answer_of(client: httpx.AsyncClient, asked: Asked) -> tuple[str, Answer]:
    """What became of a request, and its answer if that is whole: ``answered``, ``left``, ``late``, or a status as text."""
    texts: dict[int, str] = collections.defaultdict(str)
    reasons: dict[int, str] = {}
    try:
        async with (
            asyncio.timeout(asked.deadline or PATIENCE),
            client.stream("POST", asked.path, json=asked.body) as answer,
        ):
            if answer.status_code != 200:
                assert set(json.loads(await answer.aread())["error"]) == {"message", "type", "param", "code"}
                return str(answer.status_code), {}
            count = 0
            async for line in answer.aiter_lines():
                if count == asked.leaves:
                    return "left", {}
                if line == "data: [DONE]":
                    assert reasons.keys() == set(range(asked.body["n"]))
                    return "answered", {i: (texts[i], reason) for i, reason in reasons.items()}
                if line:
                    count += 1
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        assert choice["index"] not in reasons, "it had ended"
                        text = choice["text"] if "text" in choice else choice["delta"].get("content")
                        texts[choice["index"]] += text or ""
                        if choice["finish_reason"] is not None:
                            reasons[choice["index"]] = choice["finish_reason"]
        raise AssertionError("a stream ended without [DONE]")
    except TimeoutError:
        assert asked.deadline is not None, "no answer came"
        return "late", {}


async def garbage(address: str, rng: np.random.Generator):
    """A neighbour who speaks no HTTP, or not to its end."""
    host, port = address.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    sent = (b"", b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{", b"\xff" * 999, b"GET")
    writer.write(sent[rng.integers(len(sent))])
    with contextlib.suppress(ConnectionError):  # the server may hang up first
        await writer.drain()
        writer.close()
        await writer.wait_closed()


async def soak(
    address: str, rng: np.random.Generator, count: int, clients: int, pause: float = 0.0
) -> list[tuple[Asked, str, Answer]]:
    """Send requests; returns what became of each, and of those times when it was told to wait.

    Args:
      address: of the server.
      rng: of the requests.
      count: how many there are.
      clients: how many are under way at a time.
      pause: seconds between two requests of a client.
    """
    left, ended = iter([Asked.random(rng) for _ in range(count)]), []

    async with httpx.AsyncClient(base_url=address, timeout=None) as client:

        async def one_client():
            for asked in left:
                if rng.random() < 0.1:
                    await garbage(address, rng)
                became = None
                while became in (None, "429"):
                    became, answer = await answer_of(client, asked)
                    ended.append((asked, became, answer))
                    await asyncio.sleep(PAUSE if became == "429" else pause)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(one_client())
    return ended


async def alone(address: str, asked: list[Asked]) -> list[tuple[str, Answer]]:
    async with httpx.AsyncClient(base_url=address, timeout=None) as client:
        return [await answer_of(client, one) for one in asked]


def metrics(address: str) -> dict[str, float]:
    """The sums of all samples of a name."""
    found: dict[str, float] = collections.defaultdict(float)
    for line in httpx.get(f"{address}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            found[name.partition("{")[0]] += float(value)
    return found


def until(condition: Callable[[], bool], complaint: str):
    """Wait for what the server does soon after its clients have gone, such as closing their connections."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.05)


def settled(address: str) -> dict[str, float]:
    """The metrics when the server has noticed that nobody is there any more, and its engine that nobody wants a text."""
    until(lambda: metrics(address)["jspec:num_http_requests"] <= 1, "requests are open")  # the one that asks
    left = "vllm:num_requests_running", "vllm:num_requests_waiting"
    until(lambda: not any(metrics(address)[name] for name in left), "requests are left in the engine")
    return metrics(address)


def check(ended: list[tuple[Asked, str, Answer]], ways: tuple[str, ...] = ("answered", "400", "left", "late")):
    """Every request ended in a way that it may, at last or at once, and each of ``ways`` came."""
    for asked, became, _ in ended:
        may = {"429"}
        if asked.malformed:
            may |= {"400", "404"}
        else:
            may |= {"answered"} | ({"left"} if asked.leaves is not None else set())
            may |= {"late"} if asked.deadline is not None else set()
        assert became in may, (asked, became)
    came = collections.Counter(became for _, became, _ in ended)
    assert all(came[became] for became in ways), came
    assert came["answered"] > (len(ended) - came["429"]) / 2, came
