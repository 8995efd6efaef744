"""Errors of the device, of a program and of the engine's thread: the requests end, and the next call returns the text it
always did."""

import ctypes
import dataclasses
import sys
import time

import jax
import numpy as np
import pytest
from engines import ARMED, CONFIG, GREEDY, Fragile, assert_nothing_is_held, decode, key_of, table_llm, tokens_of
from interruption import PROMPTS, TABLES, texts, warm_llm

import jspec
from jspec.engine.request import Request
from jspec.engine.runner import model_runner
from jspec.engine.runner.compile import Program
from jspec.engine.runner.recompilation_guard import CompilationError, CompilationWarning
from jspec.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def warm():
    return warm_llm()


@pytest.mark.parametrize("name", ["prefill", "admit", "decode"])
def test_a_program_that_takes_the_state_and_fails(warm, monkeypatch, name):
    llm, expected = warm
    programs = llm.engine.runner.batch.programs
    failing = getattr(programs, name)
    if isinstance(failing, dict):
        (failing,) = failing.values()
    call = Program.__call__

    def lose(program, *args):
        result = call(program, *args)
        if program is failing:
            raise RuntimeError("the device is gone")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Program, "__call__", lose)
        with pytest.raises(RuntimeError, match="the device is gone"):
            texts(llm)
    assert_nothing_is_held(llm.engine)
    assert llm.engine.scheduler.pages.cached == 0  # nobody finds what a lost call was to read
    assert texts(llm) == expected


def test_an_error_of_the_device_spoils_one_call(monkeypatch):
    """The error comes with the logs, after the state was given back, whose arrays will never be computed."""
    llm = table_llm(Fragile(TABLES[0].table, TABLES[0].config))
    expected = texts(llm)
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setitem(ARMED, "when it runs", True)
            with pytest.raises(jax.errors.JaxRuntimeError, match="a broken device"):
                texts(llm)
        assert_nothing_is_held(llm.engine)
        assert llm.engine.scheduler.pages.cached == 0
        assert texts(llm) == expected


def test_an_exception_while_a_program_is_compiled(monkeypatch):
    llm = table_llm(Fragile(TABLES[0].table, TABLES[0].config))
    with monkeypatch.context() as patch:
        patch.setitem(ARMED, "when it is traced", True)
        with pytest.raises(TypeError, match="cannot be traced"):
            texts(llm)
        with pytest.raises(TypeError, match="cannot be traced"):
            llm.warmup()
    assert_nothing_is_held(llm.engine)
    assert texts(llm) == texts(llm)
    assert llm.engine.num_compilations == 3


@pytest.mark.parametrize("error", [CompilationError, CompilationWarning])
def test_an_error_of_the_guard_ends_the_requests_of_the_step(warm, error, monkeypatch):
    llm, expected = warm
    guard = llm.engine.guard
    monkeypatch.setattr(guard, "sealed", True)
    monkeypatch.setattr(
        guard, "on_compile", "raise" if error is CompilationError else "warn"
    )  # warnings are errors here

    def compile_something(tokens, seen):
        jax.jit(lambda x: x + 1)(np.zeros(3, np.float32))

    with pytest.raises(error, match="a step of a warm engine compiled"):
        decode(llm.engine, PROMPTS, find_stop=compile_something)
    with pytest.raises(error, match="a step of a warm engine compiled"):
        decode(llm.engine, PROMPTS[:1], SamplingParams(max_tokens=1), find_stop=compile_something)
    assert_nothing_is_held(llm.engine)
    assert texts(llm) == expected


def test_an_exception_in_a_search_for_stop_strings(warm):
    llm, expected = warm

    def fail(tokens, seen):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        decode(llm.engine, PROMPTS, find_stop=fail)
    assert_nothing_is_held(llm.engine)
    assert texts(llm) == expected


def ending(error: type[BaseException]):
    def fail(tokens, seen):
        raise error

    return fail


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exception_that_ends_the_thread(warm, error):
    """It is the cause of a RuntimeError for all who wait, and the next caller finds a sound engine."""
    llm, expected = warm
    waiting = jspec.stream(llm, PROMPTS[0], max_tokens=20)
    next(waiting)
    llm.engine.add(PROMPTS[0], max_tokens=20)
    with pytest.raises(RuntimeError, match=error.__name__) as raised:
        decode(llm.engine, PROMPTS, find_stop=ending(error))
    assert isinstance(raised.value.__cause__, error)
    assert isinstance(llm.engine.handle.error, error)
    assert texts(llm) == expected
    assert llm.engine.handle.error is None
    assert_nothing_is_held(llm.engine)


def await_rest(ident: int):
    """Wait until a thread is twice at the same instruction: it waits there for others."""
    place = None
    while True:
        frame = sys._current_frames()[ident]
        before, place = place, (frame.f_code, frame.f_lasti)
        if place == before:
            return
        time.sleep(0.02)


def test_a_thread_that_is_killed_while_it_waits(warm):
    """By an exception from another thread, which loses the command that wakes it."""
    llm, expected = warm
    thread = llm.engine.handle.running()
    ident = thread._thread.ident
    assert ident is not None
    await_rest(ident)
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(SystemExit)) == 1
    with pytest.raises(RuntimeError, match="SystemExit"):
        texts(llm)
    assert thread.ended
    assert texts(llm) == expected


def test_a_device_that_does_not_recover(warm, monkeypatch):
    llm, expected = warm

    def fail(*_):
        raise OSError("no device")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", fail)
        patch.setattr(llm.engine.runner, "restore", fail)
        for _ in range(2):
            with pytest.raises(
                RuntimeError, match=r"cannot go on: its device failed.*\(no device\); load the model again"
            ):
                texts(llm)
    assert texts(llm) == expected


def test_values_that_no_array_holds_are_refused():
    with pytest.raises(ValueError, match=r"prompt 7: stop_tokens=2147483648: expected token ids"):
        Request(7, [1], GREEDY, key_of(0), (2**31,))
    with pytest.raises(ValueError, match=r"prompt 7: key_data=.*: expected a Threefry key"):
        Request(7, [1], GREEDY, np.zeros(4, np.uint32))


def test_more_tokens_than_any_array_holds_may_be_asked(warm):
    """``max_len`` cuts them."""
    llm, _ = warm
    endless = SamplingParams(temperature=0, max_tokens=2**40, min_tokens=2**22)
    assert tokens_of(decode(llm.engine, [[1]], endless)) == tokens_of(decode(llm.engine, [[1]]))


def test_requests_that_could_never_end_fail(warm, monkeypatch):
    llm, expected = warm
    llm.engine.scheduler.pages.take(llm.engine.scheduler.pages.available)  # as if somebody had lost them
    with pytest.raises(RuntimeError, match=r"4 requests wait, none is under way .* 0 pages are available"):
        texts(llm)
    assert texts(llm) == expected

    rows = model_runner.decode_rows
    with monkeypatch.context() as patch:
        nobody = np.full(CONFIG.max_batch, CONFIG.max_batch, np.int32)
        patch.setattr(model_runner, "decode_rows", lambda *args: dataclasses.replace(rows(*args), rows=nobody))
        with pytest.raises(RuntimeError, match=r"the device made no round, although the requests in rows \[0, 1, 2\]"):
            texts(llm)
    assert texts(llm) == expected
