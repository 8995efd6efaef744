"""Programs that are compiled before they are called, and the compiler options, which the installed version must know."""

import _thread
import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from children import killed_at_the_end
from interruption import Interruption, by_signal

from jspec import _interrupts as interrupts
from jspec.engine.runner.compile import MANY_QUERIES, Program, compile_all, decode_options

SPLIT, GRAPHS = "xla_gpu_experimental_force_split_k", "xla_gpu_enable_command_buffer"
WIDE = [jnp.zeros(3), jnp.zeros((2, 2), jnp.bfloat16)]


@pytest.fixture(autouse=True)
def no_flags(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.parametrize("eight_bits", [jnp.int8, jnp.float8_e4m3fn])
def test_products_of_many_query_tokens_are_not_split_unless_weights_are_quantised(eight_bits):
    assert decode_options(WIDE, MANY_QUERIES)[SPLIT] == 1
    assert SPLIT not in decode_options(WIDE, MANY_QUERIES - 1)
    assert SPLIT not in decode_options([*WIDE, jnp.zeros((2, 2), eight_bits)], MANY_QUERIES)


def test_loops_are_in_the_cuda_graph_unless_flags_are_set(monkeypatch):
    assert "WHILE" in str(decode_options(WIDE, 1)[GRAPHS]).split(",")
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=")
    assert decode_options(WIDE, 1) == {}


def test_jax_accepts_the_compiler_options():
    doubled = jax.jit(lambda x: 2 * x, compiler_options=decode_options(WIDE, MANY_QUERIES))
    assert doubled(1) == 2
    unknown = jax.jit(lambda x: 2 * x, compiler_options={f"{SPLIT}_": 1})
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        unknown(1)


SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)
ROOT = Path(__file__).parents[3]


def program(number: int) -> Program:
    """Adds a number to its argument."""
    return Program(lambda x: (x + number, None), 0, name=f"adds {number}")


def numbered(count: int) -> list[tuple[Program, tuple]]:
    return [(program(number), (SHAPE,)) for number in range(count)]


@pytest.fixture
def held(monkeypatch) -> threading.Event:
    """No compilation ends before this is set, which it is after the test at the latest."""
    go, finish = threading.Event(), Program._finish

    def wait(self, lowered, args):
        go.wait(20)
        finish(self, lowered, args)

    with monkeypatch.context() as patch:
        patch.setattr(Program, "_finish", wait)
        yield go
        go.set()
        deadline = time.monotonic() + 20
        while any(thread.name.startswith("compile") for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_compiled_program_takes_arrays_of_its_shape_and_donates_them():
    doubled = Program(lambda scale, x: (scale * x, x.sum()), 1)
    assert not doubled.compiled
    doubled.compile(2.0, SHAPE)
    assert doubled.compiled
    x = jnp.arange(3.0)
    y, total = doubled(2.0, x)
    assert y.tolist() == [0, 2, 4]
    assert total == 3
    assert x.is_deleted()
    assert not y.is_deleted()


def test_a_call_with_another_shape_is_a_type_error_that_names_the_program(xla_compilations):
    adds, zeros = program(1), jnp.zeros(3)
    adds.compile(SHAPE)
    compiled = len(xla_compilations)
    for wrong in (np.zeros(4, np.float32), np.zeros(3, np.int32), [np.zeros(3, np.float32)]):
        with pytest.raises(TypeError, match="'adds 1' was compiled for"):
            adds(wrong)
    adds.compile(np.zeros(4, np.float32))  # it is compiled, and stays what it is
    assert adds(zeros)[0].tolist() == [1, 1, 1]
    assert len(xla_compilations) == compiled
    with pytest.raises(AssertionError, match=r"compile\(\) of program 'adds 2' comes first"):
        program(2)(zeros)


def test_name_defaults_to_the_functions():
    def halve(x):
        return x / 2

    assert Program(halve, 0).name == "halve"
    assert Program(functools.partial(halve), 0).name == "partial"
    named = Program(halve, 0, name="decode, K=4")
    assert named.name == "decode, K=4"
    assert "jit_decode" in named._lower(SHAPE).as_text()  # and so in profiles


def test_compile_all_skips_compiled_programs(traced):
    programs = numbered(4)
    programs[2][0].compile(SHAPE)
    first = programs[2][0]._compiled
    traced.clear()
    compile_all(programs)
    assert traced == ["adds 0", "adds 1", "adds 3"]
    assert programs[2][0]._compiled is first
    assert [adds(jnp.zeros(3))[0][0] for adds, _ in programs] == [0, 1, 2, 3]
    compile_all(programs)
    assert len(traced) == 3


def test_programs_are_traced_while_others_compile(traced, held):
    programs = numbered(3)

    def release():
        deadline = time.monotonic() + 10
        while len(traced) < len(programs) and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(list(traced))
        held.set()

    seen: list[list[str]] = []
    threading.Thread(target=release).start()
    compile_all(programs, threads=1)
    assert seen == [["adds 0", "adds 1", "adds 2"]]
    assert all(adds.compiled for adds, _ in programs)


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (3, 3), (None, min(4, os.cpu_count() or 1))])
def test_number_of_concurrent_compilations(held, monkeypatch, threads, expected):
    at_once, most, finish = [], [], Program._finish

    def count(self, lowered, args):
        at_once.append(self)
        most.append(len(at_once))
        if len(at_once) == expected:  # one more would have time to begin
            threading.Timer(0.1, held.set).start()
        finish(self, lowered, args)
        at_once.remove(self)

    monkeypatch.setattr(Program, "_finish", count)
    compile_all(numbered(4), threads)
    assert max(most) == expected


