"""Requests that arrive at an engine, and when the host learnt of their tokens."""

import contextlib
import dataclasses
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jspec.engine.engine import Engine
from jspec.engine.metrics import Metrics
from jspec.engine.request import Constraint
from jspec.sampling.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Load:
    """A request.

    Attributes:
      prompt: its tokens.
      new: how many tokens it gets, exactly.
      at: seconds from the beginning until it arrives.
      options: more of its ``SamplingParams``.
    """

    prompt: Sequence[int]
    new: int
    at: float = 0.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Followed:
    """What became of a request.

    Attributes:
      arrived: when it was there to be added; the engine may have been in a step then.
      told: when the host learnt of tokens, and of how many.
      text: the tokens.
      rounds: in how many rounds it got them.
      cached: tokens of its prompt that were found in the prefix cache; 0 until it ends.
      finished: whether it has ended.
    """

    arrived: float
    told: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    text: list[int] = dataclasses.field(default_factory=list)
    rounds: int = 0
    cached: int = 0
    finished: bool = False

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.told)

    @property
    def first(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.told[0][0] - self.arrived

    @property
    def between(self) -> list[float]:
        """Seconds between its tokens after the first call: those of a call share the time since the call before."""
        pairs = zip(self.told, self.told[1:], strict=False)
        return [(now - before) / count for (before, _), (now, count) in pairs for _ in range(count)]


class Client:
    """Adds requests to an engine, steps it, and takes down when tokens come. Times are of ``time.perf_counter``.

    Args:
      engine: an engine without other clients.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._followed: dict[int, Followed] = {}
        self._count = 0

    def add(self, load: Load, arrived: float | None = None, constraint: Constraint | None = None) -> Followed:
        """Add a request, sampled at temperature 1. Nothing but its length ends it."""
        followed = Followed(time.perf_counter() if arrived is None else arrived)
        params = SamplingParams(max_tokens=load.new, ignore_eos=True, seed=self._count, **load.options)
        request = dataclasses.replace(self.engine.request(load.prompt, params), constraint=constraint)
        self._followed[self.engine.add_request(request)] = followed
        self._count += 1
        return followed

    def step(self):
        """Wait for what is new.

        Raises:
          RuntimeError: a request failed.
        """
        deltas = self.engine.step()
        now = time.perf_counter()
        for delta in deltas:
            request = self._followed[delta.id]
            if delta.token_ids:
                request.told.append((now, len(delta.token_ids)))
                request.text += delta.token_ids
                request.rounds += delta.accepted.count(False)  # a round ends with a token that is no draft
            if delta.finished and delta.result is not None:
                del self._followed[delta.id]
                request.finished, request.cached = True, delta.result.num_cached_tokens
                if delta.result.finish_reason == "error":
                    raise RuntimeError(f"request {delta.id} failed: {delta.result.stop_reason}")

    def until_first(self, requests: Iterable[Followed]):
        """Step until the host knows a token of each."""
        while not all(request.told for request in requests):
            self.step()

    def finish(self):
        """Step until every request has ended, and wait for the call that the device is ahead with."""
        while self.engine.unfinished:
            self.step()
        jax.block_until_ready(self.engine.runner.batch.state.outcome)

    def give_up(self):
        """Abort what is left, and step until the engine is idle."""
        for id in list(self._followed):
            self.engine.abort(id)
        self.finish()

    def serve(self, loads: Sequence[Load]) -> list[Followed]:
        """Serve requests that arrive at their times, the earliest first, until all have ended."""
        began, found = time.perf_counter(), []
        for load in loads:
            while (now := time.perf_counter()) < began + load.at:
                if self.engine.unfinished:
                    self.step()
                else:
                    time.sleep(began + load.at - now)
            found.append(self.add(load, began + load.at))
        while self.engine.unfinished:
            self.step()
        return found


@dataclasses.dataclass
class Observed:
    """What an engine did in a stretch of time.

    Attributes:
      seconds: how long it was.
      waited: seconds of them in which the host waited for the device's logs.
      before, after: the engine's metrics.
    """

    before: Metrics
    after: Metrics
    seconds: float = 0.0
    waited: float = 0.0

    def counted(self, name: str) -> float:
        """How much a number of ``Metrics`` grew."""
        return getattr(self.after, name) - getattr(self.before, name)

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return self.counted("num_generation_tokens") / self.seconds

    @property
    def padding(self) -> float:
        """The share of padding in the tokens of prefill passes."""
        padding = self.counted("num_padding_tokens")
        return padding / max(padding + self.counted("num_prefill_tokens"), 1)

    @property
    def rows_per_call(self) -> float:
        rows = [request.rows_per_call * request.num_calls for request in (self.before, self.after)]
        return (rows[1] - rows[0]) / max(self.counted("num_calls"), 1)

    @property
    def host_seconds(self) -> float:
        """Seconds per call in which the host did something else than wait for logs."""
        return (self.seconds - self.waited) / max(self.counted("num_calls"), 1)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round gave a request on average."""
        return self.counted("num_generation_tokens") / max(self.counted("num_rounds"), 1)


@contextlib.contextmanager
def observed(engine: Engine) -> Iterator[Observed]:
    """What the engine does inside of the ``with``; its numbers are whole after it."""
    found = Observed(engine.metrics(), engine.metrics())
    runner, read = engine.runner, engine.runner.read

    def timed_read(logs):
        started = time.perf_counter()
        try:
            return read(logs)
        finally:
            found.waited += time.perf_counter() - started

    runner.read = timed_read
    started = time.perf_counter()
    try:
        yield found
    finally:
        found.seconds = time.perf_counter() - started
        del runner.read  # the method of its class is there again
        found.after = engine.metrics()


class Texts:
    """Prompts of random tokens, no two alike, so that none is found in a prefix cache.

    Args:
      vocab_size: V.
      seed: of the tokens.
    """

    def __init__(self, vocab_size: int, seed: int = 0):
        self._vocab_size, self._random = vocab_size, np.random.default_rng(seed)

    def prompt(self, length: int) -> list[int]:
        return self._random.integers(0, self._vocab_size, length).tolist()

    def queue(self, count: int, divisor: int = 1) -> list[Load]:
        """Requests of unequal lengths, the same lengths at each call: prompts of 128 to 385 tokens that get 64 to 448 new
        ones, all of them divided by ``divisor``."""
        lengths = random.Random(5)
        pairs = [(lengths.randrange(128, 386), lengths.randrange(64, 449)) for _ in range(count)]
        return [Load(self.prompt(prompt // divisor), new // divisor) for prompt, new in pairs]

    def poisson(self, loads: Sequence[Load], rate: float) -> list[Load]:
        """The same requests, arriving at random, ``rate`` a second on average."""
        times = np.cumsum(self._random.exponential(1 / rate, len(loads)))
        return [dataclasses.replace(load, at=float(at)) for load, at in zip(loads, times, strict=True)]


def longest_gap(requests: Iterable[Followed], since: float, until: float) -> float:
    """The longest time in which the host learnt nothing new of a request, among gaps that overlap the stretch of time."""
    gaps = [
        now - before
        for request in requests
        for (before, _), (now, _) in zip(request.told, request.told[1:], strict=False)
        if now > since and before < until
    ]
    return max(gaps)
