"""Ctrl-C and exceptions at any point: no page and no row is kept, and the next call returns the text it always did."""

import _thread
import dataclasses
import dis
import functools
import gc
import pathlib
import signal
import sys
import threading
import types

import jax
import numpy as np
import pytest
from engines import ARMED, CONFIG, GREEDY, Fragile, bigram, decode, key_of, successor_table, table_llm, tokens_of

import jspec
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.engine.runner.compile import Program
from jspec.engine.runner.programs import StepBuilder
from jspec.sampling.params import SamplingParams

TABLES = (bigram(successor_table() / 10), bigram(successor_table((2, 3, 7, 11, 14, 19, 20, 28)) / 10))
PROMPTS = [[1], [2] * 9, [3, 4], [5]]  # one chunk or two, and one more than there are rows
PARAMS = [SamplingParams(temperature=1.0, max_tokens=20, seed=seed) for seed in range(len(PROMPTS))]
JSPEC = str(pathlib.Path(jspec.__file__).parent)


def texts(llm) -> list[list[int]]:
    return [result.token_ids for result in jspec.generate(llm, PROMPTS, PARAMS)]


def assert_nothing_is_held(engine: Engine):
    assert engine.scheduler.pages.used == 0
    assert engine.scheduler.rows == [None] * CONFIG.num_rows
    assert not engine.scheduler.unfinished
    assert not engine._turn.waiting


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
    """A trace function that counts the places in jspec's code that a run comes by, and interrupts at the ``at``-th.

    ``how`` is what happens there. A signal is what Ctrl-C sends, which jspec may hold off. An exception stands for all
    that it cannot hold off: handlers of other signals, exceptions set from other threads."""

    def __init__(self, how=None, at: int | None = None):
        self.how, self.at, self.count = how, at, 0
        self.places: dict[tuple[types.CodeType, int], int] = {}  # each place -> when the run first came by

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
        self.count += 1
        self.places.setdefault((frame.f_code, frame.f_lasti), self.count)
        if self.how is not None and self.count == self.at:
            self.how()

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)


def by_signal():
    signal.raise_signal(signal.SIGINT)


def by_exception():
    raise KeyboardInterrupt


def count_places(llm) -> int:
    with Interruption() as counting:
        texts(llm)
    return counting.count


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
def test_an_interrupt_at_any_place_of_a_warm_engine(warm, how, monkeypatch):
    llm, expected = warm
    rebuilt, empty_state = [], StepBuilder.empty_state
    monkeypatch.setattr(StepBuilder, "empty_state", lambda *args: rebuilt.append(1) or empty_state(*args))
    total = count_places(llm)
    assert total > (1000 if OPCODES else 100)
    for at in [*range(1, 60), *range(60, total - 40, 19), *range(total - 40, total)]:
        with pytest.raises(KeyboardInterrupt), Interruption(how, at):
            texts(llm)
        assert_nothing_is_held(llm.engine)
        assert texts(llm) == expected, f"after an interrupt at place {at} of {total}"
    assert llm.engine.num_compilations == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert how is by_exception or not rebuilt  # Ctrl-C is held off while the state changes hands


@pytest.mark.parametrize("how", [by_signal, by_exception])
def test_an_interrupt_at_every_place_of_the_loop(warm, how):
    """The test above takes samples; here every instruction at which the turn and requests change hands has its interrupt."""
    llm, expected = warm
    with Interruption() as counting:
        texts(llm)
    files = tuple(str(pathlib.Path(JSPEC, "engine", name)) for name in ("engine.py", "loop.py", "turns.py"))
    ats = [at for (code, _), at in counting.places.items() if code.co_filename in files]
    assert len(ats) > (50 if OPCODES else 10)
    for at in ats:
        with pytest.raises(KeyboardInterrupt), Interruption(how, at):
            texts(llm)
        assert not llm.engine._turn.lock.locked(), f"after an interrupt at place {at}"
        assert_nothing_is_held(llm.engine)
    assert texts(llm) == expected


def test_an_interrupt_while_programs_are_compiled():
    plain = table_llm(TABLES[0])
    total = count_places(plain)
    expected, compiled = texts(plain), set()
    for at in np.linspace(100, 0.5 * total, 4, dtype=int):
        cold = table_llm(TABLES[0])
        with pytest.raises(KeyboardInterrupt), Interruption(by_signal, at):
            texts(cold)
        compiled.add(cold.engine.num_compilations)
        assert_nothing_is_held(cold.engine)
        assert texts(cold) == expected
    assert compiled & {0, 1, 2}  # else nothing was being compiled


def test_interrupts_at_random_times(warm):
    llm, expected = warm
    rng = np.random.default_rng(0)
    for _ in range(30):
        timer = threading.Timer(rng.uniform(0, 0.02), _thread.interrupt_main)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            timer.start()
            while True:
                texts(llm)
        timer.join()
        assert_nothing_is_held(llm.engine)
        assert texts(llm) == expected


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
        run = llm.generate(PROMPTS, PARAMS, keys)
        next(run)
        assert texts(llm) == expected
        abandon(run)
        del run
        assert_nothing_is_held(llm.engine)
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