def test_less_than_one_thread_is_refused():
    with pytest.raises(ValueError, match="threads=0: expected at least 1"):
        compile_all(numbered(1), threads=0)


def test_tracing_error_names_the_program_and_leaves_the_others(held):
    def broken(x):
        raise ZeroDivisionError("no such thing")

    programs = numbered(2)
    programs.insert(1, (Program(broken, 0, name="broken"), (SHAPE,)))
    with pytest.raises(ZeroDivisionError, match=r"(?s)no such thing.*while program 'broken' was being traced"):
        compile_all(programs)
    held.set()
    compile_all(programs[:1] + programs[2:])
    assert [adds.compiled for adds, _ in programs] == [True, False, True]


def test_compiler_error_names_the_program():
    programs = numbered(2)
    programs.append((Program(lambda x: x, 0, {f"{SPLIT}_": 1}, "mistaken"), (SHAPE,)))
    for compile_them in (compile_all, lambda programs: programs[-1][0].compile(SHAPE)):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)No such.*program 'mistaken' was being compiled"):
            compile_them(programs)
        assert not programs[-1][0].compiled


@pytest.mark.parametrize("interrupt", [_thread.interrupt_main, lambda: os.kill(os.getpid(), signal.SIGINT)])
def test_interrupt_returns_at_once_and_begun_compilations_complete(held, interrupt):
    programs = numbered(3)
    threading.Timer(0.3, interrupt).start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compile_all(programs, threads=1)
    assert time.monotonic() - begin < 5  # and not 20
    assert [adds.compiled for adds, _ in programs] == [False] * 3
    held.set()
    while not programs[0][0].compiled:
        time.sleep(0.01)
        assert time.monotonic() - begin < 20
    compile_all(programs)
    assert [adds(jnp.zeros(3))[0][0] for adds, _ in programs] == [0, 1, 2]


def test_an_interrupt_at_any_place_leaves_no_thread_that_waits(monkeypatch):
    """Also at those of Python's own code that starts and joins threads: who exits waits for threads that do not end."""
    monkeypatch.setattr(Program, "_lower", lambda self, *args: None)
    monkeypatch.setattr(Program, "_finish", lambda self, lowered, file: None)
    own = (compile_all.__code__.co_filename, interrupts.__file__, threading.__file__)

    def compile_three():
        compile_all(numbered(3), threads=2)

    with Interruption(within=own) as counting:
        compile_three()
    assert len(counting.places) > 20
    for at in counting.places:
        with contextlib.suppress(KeyboardInterrupt), Interruption(by_signal, at, own):
            compile_three()
        deadline = time.monotonic() + 10
        while any(thread.name.startswith("compile") for thread in threading.enumerate()):
            assert time.monotonic() < deadline, f"after an interrupt at {at}"
            time.sleep(0.001)


ABANDONED = """
from jspec.checkpoints.files.ranges import results

begun = results([lambda: 1] * 20, 4)  # which a traceback may keep
next(begun)
"""


def test_python_exits_although_calls_are_left():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    assert subprocess.run([sys.executable, "-c", ABANDONED], env=environment, timeout=60).returncode == 0


INTERRUPTED = """
import os, sys, threading, time
import jax
from jspec.engine.runner.compile import Program, compile_all

finish, asked, PROGRAMS = Program._finish, [], 50

def say(line):  # in one piece, although two threads speak
    os.write(1, line.encode() + bytes([10]))

def is_wanted():  # all programs are traced when it is asked once more: in JAX's own callbacks an interrupt may get lost
    asked.append(None)
    if len(asked) == PROGRAMS + 1:
        say("waits")
    return True

def slowly(self, lowered, args):
    say("begins " + self.name)
    time.sleep(3)
    finish(self, lowered, args)
    say("ends " + self.name)

Program._finish = slowly
shape = jax.ShapeDtypeStruct((3,), "float32")
programs = [(Program(lambda x: x + 1, 0, name=str(number)), (shape,)) for number in range(PROGRAMS)]
compile_all(programs, threads=2, is_wanted=is_wanted)
"""


def test_interrupted_process_waits_only_for_begun_compilations():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", INTERRUPTED]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child,
        killed_at_the_end(child),
    ):
        lines = [child.stdout.readline() for _ in range(3)]
        child.send_signal(signal.SIGINT)
        lines += child.communicate(timeout=30)[0].splitlines(keepends=True)
    assert sorted(lines) == ["begins 0\n", "begins 1\n", "ends 0\n", "ends 1\n", "waits\n"]
    assert child.returncode == -signal.SIGINT  # and not SIGABRT, as where threads are killed inside of XLA
