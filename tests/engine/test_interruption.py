"""Ctrl-C and exceptions at any point: no page and no row is kept, and the next call returns the text it always did."""

import _thread
import ctypes
import dataclasses
import dis
import functools
import gc
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types
import weakref

import jax
import numpy as np
import pytest
from children import environment
from engines import (
    ARMED,
    CONFIG,
    GREEDY,
    Fragile,
    assert_nothing_is_held,
    bigram,
    decode,
    key_of,
    successor_table,
    table_llm,
    tokens_of,
)

import jspec
from jspec.engine.request import Request
from jspec.engine.runner.compile import Program
from jspec.engine.runner.programs import StepBuilder
from jspec.engine.runner.recompilation_guard import CompilationError, CompilationWarning
from jspec.sampling.params import SamplingParams

TABLES = (bigram(successor_table() / 10), bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 28)) / 10))
PROMPTS = [[1], [2] * 9, [3, 4], [5]]  # one chunk or two, and one more than there are rows
PARAMS = [SamplingParams(temperature=1.0, max_tokens=20, seed=seed) for seed in range(len(PROMPTS))]
JSPEC = str(pathlib.Path(jspec.__file__).parent)


def texts(llm) -> list[list[int]]:
    return [result.token_ids for result in jspec.generate(llm, PROMPTS, PARAMS)]


def streamed(llm) -> list[int]:
    return [token for delta in jspec.stream(llm, PROMPTS[1], PARAMS[1]) for token in delta.token_ids]


@functools.cache
def places(code: types.CodeType) -> frozenset[int]:
    """Where Python may raise KeyboardInterrupt in a function, as offsets of instructions: at its beginning, where a
    call has returned, and where a loop begins again.

    What comes when a call has returned is raised by the call, while a trace function can only raise at the next
    instruction. Where another ``finally`` or none has that one, which never happens to a real interrupt, is no place."""
    found, before = set(), None
    for instruction in dis.get_instructions(code):
        if before is not None and (
            before.opname == "RESUME"
            or (
                before.opname in ("CALL", "CALL_FUNCTION_EX")
                and _handler(code, before.offset) == _handler(code, instruction.offset)
            )
        ):
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        before = instruction
    return frozenset(found)


def _handler(code: types.CodeType, offset: int) -> int | None:
    """Where an exception of an instruction is handled."""
    entries = dis.Bytecode(code).exception_entries  # pyright: ignore[reportAttributeAccessIssue]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)


# From Python 3.12 on, a trace function is not told of the opcodes of a frame that it has only just seen: there only the
# places where a function begins are interrupted.
OPCODES = sys.version_info < (3, 12)


class Interruption:
    """A trace function that notes the places in jspec's code that this thread comes by, and interrupts at one of them.

    ``how`` is what happens there: the signal that Ctrl-C sends, or an exception, as handlers of other signals raise it."""

    def __init__(self, how=None, at: tuple[types.CodeType, int] | None = None):
        self.how, self.at = how, at
        self.places: dict[tuple[types.CodeType, int], None] = {}

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(JSPEC):
            return None
        if not OPCODES:
            self._pass(frame)
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._local

    def _local(self, frame, event, _):
        if event == "opcode" and frame.f_lasti in places(frame.f_code):
            self._pass(frame)
        return self._local

    def _pass(self, frame):
        place = frame.f_code, frame.f_lasti
        first = place not in self.places
        self.places[place] = None
        if first and self.how is not None and place == self.at:
            self.how()

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)


def interrupted(call, llm, how, files: tuple[str, ...] = ()):
    """Call once for each place in these files of the engine, or in all of jspec, with an interrupt there.

    Yields after each call.
    """
    with Interruption() as counting:
        call(llm)
    within = tuple(str(pathlib.Path(JSPEC, "engine", name)) for name in files) or JSPEC
    ats = [place for place in counting.places if place[0].co_filename.startswith(within)]
    came = 0
    for at in ats:
        try:
            with Interruption(how, at):
                call(llm)
        except KeyboardInterrupt:
            came += 1
        yield at
    assert came > 0.9 * len(ats) > 5  # a place where a caller waits longer may not be come by


def by_signal():
    signal.raise_signal(signal.SIGINT)


def by_exception():
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def warm():
    """A model that is compiled, and its texts."""
    llm = table_llm(*TABLES)
    return llm, texts(llm)


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
    gateway = llm.engine.gateway

    def forget_thread():
        """As if nobody had called before."""
        gateway.running()._stop()
        gateway._thread = None

    forget_thread()
    for _ in interrupted(texts, llm, by_signal, ("thread.py", "gateway.py", "jax_settings.py")):
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


