"""One product of few tokens and a large weight in each lowering that could serve it, in microseconds beside its floor.

    python -m benchmarks.kernels.lowerings                                  # some minutes; needs a Hopper GPU
    python -m benchmarks.kernels.lowerings --weights int8 fp8 --tokens 1 16 --ways mosaic triton
    python -m benchmarks.kernels.lowerings --shape 4096 14336 --parts --weights int8 fp8
    python -m benchmarks.kernels.lowerings --smoke                          # tiny and anywhere, with meaningless times

The product is ``y[T, 28672] = x[T, 4096] @ weight^T`` or has another ``--shape``, in bfloat16; with ``--parts``, its sum may
be left to what follows. The weight has one of these forms:

    bf16      bfloat16
    int8      int8, and a scale for each output feature
    fp8       float8_e4m3fn, and a scale for each output feature
    blocks    float8_e4m3fn, and a scale for each block of 128 outputs and 128 inputs
    int4      codes of four bits, and a scale of bfloat16 for each 128 inputs of an output
    int4_zeros  the same with zeros, and scales of float16
    nvfp4     codes of NVFP4, and a scale of float8_e4m3fn for each 16 inputs of an output
    nf4       codes of NF4, and a scale of float32 for each 64 inputs of an output

The ways to compute it are

    mosaic    ``jspec.pallas.matmul.few_tokens_sm90``, in Pallas' Mosaic GPU lowering: the best of some tilings, which is
              named, and ``chosen`` if it is the one that products have
    triton    the kernels of ``jspec.pallas.matmul``, in Pallas' Triton lowering; that of blocks is
              ``benchmarks.kernels.triton_blocks``
    xla       XLA's product, which dequantises the weight in its own kernel or, of blocks, before it
    cublas    XLA's product of bfloat16 without its Triton kernels

A program multiplies several weights, more than fit into the L2 cache, and is one CUDA graph. The results of its first and
its last product are compared with those of float32 before it is timed; ``wrong`` is one that differs. In the tilings of
``mosaic`` that are ``ordered``, x has its inputs in another order, which is not timed: what computes x could write it so.

``read`` is the time in which weight, scales, x and y can be read or written once, and ``multiply`` that in which tensor
cores multiply at 790 TFLOP/s. The share is the larger of both, divided by the time."""

import argparse
import faulthandler
import functools
import itertools
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import bandwidth
from benchmarks.kernels.lowering_ways import (
    BYTES,
    KINDS,
    MOSAIC,
    WAYS,
    Candidate,
    by_definition,
    candidates,
    weights_of,
)
from benchmarks.shapes import LLAMA_8B
from jspec.engine.runner.compile import decode_options
from jspec.pallas.weights.unpack import to_mma_order

OUTPUTS, INPUTS = 2 * LLAMA_8B.intermediate_size, LLAMA_8B.hidden_size
SMALL = 256, 512  # the same where times mean nothing
TOKENS = (1, 5, 16, 80, 320)
PRODUCTS, LARGE = 48, 400_000_000  # of a program, and the fewest bytes of its weights, which L2 does not hold
RATE = 790e12  # operations per second of tensor cores in bfloat16
REPEATS, SECONDS = 5, 0.006  # timings, and how long each takes at least
PATIENCE = 30  # seconds: a kernel that takes longer never ends
CLOSE = 5e-3  # of the norm of the result: rounding results to bfloat16 is 1.7e-3, and weights too 2.4e-3


