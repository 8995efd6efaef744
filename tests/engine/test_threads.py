"""Several threads call one model: their requests are decoded together, and each thread gets its own texts."""

import dataclasses
import os
import queue
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from disturbances import by_hand
from engines import Letters, bigram, decode, drained, ragged_prompts, requests_of, successor_table, table_llm, tokens_of

import jspec
from jspec.engine.mailbox import Cancel, Submission, ThreadCall
from jspec.sampling.params import SamplingParams
from jspec.text.grammar.grammars import available

PROMPTS = ragged_prompts()
THREADS, CALLS = 8, 3


@pytest.fixture(scope="module")
def llm():
    tables = (bigram(successor_table() / 10), bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 28)) / 10))
    return table_llm(*tables, Letters()).warmup()


def call(llm, caller: int) -> list[tuple[list[int], str | None]]:
    """A few calls of different prompts, settings and sizes."""
    got = []
    for i in range(CALLS):
        prompts = [PROMPTS[(caller + i + j) % len(PROMPTS)] for j in range(1 + (caller + i) % 5)]
        params = SamplingParams(temperature=0.5 + 0.1 * caller, max_tokens=5 + 7 * i, seed=10 * caller + i)
        got += [(result.token_ids, result.text) for result in jspec.generate(llm, prompts, params)]
        got += [(jspec.generate(llm, "abc", max_tokens=6, temperature=0, stop="h").token_ids, None)]
    return got


def running(llm, n: int = 4):
    """A generator that has handed out one result and has more to hand out."""
    run = llm.engine.run(requests_of(PROMPTS[:n]))
    next(run)
    return run


@pytest.fixture
def pool():
    with ThreadPoolExecutor(THREADS) as threads:
        yield threads


def test_eight_threads_get_the_texts_of_one(llm, pool):
    alone = [call(llm, caller) for caller in range(THREADS)]
    start = threading.Barrier(THREADS + 2)

    def together(caller):
        start.wait()
        return call(llm, caller)

    def others():
        """What else may be called meanwhile."""
        start.wait()
        for _ in range(5):
            llm.warmup()
            llm.engine.replace_draft(bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 28)) / 10))
            assert llm.logits([1, 2, 3]).shape == (3, llm.target.config.vocab_size)

    other = threading.Thread(target=others)
    other.start()
    futures = [pool.submit(together, caller) for caller in range(THREADS)]
    start.wait()
    assert [future.result(timeout=60) for future in futures] == alone
    other.join()
    assert llm.engine.num_compilations == 7 + 4 * available()


def test_a_run_that_is_left_open_keeps_nobody_waiting(llm, pool):
    run, expected = running(llm), tokens_of(decode(llm.engine, PROMPTS[:4]))
    assert len(pool.submit(decode, llm.engine, PROMPTS).result(timeout=60)) == len(PROMPTS)
    rest = sorted(run, key=lambda active: active.request.index)
    assert len(rest) == 3
    assert all(active.tokens == expected[active.request.index] for active in rest)


@pytest.mark.parametrize("end", ["close", "forget", "finish"])
def test_warmup_waits_for_all_requests(llm, pool, end):
    """Also for those of the thread that calls it."""
    stepping, let_go = threading.Event(), threading.Event()

    def hold(tokens, seen):
        stepping.set()
        assert let_go.wait(60)

    holding = pool.submit(decode, llm.engine, PROMPTS[:1], find_stop=hold)
    assert stepping.wait(60)
    run = llm.engine.run(requests_of(PROMPTS[:2]))
    going = pool.submit(next, run)
    warming = pool.submit(llm.warmup)
    with pytest.raises(TimeoutError):
        warming.result(timeout=0.1)
    let_go.set()
    going.result(timeout=60)
    if end == "close":
        pool.submit(run.close).result(timeout=20)  # by another thread than that which started it
    elif end == "forget":
        del going, run
    llm.warmup()
    warming.result(timeout=60)
    assert len(holding.result(timeout=60)) == 1
    assert end != "finish" or len(list(run)) == 1


def test_a_callback_cannot_use_its_engine(llm):
    def nested(tokens, seen):
        decode(llm.engine, PROMPTS)

    for refused in (nested, lambda *_: llm.warmup(), lambda *_: llm.engine.add([1])):
        with pytest.raises(RuntimeError, match="a callback cannot use the engine"):
            decode(llm.engine, PROMPTS, find_stop=refused)
    assert len(decode(llm.engine, PROMPTS)) == len(PROMPTS)


