"""Several threads call one model: their requests are decoded together, and each thread gets its own texts."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import GREEDY, Letters, bigram, decode, key_of, ragged_prompts, successor_table, table_llm, tokens_of

import jspec
from jspec.engine.request import Request
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
    run = llm.engine.run([Request(i, prompt, GREEDY, key_of(i)) for i, prompt in enumerate(PROMPTS[:n])])
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
    assert llm.engine.num_compilations == 7 + 2 * available()


def test_a_run_that_is_left_open_keeps_nobody_waiting(llm, pool):
    run = running(llm)
    assert len(pool.submit(decode, llm.engine, PROMPTS).result(timeout=60)) == len(PROMPTS)
    assert len(list(run)) == 3


def test_others_step_for_a_run_and_it_finds_its_results(llm):
    run, expected = running(llm), tokens_of(decode(llm.engine, PROMPTS[:4]))
    decode(llm.engine, PROMPTS)
    assert not llm.engine.scheduler.unfinished  # the other requests of the run have ended meanwhile
    rest = sorted(run, key=lambda active: active.request.index)
    assert all(active.tokens == expected[active.request.index] for active in rest)
    assert len(rest) == 3


def test_what_needs_an_idle_engine_waits_for_other_threads(llm, pool):
    run = running(llm)
    warming = pool.submit(llm.warmup)
    with pytest.raises(TimeoutError):
        warming.result(timeout=0.3)
    pool.submit(run.close).result(timeout=20)  # by another thread than that which started it
    warming.result(timeout=60)


def test_a_run_that_nobody_knows_any_more_ends(llm, pool):
    run = running(llm)
    warming = pool.submit(llm.warmup)
    del run
    warming.result(timeout=60)
    assert llm.engine.metrics().pages_used == 0


def test_nobody_waits_for_himself(llm, pool):
    run = running(llm)
    for refused in (llm.warmup, lambda: llm.engine.replace_draft(None)):
        with pytest.raises(RuntimeError, match="idle"):
            refused()
    assert len(list(run)) == 3

    def nested(tokens, seen):
        decode(llm.engine, PROMPTS)

    with pytest.raises(RuntimeError, match="a callback cannot use the engine"):
        decode(llm.engine, PROMPTS, find_stop=nested)
    assert len(decode(llm.engine, PROMPTS)) == len(PROMPTS)


def test_a_run_may_go_on_in_another_thread(llm, pool):
    run = running(llm)
    going = pool.submit(lambda: len(list(run)))
    assert len(decode(llm.engine, PROMPTS)) == len(PROMPTS)
    assert going.result(timeout=60) == 3
    llm.warmup()  # this thread has nothing under way any more


def test_who_waits_can_be_interrupted(llm, pool):
    """An interrupt in one thread ends its own requests, and no others."""
    expected = tokens_of(decode(llm.engine, PROMPTS))
    stepping, let_go = threading.Event(), threading.Event()

    def hold(tokens, seen):
        """A callback within a step, which keeps the turn."""
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
