"""Several threads call one model: each gets its own texts, in turn, and nobody waits for himself."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from engines import GREEDY, Letters, bigram, decode, key_of, ragged_prompts, successor_table, table_llm, tokens_of

import jspec
from jspec.engine.request import Request
from jspec.sampling.params import SamplingParams

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
    assert llm.engine.num_compilations == 4


def test_a_run_keeps_others_waiting_until_it_is_closed(llm, pool):
    run = running(llm)
    waiting = pool.submit(decode, llm.engine, PROMPTS)
    warming = pool.submit(llm.warmup)
    with pytest.raises(TimeoutError):
        waiting.result(timeout=0.3)
    assert not warming.done()
    pool.submit(run.close).result(timeout=20)  # by another thread than that which started it
    assert tokens_of(waiting.result(timeout=60)) == tokens_of(decode(llm.engine, PROMPTS))
    warming.result(timeout=60)


def test_a_run_that_nobody_knows_any_more_ends(llm, pool):
    run = running(llm)
    waiting = pool.submit(decode, llm.engine, PROMPTS)
    del run
    assert len(waiting.result(timeout=60)) == len(PROMPTS)


def test_nobody_waits_for_himself(llm, pool):
    run = running(llm)
    for refused in (lambda: decode(llm.engine, PROMPTS), llm.warmup, lambda: llm.engine.replace_draft(None)):
        with pytest.raises(RuntimeError, match=r"busy|idle"):
            refused()
    assert len(list(run)) == 3

    def nested(tokens, seen):
        decode(llm.engine, PROMPTS)

    with pytest.raises(RuntimeError, match="busy"):
        decode(llm.engine, PROMPTS, find_stop=nested)
    assert len(decode(llm.engine, PROMPTS)) == len(PROMPTS)

    run = running(llm)
    resumed = threading.Event()

    def go_on():
        for _ in run:
            resumed.set()

    going = pool.submit(go_on)  # in another thread, which this one may wait for from then on
    assert resumed.wait(60)
    assert len(decode(llm.engine, PROMPTS)) == len(PROMPTS)
    going.result(timeout=60)


def test_who_waits_can_be_interrupted(llm, pool):
    taken, let_go = threading.Event(), threading.Event()

    def hold():
        with contextlib.closing(running(llm)):
            taken.set()
            assert let_go.wait(60)

    holding = pool.submit(hold)
    assert taken.wait(60)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        decode(llm.engine, PROMPTS)
    timer.join()
    assert llm.engine.scheduler.unfinished  # what the other thread has is still there
    let_go.set()
    holding.result(timeout=60)
    assert len(decode(llm.engine, PROMPTS)) == len(PROMPTS)
