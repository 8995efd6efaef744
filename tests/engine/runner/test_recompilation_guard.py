"""The guard counts the compilations of its blocks, and nothing else."""

import re
import threading
import timeit
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.engine.runner import recompilation_guard as module
from jspec.engine.runner.compile import Program
from jspec.engine.runner.recompilation_guard import CompilationError, CompilationGuard, CompilationWarning

MOST_SECONDS = 2e-6  # of a block in which nothing is compiled


def sealed(on_compile="count") -> CompilationGuard:
    guard = CompilationGuard(on_compile)
    guard.seal()
    return guard


def compile_something(count: int = 1):
    """A new function is a new program, whatever other tests have compiled."""
    zeros = np.zeros(3, np.float32)
    for _ in range(count):
        jax.jit(lambda x: x + 1)(zeros)


@pytest.fixture(autouse=True)
def no_block_is_left_behind():
    yield
    assert module._here.block is None


def test_compilations_in_blocks_after_the_seal_are_counted():
    guard = CompilationGuard("count")
    assert not guard.sealed
    with guard.watching():
        compile_something()
    guard.seal()
    assert guard.sealed
    compile_something()
    assert guard.count == 0
    with guard.watching():
        compile_something(2)
        assert guard.count == 0  # until the block has ended
    assert guard.count == 2
    with guard.watching():
        compile_something()
    assert guard.count == 3


def test_programs_stray_calls_and_new_shapes_are_counted():
    guard, doubled, x = sealed(), jax.jit(lambda x: 2 * x), np.zeros((7, 11, 13), np.float32)
    doubled(x)
    with guard.watching():
        doubled(x)
    assert guard.count == 0
    with guard.watching():
        doubled(x[0])
    assert guard.count == 1
    with guard.watching():
        jnp.flip(jnp.asarray(x), 2)
    assert guard.count >= 2
    before = guard.count
    with guard.watching():
        Program(lambda x: x, 0).compile(x)
    assert guard.count == before + 1


def test_warning_comes_at_the_end_with_function_and_line():
    guard, done = sealed("warn"), []
    with pytest.warns(CompilationWarning) as caught, guard.watching():  # noqa: PT031
        jax.jit(lambda x: x - 1)(np.zeros(3, np.float32))
        Program(lambda x: x, 0, name="astray").compile(np.zeros(3, np.float32))
        done.append(True)
    assert done
    assert guard.count == 2
    (warning,) = caught
    text = str(warning.message)
    assert re.search(rf"compiled jit\(<lambda>\) in [\d.e-]+ s for {re.escape(__file__)}:\d+, jit\(astray\) in", text)
    assert "use numpy" in text
    assert warning.filename == __file__
    assert issubclass(CompilationWarning, RuntimeWarning)


def test_a_warning_that_is_an_error_interrupts_nothing():
    guard, done = sealed("warn"), []
    with warnings.catch_warnings(), pytest.raises(CompilationWarning), guard.watching():  # noqa: PT012
        warnings.simplefilter("error")
        compile_something()
        done.append(True)
    assert done == [True]
    assert guard.count == 1


def test_a_guard_that_raises_does_so_once_for_every_block():
    guard, done = sealed("raise"), []
    for _ in range(2):
        with pytest.raises(CompilationError, match="a step of a warm engine compiled"), guard.watching():  # noqa: PT012
            compile_something(2)
            done.append(True)
    assert len(done) == 2
    with guard.watching():
        pass
    assert guard.count == 4


def test_other_threads_do_not_count():
    guard, other = sealed("raise"), sealed("count")
    begun, go = threading.Event(), threading.Event()

    def user():
        with other.watching():
            begun.set()
            go.wait(20)
            compile_something(3)

    thread = threading.Thread(target=user)
    thread.start()
    begun.wait(20)
    with guard.watching():
        go.set()
        thread.join()
    assert (guard.count, other.count) == (0, 3)


def test_a_block_within_a_block_has_its_own_count():
    outer, inner = sealed(), sealed()
    with outer.watching():
        compile_something()
        with inner.watching():
            compile_something(2)
        compile_something()
    assert (outer.count, inner.count) == (2, 2)


@pytest.mark.parametrize("on_compile", ["warn", "raise", "count"])
@pytest.mark.parametrize("exception", [KeyboardInterrupt, ValueError, GeneratorExit])
def test_exception_of_a_block_stands(on_compile, exception):
    guard = sealed(on_compile)
    with pytest.raises(exception), guard.watching():  # noqa: PT012
        compile_something()
        raise exception
    compile_something()
    assert guard.count == 1


def test_block_with_an_interrupted_end_does_no_harm(monkeypatch):
    """As by Ctrl-C before the first instruction of ``__exit__``."""
    guard = sealed("raise")

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module._Block, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt), guard.watching():
            pass
    compile_something()
    with guard.watching():
        pass
    assert guard.count == 0
    with pytest.raises(CompilationError), guard.watching():
        compile_something()
    assert guard.count == 1
    module._here.block = None


def test_unknown_on_compile_is_refused():
    with pytest.raises(ValueError, match="on_compile='ignore': expected one of warn, raise, count"):
        CompilationGuard("ignore")


def test_block_without_compilation_takes_microseconds():
    guard = sealed("warn")

    def block():
        with guard.watching():
            pass

    assert min(timeit.repeat(block, number=10_000, repeat=20)) / 10_000 < MOST_SECONDS
