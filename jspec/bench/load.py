"""Sends the requests of a benchmark at their times, and collects the responses."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence

import aiohttp

from jspec.bench.client import LONGEST_LINE, Endpoint, send_request
from jspec.bench.datasets import Sample
from jspec.bench.responses import Response

LONGEST_RESPONSE = 6 * 3600  # seconds
KEEP_ALIVE = (
    2  # seconds that a connection stays idle; servers close theirs after five or more, which a request must not hit
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The responses of a run, and its duration.

    Attributes:
      responses: in the order of the samples.
      seconds: from the first request to the last response.
      interrupted: whether the run was cancelled; requests that had no response by then are left out.
    """

    responses: list[Response]
    seconds: float
    interrupted: bool


def session() -> aiohttp.ClientSession:
    """An HTTP client with as many connections as there are requests under way."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(total=LONGEST_RESPONSE),
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
    """Send each sample at its time, and wait for all responses.

    A cancellation, which is what Ctrl-C is to a program under ``asyncio.run``, ends the run: requests under way are
    cancelled, and the responses so far are returned.

    Args:
      session: the HTTP client.
      endpoint: where the requests go, and what they have in common.
      samples: the prompts.
      times: seconds after the beginning, one for each sample, ascending.
      max_concurrency: how many requests are under way at most; others wait here, and their time begins when they are sent.
      ended: called after each response.
    """
    responses: dict[int, Response] = {}
    interrupted, began = False, time.perf_counter()
    room = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def send_one(place: int, sample: Sample):
        async with room:
            responses[place] = await send_request(session, endpoint, sample)
        ended()

    try:
        async with asyncio.TaskGroup() as group:
            for place, (sample, at) in enumerate(zip(samples, times, strict=True)):
                if (wait := began + at - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                group.create_task(send_one(place, sample))
    except asyncio.CancelledError:
        interrupted = True
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
    seconds = time.perf_counter() - began
    return Outcome([responses[place] for place in sorted(responses)], seconds, interrupted)