def test_what_is_added_can_be_stepped_after_an_interrupt(warm):
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


@pytest.mark.parametrize("name", ["prefill", "admit", "decode"])
def test_a_program_that_takes_the_state_and_fails(warm, monkeypatch, name):
    llm, expected = warm
    programs = llm.engine.runner.programs
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
def test_what_the_guard_raises_ends_the_requests_of_the_step(warm, error, monkeypatch):
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


def test_an_abandoned_generator(warm):
    llm, expected = warm
    keys = [key_of(seed) for seed in range(len(PROMPTS))]
    for abandon in (lambda run: run.close(), lambda run: None):  # by hand, or by losing it
        run = llm.completions(PROMPTS, PARAMS, keys)
        next(run)
        assert texts(llm) == expected
        abandon(run)
        del run
        assert_nothing_is_held(llm.engine)
        assert texts(llm) == expected


def test_a_generator_of_which_a_traceback_lives_on(warm):
    llm, expected = warm
    try:
        for _ in jspec.stream(llm, PROMPTS[0], PARAMS[0]):
            raise ZeroDivisionError
    except ZeroDivisionError as error:
        kept = error
    assert texts(llm) == expected
    assert kept.__traceback__ is not None


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
    assert isinstance(llm.engine.gateway.error, error)
    assert texts(llm) == expected
    assert llm.engine.gateway.error is None
    assert_nothing_is_held(llm.engine)


def test_a_thread_that_is_killed_while_it_waits(warm):
    """By an exception from another thread, which loses the command that wakes it."""
    llm, expected = warm
    thread = llm.engine.gateway.running()
    ident = thread._thread.ident
    assert ident is not None
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


def test_a_model_that_is_deleted_leaves_nothing():
    llm = table_llm(TABLES[0])
    texts(llm)
    streamed(llm)
    abandoned = jspec.stream(llm, PROMPTS[0], PARAMS[0])
    next(abandoned)
    thread, state = llm.engine.gateway.running(), jax.tree.leaves(llm.engine.runner.state)
    kept = [weakref.ref(what) for what in (llm, llm.engine, llm.engine.runner, *state)]
    del llm, abandoned, state
    gc.collect()
    thread._thread.join(10)
    assert thread.ended
    gc.collect()
    assert [ref() for ref in kept] == [None] * len(kept)


ABRUPT = """
import os, threading, jspec
from test_interruption import PARAMS, PROMPTS, TABLES, table_llm

llm = table_llm(TABLES[0])
jspec.generate(llm, PROMPTS, PARAMS)
child = os.fork()
if not child:
    try:
        jspec.generate(llm, PROMPTS, PARAMS)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
for_ever = threading.Thread(target=lambda: jspec.generate(llm, PROMPTS * 10_000, PARAMS * 10_000), daemon=True)
for_ever.start()
stream = jspec.stream(llm, PROMPTS[0], PARAMS[0])
next(stream)
print("exits", flush=True)
"""


def test_a_process_that_forks_and_ends_before_its_requests():
    """A daemon thread inside of XLA would abort it."""
    here = pathlib.Path(__file__).parent
    command = [sys.executable, "-W", "ignore", "-c", ABRUPT]
    ended = subprocess.run(
        command, env=environment(here.parent / "helpers", here), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    said, exits = ended.stdout.splitlines()
    assert "this process was forked from the one that loaded the model: load the model in the child" in said
    assert exits == "exits"


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


def test_nothing_waits_for_ever(warm, monkeypatch):
    llm, expected = warm
    llm.engine.scheduler.pages.take(llm.engine.scheduler.pages.available)  # as if somebody had lost them
    with pytest.raises(RuntimeError, match=r"4 requests wait, none is under way .* 0 pages are available"):
        texts(llm)
    assert texts(llm) == expected

    runner = llm.engine.runner
    rows = runner._rows
    with monkeypatch.context() as patch:
        nobody = np.full(CONFIG.max_batch, CONFIG.max_batch, np.int32)
        patch.setattr(runner, "_rows", lambda *args: dataclasses.replace(rows(*args), rows=nobody))
        with pytest.raises(RuntimeError, match=r"the device made no round, although the requests in rows \[0, 1, 2\]"):
            texts(llm)
    assert texts(llm) == expected
