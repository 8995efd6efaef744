"""How long rounds of plain decoding take on one GPU for targets of many families, beside their floors.

    python -m benchmarks.rounds.families                         # needs an NVIDIA GPU: every line
    python -m benchmarks.rounds.families --shape gemma-4-31b     # the lines of one shape
    python -m benchmarks.rounds.families --rows 1 16             # with so many rows
    python -m benchmarks.rounds.families --json FILE             # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.rounds.families --smoke                 # tiny and anywhere, with meaningless times

Weights are random, in bfloat16; each row has 512 tokens and gets 256. Times are in milliseconds, the median over calls of
many rounds each, and the floor is that of ``benchmarks.rounds.round``. Goals are parts of the floor's rate."""

import argparse
import gc
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping

import jax

from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import Decoding
from benchmarks.rounds.round import HEADER, Figure, keep
from benchmarks.shapes import SHAPES

PROMPT, NEW = 512, 256
# Rows -> how many times as long as its floor a round may take; None for no goal.
SHARES: Mapping[str, Mapping[int, float | None]] = {
    "gemma-4-31b": {1: 1.08, 16: 1.2, 64: 1.3},
    "gemma-4-26b-a4b": {1: 1.8, 16: 1.2, 64: 1.2},
    "mistral-small-24b": dict.fromkeys((1, 16, 64)),
    "seed-oss-36b": dict.fromkeys((1, 16, 64)),
}


def figures(shape: str, rows: Mapping[int, float | None], dtype: str, rate: float, repeats: int) -> Iterator[Figure]:
    """The figures of a shape, whose weights are made first."""
    began = time.perf_counter()
    bench = Bench(SHAPES[shape], dtype, rate, repeats)
    jax.block_until_ready(jax.tree.leaves(bench.target))
    size = bench.pair.target.weight_bytes(2) / 1e9
    print(f"{shape}: {size:.1f} GB of weights, made in {time.perf_counter() - began:.0f} s", flush=True)
    for count, most in rows.items():
        what = Decoding(None, 0, count, *((16, 8) if shape.startswith("tiny") else (PROMPT, NEW)))
        timed = bench.time(what)
        goal = None if most is None else 1e3 * timed.floor * most
        times = 1e3 * timed.seconds, 1e3 * timed.floor
        yield Figure(1, f"{shape}, batch {count}", f"{shape}, {what}", "ms", *times, goal, kernels=timed.kernels)
    del bench
    gc.collect()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHARES, nargs="+", default=list(SHARES), help="the shapes, in this order")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="numbers of rows")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, any machine, meaningless times")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not (args.smoke or on_gpu):
        parser.error("no GPU: times need one; --smoke runs a tiny version here")
    rates, rate = bandwidth.for_floors(args.bandwidth)
    shapes = {"tiny": {2: 1.5}} if args.smoke else {shape: SHARES[shape] for shape in args.shape}
    if args.rows is not None:
        shapes = {
            shape: {count: most for count, most in rows.items() if count in args.rows} for shape, rows in shapes.items()
        }
    dtype, repeats = ("bfloat16" if on_gpu else "float32"), (1 if args.smoke else args.repeats)
    result = results.begin("families", {"shapes": list(shapes), "dtype": dtype, "smoke": args.smoke}, rate, rates)
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s\n{HEADER}", flush=True)
    lines = (figure for shape, rows in shapes.items() for figure in figures(shape, rows, dtype, rate, repeats))
    keep(lines, result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
