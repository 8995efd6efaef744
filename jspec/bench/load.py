"""Sends the requests of a benchmark at their times, and collects the answers."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import aiohttp

from jspec.bench.answers import Answer
from jspec.bench.client import LONGEST_LINE, Endpoint, ask
from jspec.bench.datasets import Sample

LONGEST_ANSWER = 6 * 3600  # seconds
KEPT_ALIVE = 2  # seconds; servers close idle connections after five or more, and a request must not meet that


@dataclasses.dataclass
class Outcome:
    """What a run gave.

    Attributes:
      answers: in the order of the samples.
      seconds: from the first request to the last answer.
      interrupted: whether the run was cancelled; requests that had no answer by then are left out.
    """

    answers: list[Answer] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False


def session() -> aiohttp.ClientSession:
    """A client for as many connections as there are requests under way."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_ALIVE),
        timeout=aiohttp.ClientTimeout(total=LONGEST_ANSWER),
        read_bufsize=LONGEST_LINE,
    )


async def send(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    samples: Sequence[Sample],
    times: Sequence[float],
    max_concurrency: int | None = None,
    ended: Callable[[], object] = lambda: None,
) -> Outcome:
    """Send each sample at its time, and wait for all answers.

    A cancellation, which is what Ctrl-C is to a program under ``asyncio.run``, ends the run: every request is given up,
    and what was measured so far is returned.

    Args:
      session: the client.
      endpoint: where and how to ask.
      samples: what to ask.
      times: seconds after the beginning, one for each sample, ascending.
      max_concurrency: how many requests are under way at most; others wait here, and their time begins when they are sent.
      ended: called after each answer.
    """
    answers: dict[int, Answer] = {}
    outcome, began = Outcome(), time.perf_counter()
    room = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(place: int, sample: Sample):
        async with room:
            answers[place] = await ask(session, endpoint, sample)
        ended()

    try:
        async with asyncio.TaskGroup() as group:
            for place, (sample, at) in enumerate(zip(samples, times, strict=True)):
                if (wait := began + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(place, sample))
    except asyncio.CancelledError:
        outcome.interrupted = True
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
    outcome.seconds = time.perf_counter() - began
    outcome.answers = [answers[place] for place in sorted(answers)]
    return outcome
