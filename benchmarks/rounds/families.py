"""How long rounds of plain decoding take on one GPU for targets of many families, beside their floors.

    python -m benchmarks.rounds.families                         # needs an NVIDIA GPU: every line
    python -m benchmarks.rounds.families --shape gemma-4-31b     # the lines of one shape
    python -m benchmarks.rounds.families --rows 1 16             # with so many rows
    python -m benchmarks.rounds.families --json FILE             # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.rounds.families --smoke                 # tiny and anywhere, with meaningless times

Weights are random, in bfloat16; each row has 512 tokens and gets 256. Times are in milliseconds, the median over calls of
many rounds each, and the floor is that of ``benchmarks.rounds.round``. Goals are parts of the floor's rate."""

import sys
from collections.abc import Iterator, Mapping

from benchmarks.rounds.bench import Bench
from benchmarks.rounds.of_shapes import Run, parser_of
from benchmarks.rounds.programs import Decoding
from benchmarks.rounds.round import Figure

PROMPT, NEW = 512, 256
# Rows -> how many times as long as its floor a round may take; None for no goal.
SHARES: Mapping[str, Mapping[int, float | None]] = {
    "gemma-4-31b": {1: 1.08, 16: 1.2, 64: 1.3},
    "gemma-4-26b-a4b": {1: 1.8, 16: 1.2, 64: 1.2},
    "mistral-small-24b": dict.fromkeys((1, 16, 64)),
    "seed-oss-36b": dict.fromkeys((1, 16, 64)),
}


def figures(shape: str, bench: Bench, rows: Mapping[int, float | None]) -> Iterator[Figure]:
    """The figures of a shape."""
    for count, most in rows.items():
        what = Decoding(None, 0, count, *((16, 8) if shape.startswith("tiny") else (PROMPT, NEW)))
        timed = bench.time(what)
        goal = None if most is None else 1e3 * timed.floor * most
        times = 1e3 * timed.seconds, 1e3 * timed.floor
        yield Figure(1, f"{shape}, batch {count}", f"{shape}, {what}", "ms", *times, goal, kernels=timed.kernels)


def main() -> int:
    parser = parser_of(__doc__, SHARES)
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="numbers of rows")
    args = parser.parse_args()
    shapes = {"tiny": {2: 1.5}} if args.smoke else {shape: SHARES[shape] for shape in args.shape}
    run = Run.begin("families", parser, args, list(shapes))
    for shape, rows in shapes.items():
        chosen = {count: most for count, most in rows.items() if args.rows is None or count in args.rows}
        with run.bench(shape) as bench:
            run.keep(figures(shape, bench, chosen))
    return 0


if __name__ == "__main__":
    sys.exit(main())
