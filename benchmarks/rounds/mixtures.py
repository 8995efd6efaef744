"""How long rounds and passes of mixtures of experts take on one GPU, beside the floor that the experts they hit set.

    python -m benchmarks.rounds.mixtures                            # needs an NVIDIA GPU: every line
    python -m benchmarks.rounds.mixtures --shape gpt-oss-20b        # the lines of one shape
    python -m benchmarks.rounds.mixtures --json FILE                # also writes a result, see benchmarks/report/results.py
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.rounds.mixtures --profile   # the kernels of its rounds
    python -m benchmarks.rounds.mixtures --smoke                    # tiny and anywhere, with meaningless times

Weights are random, and so are the routers, which spread tokens evenly. The floor is that of ``benchmarks.rounds.round``,
but of the experts it counts those that a pass hits: the number that is printed, of all experts of a layer. Times are in
milliseconds, the median over calls of many rounds each. Before a shape, the time to make its weights is printed. Before a
line, the time that it took with compilation is printed, and the largest memory. ``benchmarks.engine.serving`` measures
the time to the first token."""

import argparse
import gc
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import Decoding, Forward
from benchmarks.rounds.round import HEADER, Figure, keep
from benchmarks.shapes import SHAPES

LIVE = 640  # slots of a row: in the middle of 256 tokens after a prompt of 512
PROMPT, NEW = 512, 256


class Line(NamedTuple):
    """What is timed of a shape.

    Attributes:
      number: of the line.
      variant: what tells it from others of the same number.
      what: the rounds or the passes.
      goal, stretch: milliseconds to reach, and what would be better; None for no goal.
      share: the goal as a part of the floor's rate, None for no such goal.
    """

    number: int
    variant: str
    what: Decoding | Forward
    goal: float | None = None
    stretch: float | None = None
    share: float | None = None


def plain(batch: int) -> Decoding:
    return Decoding(None, 0, batch, PROMPT, NEW)


SHARES = {1: 0.65, 16: 0.6, 64: 0.6}  # of the floor's rate, by rows: what GLM-4.7-Flash is to reach
LINES: dict[str, Sequence[Line]] = {
    "qwen3-30b-a3b": (
        Line(1, "", plain(1), 2.8, 2.3),
        Line(2, "", Forward(1, 5, LIVE, 1024, 64), 6.6, 5.8),
        Line(3, "batch 16", plain(16), 14, 12.5),
        Line(3, "batch 64", plain(64), 21, 18.5),
    ),
    "gpt-oss-20b": (
        Line(4, "batch 1", plain(1), 2.2, 1.8),
        Line(4, "batch 64", plain(64), 4.8, 4.2),
        Line(5, "", Decoding("eagle3", 4, 1, PROMPT, NEW)),
    ),
    "glm-4.7-flash": (
        *(Line(7, f"plain, batch {batch}", plain(batch), share=share) for batch, share in SHARES.items()),
        *(
            Line(7, f"mtp K={K}, batch {batch}", Decoding("mtp", K, batch, PROMPT, NEW), share=share)
            for K in (1, 3)
            for batch, share in SHARES.items()
        ),
        Line(8, "plain", Decoding(None, 0, 1, 32_000, 64), share=SHARES[1]),
        Line(8, "mtp K=3", Decoding("mtp", 3, 1, 32_000, 64), share=SHARES[1]),
    ),
    "gpt-oss-120b": (Line(6, "plain", plain(1)), Line(6, "eagle3", Decoding("eagle3", 4, 1, PROMPT, NEW))),
}
SMALL: Sequence[Line] = (
    Line(1, "", Decoding(None, 0, 2, 16, 8)),
    Line(2, "", Forward(1, 3, 16, 64, 2)),
    Line(5, "", Decoding("eagle3", 2, 1, 16, 8)),
)
SMALL_LATENT: Sequence[Line] = (
    Line(7, "plain", Decoding(None, 0, 2, 16, 8)),
    Line(7, "mtp", Decoding("mtp", 3, 1, 16, 8)),
)


def figures(
    shape: str, lines: Sequence[Line], dtype: str, rate: float, repeats: int, profiled: bool
) -> Iterator[Figure]:
    """The figures of a shape, whose weights are made first."""
    began = time.perf_counter()
    bench = Bench(SHAPES[shape], dtype, rate, repeats, profiled)
    size = bench.pair.target.weight_bytes(2) / 1e9
    jax.block_until_ready(jax.tree.leaves(bench.target))
    print(f"{shape}: {size:.1f} GB of weights, made in {time.perf_counter() - began:.0f} s", flush=True)
    for line in lines:
        began = time.perf_counter()
        timed = bench.time(line.what)
        count = bench.pair.target.experts
        assert count is not None
        what = f"{shape}, {line.what}"
        print(
            f"      {timed.experts:.1f} of {count.all} experts; {_memory()}, {time.perf_counter() - began:.0f} s in all"
        )
        tokens = timed.tokens if isinstance(line.what, Decoding) and line.what.K else None
        times = 1e3 * timed.seconds, 1e3 * timed.floor
        goal = line.goal if line.share is None else times[1] / line.share
        more = timed.kernels, tokens, timed.experts
        yield Figure(line.number, line.variant, what, "ms", *times, goal, line.stretch, *more)


def _memory() -> str:
    stats = jax.local_devices()[0].memory_stats() or {}
    return f"at most {stats.get('peak_bytes_in_use', 0) / 1e9:.1f} GB in use"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=LINES, nargs="+", default=list(LINES), help="the shapes, in this order")
    parser.add_argument("--lines", type=int, nargs="+", metavar="N", help="lines of the table")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each program's rounds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, any machine, meaningless times")
    args = parser.parse_args()
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("no GPU: times of these shapes need one; --smoke runs a tiny version here")
    rates, rate = bandwidth.for_floors(args.bandwidth)
    small = {"tiny-mixture": SMALL, "tiny-latent": SMALL_LATENT}
    shapes = small if args.smoke else {shape: LINES[shape] for shape in args.shape}
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    result = results.begin("mixtures", {"shapes": list(shapes), "dtype": dtype, "smoke": args.smoke}, rate, rates)
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s\n{HEADER}", flush=True)
    for shape, lines in shapes.items():
        chosen = [line for line in lines if args.lines is None or line.number in args.lines]
        keep(figures(shape, chosen, dtype, rate, 1 if args.smoke else args.repeats, args.profile), result, args.json)
        gc.collect()  # the next shape's weights need the memory of this one's
    return 0


if __name__ == "__main__":
    sys.exit(main())
