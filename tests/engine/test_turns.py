"""Nobody who waits for the turn sees more than one step begin, however eager the thread is that makes steps."""

import threading
from collections.abc import Callable

import pytest
from engines import bigram, shared, successor_table, table_llm

from jspec.engine.engine import Engine
from jspec.engine.turns import Turn

REFUSAL = "this thread would wait for itself"
LONG = 35  # tokens of an answer; with a token a round and few rounds a call, many steps


@shared
def model():
    return table_llm(bigram(successor_table() / 10)).warmup()


@pytest.fixture
def engine():
    engine = model().engine
    yield engine
    assert not engine.scheduler.unfinished
    assert not engine._turn.waiting
    assert not engine._turn.lock.locked()


class EagerLock:
    """The worst lock there may be: one thread gets it whenever it wants, and others only when that thread has given it back
    without a step.

    Args:
      made: counts the steps.
    """

    def __init__(self, made: Callable[[], int]):
        self._lock, self._made, self._first = threading.Lock(), made, threading.get_ident()
        self._before, self._offered = -1, threading.Event()

    def acquire(self, blocking=True, timeout=-1.0) -> bool:
        if threading.get_ident() != self._first:
            self._offered.wait(30)
        got = self._lock.acquire(blocking, timeout)
        if got and threading.get_ident() == self._first:
            self._before = self._made()
        return got

    def release(self):
        if threading.get_ident() == self._first and self._made() == self._before:
            self._offered.set()
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()


class Steps:
    """Counts the steps of an engine, and does something once, in the middle of one."""

    def __init__(self, engine: Engine, monkeypatch, at: int, what: Callable[[], None]):
        self.count, step = 0, engine._loop.step

        def counted():
            self.count += 1
            if self.count == at:
                what()
            step()

        monkeypatch.setattr(engine._loop, "step", counted)


@pytest.mark.parametrize("how", ["add", "abort"])
def test_who_waits_goes_before_the_next_step(engine, monkeypatch, how):
    ids = [engine.add([1], max_tokens=LONG, seed=seed) for seed in range(2)]
    seen, threads = [], []

    def call():
        if how == "add":
            engine.add([2], max_tokens=1)
        else:
            engine.abort(ids[1])
        seen.append(steps.count)

    def arrive():
        threads.append(threading.Thread(target=call))
        threads[0].start()
        while not engine._turn.waiting:  # until it stands in line
            threads[0].join(0.001)

    steps = Steps(engine, monkeypatch, 2, arrive)
    monkeypatch.setattr(engine._turn, "lock", EagerLock(lambda: steps.count))
    deltas = []
    while engine.unfinished:
        deltas += engine.step()
    threads[0].join(30)
    assert seen == [2]  # it came in the second step, and none began before it had its turn
    assert steps.count > 6
    ends = {delta.id: delta.result.finish_reason for delta in deltas if delta.result}
    assert ends[ids[0]] == "length"
    assert ends[ids[1]] == ("abort" if how == "abort" else "length")
    assert len(ends) == (3 if how == "add" else 2)


def test_steps_are_not_put_off_for_ever():
    """Whoever came after the last step sees one begin, so that many who come and go keep no step from being made."""
    turn = Turn()
    early = turn.caller(REFUSAL)
    turn.waiting[early] = None
    assert not turn.others_go_first  # no step has ended since it came
    turn.num_steps += 1
    assert turn.others_go_first
    late = turn.caller(REFUSAL)
    turn.waiting[late] = None
    turn.waiting.pop(early)
    assert not turn.others_go_first
    turn.num_steps += 1
    assert turn.others_go_first


def test_who_does_not_get_the_turn_in_time_may_ask_again():
    turn = Turn()
    with turn.lock:
        caller = turn.caller(REFUSAL)
        turn.try_to_take(caller, 0.0)
        assert not caller.taken
    turn.take(caller)
    assert caller.taken
    assert turn.holder is caller
    assert not turn.waiting
    with pytest.raises(RuntimeError, match=REFUSAL):
        turn.caller(REFUSAL)


def test_an_owner_learns_of_an_end_before_it_stops_asking(engine, monkeypatch):
    """Its thread may look between any two lines of the one that steps."""
    id = engine.add([1], max_tokens=2)
    looks = []

    class Items(type(engine._added.items)):
        def append(self, progress):
            looks.append(id in engine._added.unfinished)
            super().append(progress)

    monkeypatch.setattr(engine._added, "items", Items())
    while engine.unfinished:
        engine.step()
    assert looks
    assert all(looks)