class Case:
    """A form of weight and a number of tokens, of which several products are computed and timed."""

    def __init__(self, kind: str, tokens: int, shape: tuple[int, int], smoke: bool):
        self.kind, self.tokens, self.smoke, self.shape = kind, tokens, smoke, shape
        weights = min(max(LARGE // (int(BYTES.get(kind, 1) * shape[0] * shape[1])), 4), PRODUCTS)
        self.weights = weights_of(kind, self.shape, 1 if smoke else weights)
        keys = jax.random.split(jax.random.key(1), 1 if smoke else max(PRODUCTS // weights, 1))
        self.xs = [jax.random.normal(key, (tokens, self.shape[1]), jnp.bfloat16) for key in keys]

    @functools.cached_property
    def wanted(self) -> list[jax.Array]:
        """The first and the last product in float32."""
        product = jax.jit(by_definition, compiler_options=None if self.smoke else {"xla_gpu_autotune_level": 0})
        return [product(self.xs[i], self.weights[i]) for i in (0, -1)]

    def floors(self, rate: float) -> tuple[float, float]:
        """Microseconds in which the product can be read, and be multiplied."""
        outputs, inputs = self.shape
        moved = sum(array.nbytes for array in jax.tree.leaves(self.weights[0])) + 2 * self.tokens * (outputs + inputs)
        return 1e6 * moved / rate, 1e6 * 2 * self.tokens * outputs * inputs / RATE

    def args(self, candidate: Candidate):
        return [to_mma_order(x) for x in self.xs] if candidate.in_order else self.xs, self.weights

    def compiled(self, candidate: Candidate) -> Callable:
        """The program that multiplies everything with each other."""

        def all_of_them(xs, weights):
            return [candidate.product(x, weight) for x, weight in itertools.product(xs, weights)]

        options: dict[str, Any] = {}
        if not self.smoke:
            options = decode_options(jax.tree.leaves(self.weights), self.tokens) | dict(candidate.options)
            options["xla_gpu_dot_merger_threshold_mb"] = 0  # XLA would make one product of several that read the same x
        return jax.jit(all_of_them, compiler_options=options).lower(*self.args(candidate)).compile()

    def error(self, results: list[jax.Array]) -> float:
        """How far the first and the last result are from what is wanted, as a share of its norm; NaN if one is NaN."""
        off = [
            jnp.linalg.norm(total(got).astype(jnp.float32) - wanted) / jnp.linalg.norm(wanted)
            for got, wanted in zip((results[0], results[-1]), self.wanted, strict=True)
        ]
        return float(jnp.max(jnp.stack(off)))

    def microseconds(self, call: Callable) -> float:
        """How long one product takes, of calls one after the other."""
        count = len(self.weights) * len(self.xs)
        calls = 1 if self.smoke else 1 + int(SECONDS / _seconds(call, 2))
        return 1e6 * statistics.median(_seconds(call, calls) for _ in range(1 if self.smoke else REPEATS)) / count


def total(y: jax.Array) -> jax.Array:
    """A product ``[T, out]``; of one in parts ``[T, parts, out]``, their sum."""
    return jnp.sum(y, axis=1) if y.ndim == 3 else y


def _seconds(call: Callable, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        results = call()
    jax.block_until_ready(results)
    return (time.perf_counter() - began) / calls


def launched(compiled: Callable) -> str:
    """The custom calls of a program, and how many fusions of which kind."""
    text = compiled.as_text()  # pyright: ignore[reportFunctionMemberAccess]
    names = re.findall(r'custom_call_target="([^"]+)"', text) + re.findall(r'"kind":"(__\w+)"', text)
    return ", ".join(f"{names.count(name)} {name}" for name in sorted(set(names))) or "fusions"


class Table:
    """Measures cases and prints a line for each way as soon as it is known; ``failed`` if anything was."""

    def __init__(self, shape: tuple[int, int], in_parts: bool, rate: float, smoke: bool, until: float):
        self.shape, self.in_parts, self.rate, self.smoke = shape, in_parts, rate, smoke
        self.until, self.failed = until, False
        self.best: dict[tuple[str, int], dict[str, str]] = {}

    def run(self, kinds, tokens, ways):
        print(_line("weight", "tokens", "way", "us", "read", "multiply", "share", ""), flush=True)
        with ThreadPoolExecutor(8) as pool:
            for kind in kinds:
                cases = [
                    (
                        Case(kind, count, self.shape, self.smoke),
                        list(candidates(kind, count, self.shape, self.in_parts, ways, self.smoke)),
                    )
                    for count in tokens
                ]
                # XLA times its own products while it compiles them, so these are compiled alone, and kernels ahead.
                ahead = {
                    (case.tokens, one.name): pool.submit(case.compiled, one)
                    for case, several in cases
                    for one in several
                    if one.way in ("mosaic", "triton")
                }
                for program in ahead.values():  # while one is compiled and loaded, a call of another takes milliseconds
                    program.exception()
                for case, several in cases:
                    self._measure(case, several, ahead)

    def _measure(self, case: Case, several: list[Candidate], ahead: dict[Any, Future]):
        for way, group in itertools.groupby(several, lambda one: one.way):
            times: list[tuple[float, str]] = []
            for one in group:
                if time.monotonic() > self.until:
                    print(f"out of time before {case.kind}, {case.tokens} tokens, {way} {one.name}", flush=True)
                    self.failed = True
                    return
                try:
                    times.append(self._one(case, one, ahead))
                except Exception:
                    last = "\n    ".join(traceback.format_exc().strip().splitlines()[-3:])
                    print(f"{case.kind}, {case.tokens} tokens, {way} {one.name} failed:\n    {last}", flush=True)
                    self.failed = True
            if times:
                self._print(case, way, times)

    def _one(self, case: Case, one: Candidate, ahead: dict[Any, Future]) -> tuple[float, str]:
        future = ahead.get((case.tokens, one.name)) if one.way in ("mosaic", "triton") else None
        compiled = future.result() if future else case.compiled(one)
        call = functools.partial(compiled, *case.args(one))
        wanted = case.wanted
        jax.block_until_ready(wanted)
        if not self.smoke:  # nothing else ends a kernel that waits for itself
            print(f"  {case.kind} {case.tokens} {one.way} {one.name}", end="", flush=True)
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
        try:
            error = case.error(call())
            if not error < CLOSE:
                raise ArithmeticError(f"wrong: the result is off by {error:.2e} of its norm")
            took = case.microseconds(call)
        finally:
            if not self.smoke:
                faulthandler.cancel_dump_traceback_later()
        if not self.smoke:
            print(f"  {took:.1f}", flush=True)
        return took, one.name or launched(compiled)

    def _print(self, case: Case, way: str, times: list[tuple[float, str]]):
        took, name = min(times)
        floors = case.floors(self.rate)
        cells = f"{took:.1f}", *(f"{floor:.1f}" for floor in floors), f"{max(floors) / took:.0%}"
        self.best.setdefault((case.kind, case.tokens), {})[way] = cells[0]
        print(_line(case.kind, str(case.tokens), way, *cells, name), flush=True)

    def summary(self, ways):
        """The times once more, a line for each weight and number of tokens."""
        print("\n" + _line("weight", "tokens", *ways), flush=True)
        for (kind, count), by_way in self.best.items():
            print(_line(kind, str(count), *(by_way.get(way, "-") for way in ways)), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--weights", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument(
        "--shape", nargs=2, type=int, default=(OUTPUTS, INPUTS), help="outputs and inputs of the weight"
    )
    parser.add_argument("--parts", action="store_true", help="the product may be partial sums")
    parser.add_argument("--seconds", type=float, default=220, help="nothing is begun later than this")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors; measured without this")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, meaningless times")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: there is nothing to learn from the products of this machine; --smoke runs a tiny version")
    until = time.monotonic() + args.seconds
    by_way, rate = bandwidth.for_floors(bandwidth.ASSUMED if args.smoke else args.bandwidth)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}; {bandwidth.describe(by_way)}", flush=True)
    if "mosaic" in args.ways and not MOSAIC:
        print(f"mosaic is left out: it needs jax 0.11 or later, and this is {jax.__version__}")
    table = Table(SMALL if args.smoke else tuple(args.shape), args.parts, rate, args.smoke, until)
    table.run(args.weights, args.tokens, args.ways)
    table.summary(args.ways)
    return int(table.failed)


def _line(*cells: str) -> str:
    return "".join(f"{cell:<10}" for cell in cells).rstrip()


if __name__ == "__main__":
    sys.exit(main())
