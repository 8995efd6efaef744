"""What may happen around a request while it is served: arrivals, neighbours that leave, preemption, calls of any length.

``serve`` and ``by_hand`` step an engine in the thread of the test; the other context managers change what its scheduler
decides, and nothing on the device.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from engines import paused

from jspec.engine.adaptive.cost_table import RoundShape
from jspec.engine.engine import Engine
from jspec.engine.request import LIVE, ActiveRequest, Request
from jspec.outputs import Delta


class ScriptedController:
    """A stand-in for a ``Controller`` that follows a script of round shapes, and notes its observations."""

    trying = False

    def __init__(self, script: Iterable[RoundShape]):
        self.script, self.observed = iter(script), []

    def choose(self, rows: int, requests=()) -> RoundShape:
        del rows, requests
        return next(self.script)

    def observe(self, shape: RoundShape, rounds: int, accepted, verified):
        del verified
        self.observed.append((shape, rounds, list(accepted)))


@contextlib.contextmanager
def preempting(engine: Engine, share: float = 0.0, every: int = 1) -> Iterator[None]:
    """Preempt the youngest requests before every call, or before each of so many, whether or not pages are short.

    A request whose drafts wait is spared every second time: what it has done comes to nothing, and so often it would never
    end.

    Args:
      engine: whose requests.
      share: of the decoding requests, at least one, unless a younger request is prefilled.
      every: how many calls there are for one of them.
    """
    scheduler, calls = engine.scheduler, itertools.count()
    grow, spared = scheduler._grow, set()

    def preempt_and_grow(rounds, schedule):
        if next(calls) % every:
            return grow(rounds, schedule)
        in_rows = sorted(filter(None, scheduler.rows), key=lambda active: active.seniority, reverse=True)
        for active in in_rows[: max(math.ceil(share * len(in_rows)), 1)]:
            if active.proposed and active not in spared:
                spared.add(active)
                continue
            spared.discard(active)
            if active.decoding:
                scheduler._preempt(schedule)
        return grow(rounds, schedule)

    with attribute(scheduler, "_grow", preempt_and_grow):
        yield


@contextlib.contextmanager
def calls_of_any_length(engine: Engine, seed: int = 0) -> Iterator[None]:
    """Let every call make another number of rounds, from one to as many as its program can."""
    scheduler, rng = engine.scheduler, np.random.default_rng(seed)
    schedule = scheduler.schedule

    def schedule_some_rounds(*args):
        rounds = int(rng.integers(1, engine.config.rounds + 1))
        with attribute(scheduler, "_config", dataclasses.replace(engine.config, rounds=rounds)):
            return schedule(*args)

    with attribute(scheduler, "schedule", schedule_some_rounds):
        yield


@contextlib.contextmanager
def few_pages(engine: Engine, count: int) -> Iterator[None]:
    """Leave the engine no more than ``count`` pages, which are as many as its longest request needs, or more."""
    pages = engine.scheduler.pages
    withheld = pages.take(pages.available - count)
    with attribute(pages, "total", count):
        yield
    pages.release(withheld)


@contextlib.contextmanager
def attribute(thing, name: str, value) -> Iterator[None]:
    """Have an object's own attribute replaced for a while."""
    own = name in vars(thing)
    before = getattr(thing, name)
    setattr(thing, name, value)
    try:
        yield
    finally:
        if own:
            setattr(thing, name, before)
        else:
            delattr(thing, name)


@contextlib.contextmanager
def by_hand(engine: Engine) -> Iterator[Callable[[], list[Delta]]]:
    """While the engine's thread does nothing, what this yields does once what that does, and returns what is new of the
    requests that were added."""
    with paused(engine):

        def step() -> list[Delta]:
            engine.handle._core.serve(engine.handle.running().mailbox)
            engine.handle._core.hand_out()
            outputs = engine._added.outputs
            return [] if outputs.empty() else outputs.get()

        yield step


def serve(
    engine: Engine,
    requests: Sequence[Request],
    at_a_time: int | None = None,
    neighbour: Callable[[int], Request] | None = None,
    after_step: Callable[[], None] | None = None,
    seed: int = 0,
) -> list[ActiveRequest]:
    """Serve requests step by step; returns them in the order given, when all of them have ended.

    Args:
      engine: an engine with nothing else to do.
      requests: what to serve.
      at_a_time: submit that many of them between two steps, and never have more of them unfinished; None submits all at
        once.
      neighbour: makes a request, given a number, that is aborted after one to five steps and followed by the next one.
      after_step: is called after every step.
      seed: of how long neighbours live.
    """
    rng, actives, steps_left, passing = np.random.default_rng(seed), [], 0, None
    most = len(requests) if at_a_time is None else at_a_time
    with paused(engine) as loop:
        while len(actives) < len(requests) or any(active.outcome == LIVE for active in actives):
            unfinished = sum(active.outcome == LIVE for active in actives)
            actives += map(loop.submit, requests[len(actives) :][: max(most - unfinished, 0)])
            if neighbour is not None and steps_left == 0:
                loop.abort([] if passing is None else [passing])
                passing, steps_left = loop.submit(neighbour(len(actives))), int(rng.integers(1, 6))
            steps_left -= 1
            loop.step()
            if after_step is not None:
                after_step()
        loop.abort([] if passing is None else [passing])
    return actives


def texts_of(
    engine: Engine, preempt: bool = False, at_a_time: int | None = None, *, requests: Sequence[Request]
) -> list[list[int]]:
    """The tokens of each request that ``serve`` has; with ``preempt``, some of them were preempted."""
    with preempting(engine) if preempt else contextlib.nullcontext():
        actives = serve(engine, requests, at_a_time)
    assert not preempt or any(active.num_preemptions for active in actives)
    return [active.tokens for active in actives]


def outcome_of(active: ActiveRequest) -> tuple:
    """What a client learns of a request: tokens, how it ended, and drafts of every round."""
    return active.tokens, active.outcome, active.sources, active.drafted, active.accepted
