"""How long rounds with trees of drafts take, beside chains of the same head.

    python -m benchmarks.rounds.tree_rounds                           # the 8B shape, EAGLE-3 and DSpark; needs a GPU
    python -m benchmarks.rounds.tree_rounds --rows 1 --heads eagle3 --widths 5 32   # K = 4 and 32 nodes
    python -m benchmarks.rounds.tree_rounds --json FILE               # writes a result: benchmarks/report/results.py
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.rounds.tree_rounds --profile   # its kernels
    python -m benchmarks.rounds.tree_rounds --smoke                   # tiny and anywhere, with meaningless times

Weights are random, texts have 512 tokens and get 128. Times are milliseconds, the median over calls of many rounds each.
Random models agree on nothing, so a tree gives one token a round here: how many it gives of trained heads,
``benchmarks.acceptance.trees`` and ``benchmarks.real.real_models`` say. Chains have a synthetic acceptance of 0.7."""

import argparse
import sys
from collections.abc import Iterator

from benchmarks.rounds.bench import Bench
from benchmarks.rounds.of_shapes import Run, parser_of
from benchmarks.rounds.programs import Decoding
from benchmarks.rounds.round import Figure
from jspec.config import TreeShape

PROMPT, NEW = 512, 128
CHAINS = {"eagle3": (2, 3, 4, 6), "dspark": (4, 7)}  # head -> K
TREES = {
    "eagle3": (TreeShape(8, 4, 2), TreeShape(12, 5, 3), TreeShape(16, 5, 4), TreeShape(32, 6, 4)),
    "dspark": (TreeShape(16, 7, 4), TreeShape(32, 7, 4), TreeShape(64, 7, 4)),
}
# Shape -> head and drafts -> rows -> milliseconds to reach.
GOALS = {"llama-3.1-8b": {("dspark", 64): {1: 6.0}}}


def decodings(head: str, rows: int, small: bool) -> Iterator[Decoding]:
    """Some chains of a head, and its trees."""
    lengths = (16, 8) if small else (PROMPT, NEW)
    for K in CHAINS[head][: 1 if small else None]:
        yield Decoding(head, K, rows, *lengths, verify="match", draft_sampling="coupled")
    for tree in TREES[head][: 1 if small else None]:
        yield Decoding(head, tree.depth, rows, *lengths, tree=tree)


def figures(shape: str, bench: Bench, args: argparse.Namespace) -> Iterator[Figure]:
    """The figures that the arguments ask for."""
    for head in args.heads:
        for rows in (1,) if args.smoke else args.rows:
            for what in decodings(head, rows, args.smoke):
                if args.widths and what.width not in args.widths:
                    continue
                timed = bench.time(what)
                goal = GOALS.get(shape, {}).get((head, what.width), {}).get(rows)
                times = 1e3 * timed.seconds, 1e3 * timed.floor
                more = {"kernels": timed.kernels, "tokens": timed.tokens}
                yield Figure(1, f"{head}, {rows} x {what.width}", f"{shape}, {what}", "ms", *times, goal, **more)


def main() -> int:
    parser = parser_of(__doc__, GOALS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], metavar="N", help="numbers of rows")
    parser.add_argument(
        "--heads", choices=CHAINS, nargs="+", default=list(CHAINS), metavar="HEAD", help="of these kinds"
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        metavar="T",
        help="only with so many query tokens: K + 1, or the nodes of a tree",
    )
    args = parser.parse_args()
    shapes = ["tiny"] if args.smoke else args.shape
    run = Run.begin("tree_rounds", parser, args, shapes)
    for shape in shapes:
        with run.bench(shape, None) as bench:
            run.keep(figures(shape, bench, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
