"""jspec's side of a row of ``benchmarks.peers``: the rounds that ``benchmarks.rounds`` times, a compiled program of many of
them for each number of rows. What was measured is printed as ``benchmarks.peers.children`` reads it.

    python -m benchmarks.peers.of_jspec 8b-int4 --batches 1 16 64"""

import argparse
import dataclasses
import json
import sys

import jax

from benchmarks.kernels import bandwidth
from benchmarks.peers.rows import ACCEPTANCE, BATCHES, DRAFTS, ROWS, SMOKE, Row
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import DRAFT_VOCABULARY, Pair


def rounds(row: Row, batch: int) -> Decoding:
    """What is timed of a row."""
    drafts, vocabulary = DRAFTS if row.method else 0, DRAFT_VOCABULARY if row.method == "mtp" else None
    return Decoding(row.method, drafts, batch, row.prompt, row.new, ACCEPTANCE, draft_vocabulary=vocabulary)


def say(**line):
    print(json.dumps(line), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=(*ROWS, *SMOKE))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N", help="numbers of rows")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    args = parser.parse_args()
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and args.row in ROWS:
        parser.error(f"no GPU: times of {args.row} need one; {' and '.join(SMOKE)} run here")
    row = {**ROWS, **SMOKE}[args.row]
    rates, rate = bandwidth.for_floors(args.bandwidth)
    say(about=dataclasses.asdict(results.begin("peers", {}, rate, rates)))
    bench = Bench(Pair(row.target, row.target), "bfloat16" if on_gpu else "float32", rate, repeats=3)
    for batch in args.batches:
        try:
            timed = bench.time(rounds(row, batch))
        except Exception as error:  # mostly of a card that is too small: other numbers of rows may have room
            say(rows=batch, reason=f"{type(error).__name__}: {error}")
        else:
            say(rows=batch, ms=1e3 * timed.seconds, floor=1e3 * timed.floor, tokens=timed.tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
