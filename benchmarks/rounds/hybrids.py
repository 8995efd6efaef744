"""How long rounds take on one GPU for targets with gated delta nets in three of four layers, beside their floors.

    python -m benchmarks.rounds.hybrids                           # needs an NVIDIA GPU: every line
    python -m benchmarks.rounds.hybrids --shape qwen3.6-27b       # the lines of one shape
    python -m benchmarks.rounds.hybrids --lines plain prefill     # some lines of each shape
    python -m benchmarks.rounds.hybrids --rows 1 16               # with so many rows
    python -m benchmarks.rounds.hybrids --quantization fp8_block  # with weights in a format of eight or four bits
    python -m benchmarks.rounds.hybrids --draft-quantization none fp8_block    # the layer that drafts in these, in turn
    python -m benchmarks.rounds.hybrids --json FILE               # also writes a result, see benchmarks/report/results.py
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.rounds.hybrids --profile    # the kernels of its rounds
    python -m benchmarks.rounds.hybrids --smoke                   # tiny and anywhere, with meaningless times

Weights are random. Rows have texts of 1,024 tokens and get 128; drafts are those of the target's layer for multi-token
prediction, with logits of 32,000 tokens, and accepted with a probability of 0.7. Times are in milliseconds, the median over
calls of many rounds each. The floor is that of ``benchmarks.rounds.round``, with recurrent states read and written once.
A prompt of 32,000 tokens is read in passes of the engine's default size for texts that need not be reproducible; its floor
is that of ``benchmarks.rounds.prompts.reading_floor``."""

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping

from benchmarks.rounds.bench import Bench
from benchmarks.rounds.of_shapes import Run, known_format, parser_of
from benchmarks.rounds.programs import Decoding
from benchmarks.rounds.prompts import Reading
from benchmarks.rounds.round import Figure

PROMPT, NEW, K, DRAFT_VOCABULARY = 1024, 128, 4, 32_000
LONG_PROMPT, OVER_FLOOR = 32_000, 1.5  # its tokens, and how many times its floor it is to take
LINES = "plain", "mtp", "prefill"
# Shape -> line -> rows -> milliseconds to reach.
GOALS: Mapping[str, Mapping[str, Mapping[int, float]]] = {
    "qwen3.6-27b": {"plain": {1: 13.0, 16: 15.0, 64: 20.0}, "mtp": {1: 14.6, 16: 17.5, 64: 32.0}},
    "qwen3.6-35b-a3b": {"plain": {1: 2.4, 16: 8.5, 64: 18.0}, "mtp": {1: 4.9, 16: 18.5, 64: 24.0}},
}
SMALL: Mapping[str, Mapping[int, float]] = {"plain": {2: 1.0}, "mtp": {1: 1.0}}


def decodings(line: str, rows: int, small: bool, draft_formats: Iterable[str]) -> Iterator[Decoding]:
    """The rounds of a line, with drafts for each format of the layer that makes them."""
    lengths = (16, 8) if small else (PROMPT, NEW)
    if line == "plain":
        yield Decoding(None, 0, rows, *lengths)
        return
    for name in draft_formats:
        of_draft = None if name == "none" else name
        vocabulary = 64 if small else DRAFT_VOCABULARY
        yield Decoding(line, K, rows, *lengths, draft_vocabulary=vocabulary, draft_quantization=of_draft)


def figures(shape: str, bench: Bench, args: argparse.Namespace, quantization: str | None) -> Iterator[Figure]:
    """The figures of a shape that the arguments ask for. Goals of rounds are those of weights in bfloat16."""
    lines = SMALL if args.smoke else GOALS[shape]
    for line in args.lines:
        number = 1 + LINES.index(line)
        if line == "prefill":
            yield prefill(number, shape, bench, Reading(96 if args.smoke else LONG_PROMPT, quantization))
            continue
        for count in lines[line]:
            if args.rows is not None and count not in args.rows:
                continue
            goal = None if quantization else lines[line][count]
            for rounds in decodings(line, count, args.smoke, args.draft_quantization):
                what = dataclasses.replace(rounds, quantization=quantization)
                timed = bench.time(what)
                times = 1e3 * timed.seconds, 1e3 * timed.floor
                tokens = timed.tokens if what.K else None
                more = {"kernels": timed.kernels, "tokens": tokens, "experts": timed.experts}
                yield Figure(number, f"{shape}, batch {count}", f"{shape}, {what}", "ms", *times, goal, **more)


def prefill(number: int, shape: str, bench: Bench, what: Reading) -> Figure:
    """The figure of a long prompt."""
    timed = bench.time(what)
    times = 1e3 * timed.seconds, 1e3 * timed.floor, 1e3 * OVER_FLOOR * timed.floor
    return Figure(number, f"{shape}, {what.tokens} tokens", f"{shape}, {what}", "ms", *times, kernels=timed.kernels)


def main() -> int:
    parser = parser_of(__doc__, GOALS)
    parser.add_argument("--lines", choices=LINES, nargs="+", default=LINES, metavar="LINE", help="of each shape")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="numbers of rows")
    parser.add_argument("--quantization", type=known_format, metavar="FORMAT", help="of the target's weights")
    parser.add_argument(
        "--draft-quantization",
        type=known_format,
        nargs="+",
        default=["none"],
        metavar="FORMAT",
        help="of the MTP layer",
    )
    args = parser.parse_args()
    quantization = None if args.quantization == "none" else args.quantization
    shapes = ["tiny-hybrid"] if args.smoke else args.shape
    run = Run.begin("hybrids", parser, args, shapes)
    for shape in shapes:
        with run.bench(shape, quantization) as bench:
            run.keep(figures(shape, bench, args, quantization))
    return 0


if __name__ == "__main__":
    sys.exit(main())
