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

import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from benchmarks.rounds.bench import Bench
from benchmarks.rounds.of_shapes import Run, parser_of
from benchmarks.rounds.programs import Decoding, Forward
from benchmarks.rounds.round import Figure

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


def figures(shape: str, bench: Bench, lines: Sequence[Line]) -> Iterator[Figure]:
    """The figures of a shape."""
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
    parser = parser_of(__doc__, LINES)
    parser.add_argument("--lines", type=int, nargs="+", metavar="N", help="lines of the table")
    args = parser.parse_args()
    small = {"tiny-mixture": SMALL, "tiny-latent": SMALL_LATENT}
    shapes = small if args.smoke else {shape: LINES[shape] for shape in args.shape}
    run = Run.begin("mixtures", parser, args, list(shapes))
    for shape, lines in shapes.items():
        chosen = [line for line in lines if args.lines is None or line.number in args.lines]
        with run.bench(shape) as bench:
            run.keep(figures(shape, bench, chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
