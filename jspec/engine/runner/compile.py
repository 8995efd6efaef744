"""Compiles programs before their first call, and chooses compiler options."""

import contextlib
import os
import pathlib
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jspec._interrupts import Answer, Threads
from jspec.engine.aot_cache.executables import ExecutableCache, compile_lowered
from jspec.models.one_order import traced_for_backend

PATIENCE = 0.1  # seconds between two questions whether a compilation is still wanted

MANY_QUERIES = 32  # query tokens of all rows that the target reads in a pass

# XLA rematerialises values where a program seems to need more memory than there is. Pages of the KV cache fill the memory of
# a GPU and cannot be computed again, so XLA would search every program in vain and print a warning.
_DISABLED = "xla_disable_hlo_passes"
_NO_REMATERIALIZATION = {} if _DISABLED in os.environ.get("XLA_FLAGS", "") else {_DISABLED: "rematerialization"}

# XLA leaves out that a number is rounded to bfloat16, if it is widened again and nothing lies between, as a slice does in a
# pass of one token. From jax 0.12 on it has two libraries for products, by their sizes, and fuses others with what is around
# them: one library for each product by itself adds in one order.
_OF_ONE_ORDER: dict[str, str | int] = {"xla_allow_excess_precision": False}
if jax.__version_info__ >= (0, 12):
    _OF_ONE_ORDER["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"

_GRAPHS = "xla_gpu_enable_command_buffer"
# XLA's own list, and loops whose end the device decides: otherwise the host launches one round after another and has to
# wait for each, so that it cannot send the next call ahead.
_IN_GRAPHS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,WHILE"
if jax.__version_info__ >= (0, 12):  # sums over several GPUs; with an older XLA each of them ends a graph
    _IN_GRAPHS += ",COLLECTIVES_KERNEL"


class Program:
    """A function of arrays, compiled once for arguments of one shape.

    ``compile`` is a call of its own, and not a part of the first call as in ``jax.jit``, so that several programs are
    compiled at a time. Arguments of other shapes are a TypeError: nothing is ever compiled again.

    Args:
      function: the function to compile.
      donate: the place of the argument whose buffers the results may take over; None for no argument.
      options: XLA's, as ``jax.jit`` takes them, besides those that every program has.
      name: what messages and profiles call it; None is the function's own name.

    Attributes:
      name: what messages and profiles call it.
      function, donate: as given.
      options: XLA's.
      cache: the on-disk cache of its executable.
      calls: how often it was sent to the device.
    """

    def __init__(
        self,
        function: Callable,
        donate: int | None,
        options: Mapping[str, str | int] | None = None,
        name: str | None = None,
    ):
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.function, self.donate, self.options = function, donate, _NO_REMATERIALIZATION | dict(options or {})
        self.cache = ExecutableCache(None)

        def named(*args):
            return function(*args)

        named.__name__ = named.__qualname__ = self.name
        donated = () if donate is None else donate
        self._jitted = jax.jit(named, donate_argnums=donated, compiler_options=self.options)
        self._compiled: jax.stages.Compiled | None = None
        self.calls = 0

    @property
    def compiled(self) -> bool:
        """Whether it can be called."""
        return self._compiled is not None

    def compile(self, *args):
        """Compile for these arguments, unless that has been done.

        Args:
          *args: arrays, or ``jax.ShapeDtypeStruct`` in place of any of them.
        """
        if self.compiled:  # on the path of every call, so this comes first
            return
        file = self.file(*args)
        if not self.load_cached(file, args):
            self._finish(self._lower(*args), file)

    def file(self, *args) -> pathlib.Path | None:
        """The file of its executable in the cache; None if the cache is off.

        To be called in the thread that traces the program, whose settings of JAX count.
        """
        return self.cache.file(self.name, self.options, args)

    def load_cached(self, file: pathlib.Path | None, args: tuple) -> bool:
        """Load the executable from this file, if an earlier process has written it; returns whether it can be called now."""
        if self._compiled is None:
            self._compiled = self.cache.read(file, self.name, args)
        return self._compiled is not None

    def unload(self):
        """Let go of the executable, which has memory on the device."""
        self._compiled = None

    def __call__(self, *args) -> Any:
        """Send it to the device; returns at once with arrays that are still being computed.

        This costs as much host time as calling the result of ``jax.jit``: from the second call on, both are the same loop
        over the arguments in C++.

        Raises:
          TypeError: an argument differs in structure, shape or dtype from those that it was compiled for.
        """
        assert self._compiled is not None, f"compile() of program {self.name!r} comes first"
        try:
            results = self._compiled(*args)
        except TypeError as error:
            error.add_note(f"Program {self.name!r} was compiled for arguments of one shape, and is not compiled again.")
            raise
        self.calls += 1
        return results

    def _lower(self, *args) -> jax.stages.Lowered:
        """The lowered program; Python's part of the work."""
        with self._named("traced"), traced_for_backend():
            return self._jitted.lower(*args)

    def _finish(self, lowered: jax.stages.Lowered, file: pathlib.Path | None):
        """XLA's part, during which other threads may run. A single assignment makes the program callable."""
        with self._named("compiled"):
            self._compiled, may_be_cached = compile_lowered(lowered)
        if may_be_cached:
            self.cache.write(file, self.name, self._compiled)

    @contextlib.contextmanager
    def _named(self, stage: str) -> Iterator[None]:
        """Adds the program's name to an exception, which keeps its type."""
        try:
            yield
        except Exception as error:
            error.add_note(f"This happened while program {self.name!r} was being {stage}.")
            raise


class NotWanted(RuntimeError):
    """Nobody waits any more for what was to be compiled or run."""


def require_wanted(is_wanted: Callable[[], bool]):
    """Raise ``NotWanted`` if ``is_wanted`` says no."""
    if not is_wanted():
        raise NotWanted("nobody waits for these programs any more")


def compile_all(
    programs: Sequence[tuple[Program, tuple]], threads: int | None = None, is_wanted: Callable[[], bool] = lambda: True
):
    """Compile every program for its arguments; those that are compiled already are left as they are.

    Executables of the cache are loaded, as many at a time as there are CPU cores. The others are traced one after the other
    in the calling thread, and each is compiled in a thread of a pool while the next is traced. The options of the compiler
    are those that ``jax.config.update`` has set for all threads; options that a ``with`` sets for the calling thread alone
    do not apply.

    An exception, Ctrl-C included, ends the call at once. Every program is then either compiled or not. A compilation
    that has begun cannot be cancelled: it goes on in its thread, the program is compiled when it ends, and Python
    waits for it before it exits. (Threads that Python does not wait for would be killed inside of XLA, which aborts the
    process.) No other compilation begins.

    Args:
      programs: each with the arguments that ``Program.compile`` takes, in the order in which they are begun.
      threads: how many are compiled at a time; None is one for each program, but not more than there are CPU cores. On a
        GPU, where XLA times kernels while it compiles, many at a time wait for each other and may take longer than two.
      is_wanted: is asked in the calling thread, between programs and every tenth of a second.

    Raises:
      ValueError: threads is less than 1.
      NotWanted: ``is_wanted`` has said no.
      Exception: what tracing or compiling one of them raised, with a note that names the program.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads={threads}: expected at least 1, or None for one for each program")
    missing = [(program, args) for program, args in programs if not program.compiled]
    if not missing:
        return
    files = {program: program.file(*args) for program, args in missing}
    cached = [(program.load_cached, (files[program], args)) for program, args in missing if files[program] is not None]
    _in_threads(os.cpu_count() or 1, cached, is_wanted)
    missing = [(program, args) for program, args in missing if not program.compiled]
    # The generator traces a program when the thread pool is given it.
    compilations = ((program._finish, (program._lower(*args), files[program])) for program, args in missing)
    _in_threads(threads or min(len(missing), os.cpu_count() or 1), compilations, is_wanted)


def _in_threads(most: int, calls: Iterable[tuple[Callable, tuple]], is_wanted: Callable[[], bool]):
    """Make calls of functions with arguments in so many threads, and wait for all of them; an exception ends that."""
    threads, left = Threads(most, "compile"), 0
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    try:
        for function, args in calls:
            threads.call(function, args, answers)
            left += 1
            require_wanted(is_wanted)
        while left:
            with contextlib.suppress(queue.Empty):
                answers.get(timeout=PATIENCE).result()
                left -= 1
            require_wanted(is_wanted)
    finally:
        threads.end(wait=False)


def one_order_options(wanted: bool) -> dict[str, str | int]:
    """Compiler options of a program on a CPU that is to have one order of sums, if one is ``wanted``."""
    return dict(_OF_ONE_ORDER) if wanted and jax.default_backend() == "cpu" else {}


def decode_options(target_leaves: Sequence[jax.Array], queries: int) -> dict[str, str | int]:
    """Compiler options of a program in which the target reads ``queries`` tokens, of all rows, at a time.

    Only GPUs use them. The whole program becomes one CUDA graph, unless the user's ``XLA_FLAGS`` set the use of graphs.

    With few query tokens XLA splits a matrix product along its sums (split-K) to occupy a GPU. It decides that by timing
    each product on its own, without the kernels that add up the partial sums: with many query tokens a pass is faster
    without split-K. This does not hold for quantised weights (``benchmarks/log/rounds.md`` has both).
    """
    options: dict[str, str | int] = {}
    if _GRAPHS not in os.environ.get("XLA_FLAGS", ""):
        options = {_GRAPHS: _IN_GRAPHS, "xla_gpu_graph_min_graph_size": 1}
    quantized = any(leaf.dtype.itemsize == 1 for leaf in target_leaves)
    if queries >= MANY_QUERIES and not quantized:
        options["xla_gpu_experimental_force_split_k"] = 1
    return options
