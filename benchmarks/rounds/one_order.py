"""What one order of sums costs whole rounds and prefill passes, beside the kernels that are chosen for speed alone.

    python -m benchmarks.rounds.one_order                         # needs an NVIDIA GPU: every shape
    python -m benchmarks.rounds.one_order --shape llama-3.1-8b --formats int4 fp8_block
    python -m benchmarks.rounds.one_order --only prompts          # or rounds, or passes
    python -m benchmarks.rounds.one_order --json FILE             # also writes a result, see benchmarks/report/results.py
    python -m benchmarks.rounds.one_order --smoke                 # tiny and anywhere, with meaningless times

Weights are random. Plain rounds, verify passes of five query tokens and prompts are those of ``benchmarks.rounds.programs``
and ``benchmarks.rounds.prompts``, in milliseconds. Engines with ``reproducible=True`` have the kernels of one order, and
pin no shapes (``jspec.models.one_order``); without it, they have the others."""

import argparse
import dataclasses
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator

from benchmarks.rounds.bench import Bench
from benchmarks.rounds.of_shapes import Run, known_format, parser_of
from benchmarks.rounds.programs import PAGE, Decoding, Forward
from benchmarks.rounds.prompts import Reading
from benchmarks.rounds.round import Figure
from jspec.pallas.dispatch import one_order

FORMATS = {"llama-3.1-8b": ("none", "int4", "fp8_block"), "qwen3-30b-a3b": ("int4",), "qwen3.6-27b": ("int4",)}
LINES = {
    "rounds": [Decoding(None, 0, rows, 512, 128) for rows in (1, 16, 64)],
    "passes": [Forward(rows, 5, 2048, 2112, 32) for rows in (1, 16)],
    "prompts": [Reading(tokens) for tokens in (512, 2048, 8192)],
}
SMALL = [Decoding(None, 0, 2, 16, 8), Forward(2, 3, PAGE, PAGE, 1), Reading(96)]


def figures(shape: str, bench: Bench, quantization: str | None, lines, ratios: list[float]) -> Iterator[Figure]:
    """Two figures for each line: in one order, whose goal is 1.05 of the other or 1.08 for prompts, and the fastest. The
    ratios of all are added to ``ratios``."""
    for number, line in enumerate(lines, 1):
        what, times = dataclasses.replace(line, quantization=quantization), {}
        for ordered in (False, True):
            with one_order(ordered):
                times[ordered] = bench.time(what)
        fastest, own = 1e3 * times[False].seconds, 1e3 * times[True].seconds
        ratios.append(own / fastest)
        most = 1.08 if isinstance(line, Reading) else 1.05
        for ordered, goal in ((False, None), (True, most * fastest)):
            timed, name = times[ordered], "one order" if ordered else "fastest"
            floor = 1e3 * timed.floor
            of = f"{shape}, {what}, {name}"
            yield Figure(number, name, of, "ms", 1e3 * timed.seconds, floor, goal, kernels=timed.kernels)


def main() -> int:
    parser = parser_of(__doc__, FORMATS)
    parser.add_argument("--formats", nargs="+", type=known_format, metavar="FORMAT", help="of the target's weights")
    parser.add_argument("--only", nargs="+", choices=LINES, default=list(LINES), help="what is measured")
    args: argparse.Namespace = parser.parse_args()
    shapes = ["tiny"] if args.smoke else args.shape
    run, ratios = Run.begin("one_order", parser, args, shapes), defaultdict[str, list[float]](list)
    for shape in shapes:
        for name in args.formats or FORMATS.get(shape, ("none",)):
            quantization = None if name == "none" else name
            with run.bench(shape, quantization) as bench:
                lines, found = (
                    SMALL if args.smoke else [line for only in args.only for line in LINES[only]],
                    ratios[f"{shape}, {name}"],
                )
                run.keep(figures(shape, bench, quantization, lines, found))
    for name, found in ratios.items():
        print(
            f"{name}: one order over fastest, mean {statistics.mean(found):.3f}, {' '.join(f'{r:.3f}' for r in found)}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