def test_a_command_is_obeyed_before_the_next_step(llm, monkeypatch):
    """However long the texts of others are."""
    engine, steps, step = llm.engine, [], llm.engine.loop.step

    def arrive(**how):
        steps.append(1)
        if len(steps) == 2:
            engine.handle._thread.mailbox.arriving.append(
                Submission(engine._added, [engine.request([2], max_tokens=1)], [10**6])
            )
            engine.handle._thread.mailbox.post(Cancel(engine._added.number, ids[1]))
        if len(steps) == 3:
            seen.append((10**6 in engine._added.unfinished, ids[1] in engine._added.unfinished))
        step(**how)

    seen = []
    with by_hand(engine):
        ids = [engine.add([1], max_tokens=35, seed=seed) for seed in range(2)]
        monkeypatch.setattr(engine.loop, "step", arrive)
    ends = {id: deltas[-1].result.finish_reason for id, deltas in drained(engine).items()}
    assert seen == [(True, False)]
    assert ends == {ids[0]: "length", ids[1]: "abort", 10**6: "length"}


def test_a_client_learns_of_an_end_before_it_stops_asking(llm, monkeypatch):
    """Its thread may look between any two lines of the engine's."""
    looks = []

    class Outputs(queue.SimpleQueue):
        def put(self, item):
            looks.append(llm.engine.unfinished)
            super().put(item)

    monkeypatch.setattr(llm.engine._added, "outputs", Outputs())
    llm.engine.add([1], max_tokens=9)
    drained(llm.engine)
    assert looks
    assert all(looks)


def test_more_requests_than_may_wait(monkeypatch):
    """Those of a list wait outside of the queue, and nobody else is kept from it for long."""
    tables = bigram(successor_table() / 10), None, Letters()
    llm = table_llm(*tables)
    limited = dataclasses.replace(llm.engine.config, max_waiting=1)
    monkeypatch.setattr(llm.engine.scheduler, "_config", limited)
    most, step = [], llm.engine.loop.step
    monkeypatch.setattr(
        llm.engine.loop, "step", lambda **how: most.append(len(llm.engine.scheduler.waiting)) or step(**how)
    )
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(jspec.generate, llm, ["a"] * 30, max_tokens=5, temperature=0) for _ in range(2)]
        assert {result.text for one in found for result in one.result(timeout=60)} == {"bcdef"}
    assert max(most) <= 1 + limited.max_batch + 1


def test_a_run_may_go_on_in_another_thread(llm, pool):
    run = running(llm)
    going = pool.submit(lambda: len(list(run)))
    assert len(decode(llm.engine, PROMPTS)) == len(PROMPTS)
    assert going.result(timeout=60) == 3
    llm.warmup()  # this thread has nothing under way any more


def test_a_waiting_caller_can_be_interrupted(llm, pool):
    """An interrupt ends the requests of the main thread, and no others."""
    expected = tokens_of(decode(llm.engine, PROMPTS))
    stepping, let_go = threading.Event(), threading.Event()

    def hold(tokens, seen):
        """A callback within a step, which keeps the engine's thread."""
        stepping.set()
        assert let_go.wait(60)

    holding = pool.submit(decode, llm.engine, PROMPTS, find_stop=hold)
    assert stepping.wait(60)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        decode(llm.engine, PROMPTS)
    timer.join()
    let_go.set()
    assert tokens_of(holding.result(timeout=60)) == expected
    assert tokens_of(decode(llm.engine, PROMPTS)) == expected
    assert llm.engine.metrics().pages_used == 0


def test_who_waits_for_requests_under_way_passes_those_that_wait(llm, pool):
    """Or would never have its turn where requests always wait."""
    scheduler, found = llm.engine.scheduler, []
    with by_hand(llm.engine) as step:
        for _ in range(llm.engine.config.max_batch + 3):
            llm.engine.add("abc", SamplingParams(max_tokens=12, ignore_eos=True))
        step()
        begun = {active.order for active in scheduler.under_way}
        assert begun
        assert scheduler.waiting
        waits = len(scheduler.waiting)
        mailbox = llm.engine.handle.running().mailbox
        call = ThreadCall(lambda: found.append((len(scheduler.under_way), len(scheduler.waiting))), idle=True)
        mailbox.post(call)
        while not found:
            assert {active.order for active in scheduler.under_way} <= begun
            step()
    assert found == [(0, waits)]
    assert len(drained(llm.engine)) == waits
    assert not scheduler.unfinished
