"""What the sections of ``benchmarks.kernels.invariance`` share: results in classes of equal bits, programs that are compiled
ahead, times, and the lines of a run."""

import contextlib
import dataclasses
import faulthandler
import functools
import math
import pathlib
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import results

COMPILERS = 12
REPEATS, SECONDS = 5, 0.004  # timings, and how long each takes at least
PATIENCE = 60  # seconds: a kernel that takes longer never ends


def bits(tree) -> bytes:
    """The bits of arrays."""
    return b"".join(np.ascontiguousarray(x).tobytes() for x in jax.tree.leaves(tree))


def classes(found: Mapping[Any, Any]) -> list[list[Any]]:
    """The keys whose arrays have the same bits, side by side."""
    by_bits: dict[bytes, list[Any]] = {}
    for key, tree in found.items():
        by_bits.setdefault(bits(tree), []).append(key)
    return list(by_bits.values())


def named(groups: Iterable[Iterable[Any]]) -> str:
    """Classes as they are printed: ``{1} {2 5 8}``."""
    return " ".join("{" + " ".join(map(str, group)) + "}" for group in groups)


def difference(x, y) -> dict[str, float]:
    """How far two arrays of one dtype are apart: the ``share`` of numbers that differ, and the largest difference in
    ``ulps`` of the larger of two numbers and in ``rms`` of all numbers."""
    digits = int(jnp.finfo(x.dtype).nmant)
    x, y = np.asarray(x).astype(np.float64), np.asarray(y).astype(np.float64)
    off, size = np.abs(x - y), np.maximum(np.maximum(np.abs(x), np.abs(y)), 1e-30)
    ulp = np.exp2(np.floor(np.log2(size)) - digits)
    rms = math.sqrt(float(np.mean(x * x))) or 1.0
    return {"share": float(np.mean(x != y)), "ulps": float(np.max(off / ulp)), "rms": float(np.max(off)) / rms}


def of_difference(found: Mapping[str, float]) -> str:
    return f"{found['share']:.2%} of numbers differ, by {found['ulps']:.0f} ulps at most, {found['rms']:.1e} of the rms"


@dataclasses.dataclass(frozen=True)
class Job:
    """A program to compile.

    Attributes:
      function: of arrays.
      args: arrays, or shapes of them.
      options: for the compiler.
      tuned: whether XLA may time products of its own for it, which is done while nothing else is compiled.
      donate: the place of the argument whose memory the results may take over.
    """

    function: Callable
    args: tuple
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tuned: bool = False
    donate: int | None = None


def compiled(job: Job) -> Any:
    """The program of a job."""
    donate = () if job.donate is None else job.donate
    options = dict(job.options) if jax.default_backend() == "gpu" else {}
    jitted = jax.jit(job.function, compiler_options=options or None, donate_argnums=donate)
    return jitted.lower(*job.args).compile()


def compile_all(jobs: Mapping[Any, Job]) -> dict[Any, Any]:
    """The programs of all jobs by their keys; an exception in place of one that could not be compiled."""

    def attempt(job: Job) -> Any:
        try:
            return compiled(job)
        except Exception as error:
            return error

    with ThreadPoolExecutor(COMPILERS) as pool:
        plain = {key: job for key, job in jobs.items() if not job.tuned}
        done = dict(zip(plain, pool.map(attempt, plain.values()), strict=True))
    return {key: done[key] if key in done else attempt(job) for key, job in jobs.items()}


@functools.partial(jax.jit, static_argnums=1)
def picked(y, places: tuple[int, ...]):
    """Lines of an array, in a launch of its own."""
    return y[jnp.asarray(places)]


def places_of(tokens: int) -> tuple[int, int, int]:
    """Where a line is put among so many: first, in the middle and last."""
    return 0, tokens // 2, tokens - 1


def microseconds(call: Callable, count: int, small: bool) -> float:
    """Median time of one of the ``count`` parts of a call."""

    def seconds(calls: int) -> float:
        began, out = time.perf_counter(), None
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / calls

    calls = 1 if small else 1 + int(SECONDS / seconds(2))
    return 1e6 * statistics.median(seconds(calls) for _ in range(1 if small else REPEATS)) / count


def kernels_of(program) -> str:
    """What products a program launches: custom calls, and Triton kernels of XLA with their tiles."""
    text = program.as_text()
    names = re.findall(r'custom_call_target="([^"]+)"', text) + re.findall(r'"kind":"(__\w+)"', text)
    tiles = re.findall(r'"num_warps":"(\d+)","output_tiles":\[\{"sizes":\[([^]]*)\]', text)
    algorithms = re.findall(r'"selected_algorithm":"(\d+)"', text)
    found = [f"{names.count(name)} {name}" for name in sorted(set(names))]
    found += [f"{warps} warps [{sizes}]".replace('"', "") for warps, sizes in sorted(set(tiles))]
    found += [f"algorithm {number}" for number in sorted(set(algorithms))]
    return ", ".join(found) or "fusions"


class Run:
    """A run, whose lines are printed and written as soon as they are known.

    Attributes:
      result: what is written.
      file: where, None for nowhere.
      small: whether shapes are tiny and times mean nothing.
      until: a time of the monotonic clock, after which nothing is begun.
      left_out, failed: the names of lines that are missing.
    """

    def __init__(self, result: results.Result, file: pathlib.Path | None, small: bool):
        self.result, self.file, self.small, self.until = result, file, small, math.inf
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self.kept: dict[Any, Any] = {}  # what one section leaves to another

    def say(self, key: str, text: str, **details):
        """Print a line, and keep its details under ``key``."""
        print(f"{key}: {text}", flush=True)
        self.result.details[key] = {"text": text, **details}
        if self.file is not None:
            results.write(self.result, self.file)

    def attempt(self, name: str, function: Callable, *args):
        """``function(*args)``, which says what it finds; its exception is a line."""
        if time.monotonic() > self.until:
            self.left_out.append(name)
            print(f"{name}: left out, the time is over", flush=True)
            return
        try:
            function(*args)
        except Exception as error:
            self.failed.append(name)
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:300]
            self.say(
                name, f"failed: {type(error).__name__}: {text} ({pathlib.Path(where.filename).name}:{where.lineno})"
            )

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ends the process if a kernel never ends: nothing else would. What was found is written by then."""
        if self.small:
            yield
            return
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=sys.stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def say_classes(self, key: str, found: Mapping[Any, Any], note: str = "", **details):
        """Print the classes of equal bits of arrays, or of tuples of them, and how far each class is from the first."""
        if not found:
            self.say(key, "nothing was found")
            return
        groups = classes(found)
        first, others = groups[0][0], [group[0] for group in groups[1:]]
        apart = {}
        for other in others:
            pairs = zip(jax.tree.leaves(found[first]), jax.tree.leaves(found[other]), strict=True)
            apart[str(other)] = [difference(x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.floating)]
        self.say(key, named(groups) + note, classes=[list(map(str, group)) for group in groups], apart=apart, **details)
        for other, several in apart.items():
            worst = max(several, key=lambda one: one["share"], default=None)
            if worst is not None:
                print(f"    {first} and {other}: {of_difference(worst)}", flush=True)


def shape_of(x) -> Any:
    """The shapes of a tree of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)


def same_everywhere(several: Sequence[Any]) -> bool:
    """Whether all trees have the same bits."""
    return len({bits(one) for one in several}) == 1
