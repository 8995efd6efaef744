"""Ctrl-C at any point: no page and no row is kept, and the next call returns the text it always did."""

import _thread
import gc
import signal
import threading
import time

import numpy as np
import pytest
from engines import assert_nothing_is_held, table_llm
from interruption import PARAMS, PROMPTS, TABLES, by_exception, by_signal, interrupted, streamed, texts, warm_llm

import jspec
from jspec.engine.runner.compile import Program
from jspec.engine.runner.step_builder import StepBuilder


@pytest.fixture(scope="module")
def warm():
    return warm_llm()


@pytest.fixture(autouse=True)
def no_collections():
    """Nothing is collected meanwhile. A generator of jspec's that some earlier test has left in a cycle is closed when it is
    collected: its places would be counted as the run's, and an exception there, which nobody can catch, be lost."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("how", [by_signal, by_exception])
@pytest.mark.parametrize("call", [texts, streamed])
def test_an_interrupt_at_any_place_of_the_caller(warm, how, call, monkeypatch):
    llm, expected = warm
    rebuilt, empty_state = [], StepBuilder.empty_state
    monkeypatch.setattr(StepBuilder, "empty_state", lambda *args: rebuilt.append(1) or empty_state(*args))
    for count, at in enumerate(interrupted(call, llm, how)):
        assert_nothing_is_held(llm.engine)
        if count % 10 == 0:
            assert texts(llm) == expected, f"after an interrupt at {at}"
    assert texts(llm) == expected
    assert llm.engine.num_compilations == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not rebuilt  # no interrupt comes to where the state changes hands


def test_an_interrupt_while_the_thread_begins(warm):
    llm, expected = warm
    handle = llm.engine.handle

    def forget_thread():
        """As if nobody had called before."""
        handle.running().stop()
        handle._thread = None

    forget_thread()
    for _ in interrupted(texts, llm, by_signal, ("thread.py", "handle.py", "mailbox.py", "jax_settings.py")):
        assert texts(llm) == expected
        assert_nothing_is_held(llm.engine)
        forget_thread()


@pytest.mark.parametrize(("what", "programs"), [(texts, 3), (jspec.LLM.warmup, 7)], ids=["generate", "warmup"])
def test_an_interrupt_while_programs_are_compiled(warm, what, programs, monkeypatch):
    """The caller is let go at once. What has begun is compiled to its end, and nothing else."""
    _, expected = warm
    cold, times, finish = table_llm(*TABLES), [], Program._finish

    def slow(*args):
        if not times:
            times.append(time.monotonic())
            _thread.interrupt_main()
        time.sleep(0.4)
        finish(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "_finish", slow)
        with pytest.raises(KeyboardInterrupt):
            what(cold)
        assert time.monotonic() - times[0] < 0.3
        assert_nothing_is_held(cold.engine)
        assert cold.engine.num_compilations < programs
    assert texts(cold) == expected


def test_interrupts_at_random_times(warm):
    llm, expected = warm
    rng = np.random.default_rng(0)
    for _ in range(20):
        timer = threading.Timer(rng.uniform(0, 0.02), _thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            timer.start()
            while True:
                texts(llm)
        timer.join()
        assert_nothing_is_held(llm.engine)
        assert texts(llm) == expected


def test_added_requests_can_be_stepped_after_an_interrupt(warm):
    """No step waits for ever, and every request ends, whatever was lost."""
    llm, _ = warm
    engine = llm.engine

    def add_and_step(llm):
        for prompt, params in zip(PROMPTS, PARAMS, strict=True):
            engine.add(prompt, params)
        while engine.unfinished:
            engine.step()

    for _ in interrupted(add_and_step, llm, by_signal):
        while engine.unfinished:
            engine.step()
        assert_nothing_is_held(engine)
