"""How long rounds take on one GPU for targets with gated delta nets in three of four layers, beside their floors.

    python -m benchmarks.rounds.hybrids                           # needs an NVIDIA GPU: every line
    python -m benchmarks.rounds.hybrids --shape qwen3.6-27b       # the lines of one shape
    python -m benchmarks.rounds.hybrids --rows 1 16               # with so many rows
    python -m benchmarks.rounds.hybrids --json FILE               # also writes a result, see benchmarks/report/results.py
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.rounds.hybrids --profile    # the kernels of its rounds
    python -m benchmarks.rounds.hybrids --smoke                   # tiny and anywhere, with meaningless times

Weights are random. Rows have texts of 1,024 tokens and get 128; drafts are those of the target's layer for multi-token
prediction, with logits of 32,000 tokens, and accepted with a probability of 0.7. Times are in milliseconds, the median over
calls of many rounds each. The floor is that of ``benchmarks.rounds.round``, with recurrent states read and written once."""

import argparse
import gc
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import jax

from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import Decoding
from benchmarks.rounds.round import HEADER, Figure, keep
from benchmarks.shapes import SHAPES

PROMPT, NEW, K, DRAFT_VOCABULARY = 1024, 128, 4, 32_000
# Shape -> method (None is plain decoding) -> rows -> milliseconds to reach.
GOALS: Mapping[str, Mapping[str | None, Mapping[int, float]]] = {
    "qwen3.6-27b": {None: {1: 13.0, 16: 15.0, 64: 20.0}, "mtp": {1: 14.6, 16: 17.5, 64: 32.0}},
    "qwen3.6-35b-a3b": {None: {1: 2.4, 16: 8.5, 64: 18.0}, "mtp": {1: 4.9, 16: 18.5, 64: 24.0}},
}
SMALL: Mapping[str | None, Mapping[int, float]] = {None: {2: 1.0}, "mtp": {1: 1.0}}


def decoding(method: str | None, rows: int, small: bool) -> Decoding:
    """The rounds of a line."""
    lengths = (16, 8) if small else (PROMPT, NEW)
    if method is None:
        return Decoding(None, 0, rows, *lengths)
    return Decoding(method, K, rows, *lengths, draft_vocabulary=64 if small else DRAFT_VOCABULARY)


def figures(shape: str, bench: Bench, rows: Sequence[int] | None, small: bool) -> Iterator[Figure]:
    """The figures of a shape with these numbers of rows; None for all."""
    for number, (method, goals) in enumerate((SMALL if small else GOALS[shape]).items(), 1):
        for count, goal in goals.items():
            if rows is not None and count not in rows:
                continue
            what = decoding(method, count, small)
            timed = bench.time(what)
            times = 1e3 * timed.seconds, 1e3 * timed.floor
            tokens = timed.tokens if what.K else None
            more = {"kernels": timed.kernels, "tokens": tokens, "experts": timed.experts}
            yield Figure(number, f"{shape}, batch {count}", f"{shape}, {what}", "ms", *times, goal, **more)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=GOALS, nargs="+", default=list(GOALS), help="the shapes, in this order")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="numbers of rows")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each program's rounds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, any machine, meaningless times")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not (args.smoke or on_gpu):
        parser.error("no GPU: times need one; --smoke runs a tiny version here")
    rates, rate = bandwidth.for_floors(args.bandwidth)
    shapes = ["tiny-hybrid"] if args.smoke else args.shape
    dtype, repeats = ("bfloat16" if on_gpu else "float32"), (1 if args.smoke else args.repeats)
    result = results.begin("hybrids", {"shapes": shapes, "dtype": dtype, "smoke": args.smoke}, rate, rates)
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s\n{HEADER}", flush=True)
    for shape in shapes:
        began = time.perf_counter()
        bench = Bench(SHAPES[shape], dtype, rate, repeats, args.profile)
        jax.block_until_ready(jax.tree.leaves(bench.target))
        size = bench.pair.target.weight_bytes(2) / 1e9
        print(f"{shape}: {size:.1f} GB of weights, made in {time.perf_counter() - began:.0f} s", flush=True)
        keep(figures(shape, bench, args.rows, args.smoke), result, args.json)
        del bench
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
