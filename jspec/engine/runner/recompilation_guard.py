"""A guard that reports compilations after warm-up."""

import contextlib
import inspect
import os
import threading
import traceback
import warnings
from typing import Literal, get_args

import jax

OnCompile = Literal["warn", "raise", "count"]

_COMPILED = "/jax/core/compile/backend_compile_duration"  # also when the result comes from the compilation cache
_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_NOT_CALLERS = (_JAX, __file__, contextlib.__file__)


class CompilationWarning(RuntimeWarning):
    """A step of a warm engine compiled something."""


class CompilationError(RuntimeError):
    """A step of a warm engine compiled something, and its guard raises."""


class CompilationGuard:
    """Counts XLA compilations inside blocks of code, and reports them when a block ends.

    A step of a warm engine only calls programs that are compiled. A stray ``jnp`` call in it works too, but compiles a
    program of its own, and once more for every new shape: all requests wait for that. ::

        guard = CompilationGuard()
        warmup()
        guard.seal()
        with guard.watching():
            step()

    A block counts the compilations of its own thread only. The report comes after the block has done its work, so that a
    warning, or an error, interrupts nothing. A block that ends by an exception, such as Ctrl-C, is only counted, so that the
    exception stands.

    Args:
      on_compile: the report of a block that compiled something: a ``CompilationWarning``, a ``CompilationError``, or none.

    Attributes:
      on_compile: as given; may be changed.
      sealed: whether blocks count.
      count: how many programs were compiled in blocks that began after ``seal``.

    Raises:
      ValueError: on_compile is unknown.
    """

    def __init__(self, on_compile: OnCompile = "warn"):
        if on_compile not in get_args(OnCompile):
            raise ValueError(f"on_compile={on_compile!r}: expected one of {', '.join(get_args(OnCompile))}")
        self.on_compile = on_compile
        self.sealed = False
        self.count = 0

    def seal(self):
        """Everything is compiled: count compilations in blocks from now on."""
        self.sealed = True

    def watching(self) -> contextlib.AbstractContextManager:
        """A block in which nothing should be compiled, for one ``with``. It costs about a microsecond.

        Raises:
          CompilationError: when the block ends, if something was compiled in it and ``on_compile`` is "raise".
        """
        return _Block(self) if self.sealed else _UNWATCHED

    def _report(self, compiled: list[str], quiet: bool):
        self.count += len(compiled)
        if quiet or self.on_compile == "count":
            return
        message = (
            f"a step of a warm engine compiled {', '.join(compiled)}: every request waited for that. Calls of jax.numpy "
            "outside of the engine's programs compile, as do arguments of a new shape or dtype; use numpy there, or do "
            "it before the step"
        )
        if self.on_compile == "raise":
            raise CompilationError(message)
        warnings.warn(message, CompilationWarning, stacklevel=3)


class _Block:
    """Collects the compilations of its thread, between ``__enter__`` and ``__exit__``.

    If an exception from another thread or a signal comes first in ``__exit__``, the block stays the thread's. That does no
    harm: it goes on collecting until the next block replaces it.
    """

    __slots__ = ("_before", "_guard", "compiled")

    def __init__(self, guard: CompilationGuard):
        self._guard = guard
        self.compiled: list[str] = []

    def __enter__(self):
        self._before = _here.block
        _here.block = self

    def __exit__(self, kind, *_):
        _here.block = self._before
        if self.compiled:
            self._guard._report(self.compiled, quiet=kind is not None)


class _Here(threading.local):
    """The block that runs in this thread."""

    block: _Block | None = None


_UNWATCHED = contextlib.nullcontext()
_here = _Here()


def _note(event: str, duration_secs: float, **about: str | int):
    """JAX's event listener. It must not raise: JAX calls it in the middle of its work."""
    block = _here.block
    if block is not None and event == _COMPILED:
        block.compiled.append(f"{about.get('fun_name', 'a function')} in {duration_secs:.2g} s for {_caller()}")


def _caller() -> str:
    """The line that made JAX compile in this thread, as file:line."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):
        if not frame.f_code.co_filename.startswith(_NOT_CALLERS):
            return f"{frame.f_code.co_filename}:{line}"
    return "an unknown line"


# Here, and not when a guard is made, because a module is executed once per process.
jax.monitoring.register_event_duration_secs_listener(_note)
