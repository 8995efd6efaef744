"""The decode round beside what memory and arithmetic allow, and beside what it is to reach: random weights, one GPU.

    python -m benchmarks.round --shape llama-3.1-8b                # every line of the table
    python -m benchmarks.round --rows 1 4 9 --batches 1 16         # some lines
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.round --profile --rows 1    # its kernels
    python -m benchmarks.round --smoke                             # tiny and anywhere, with meaningless times

Floors count the bytes of weights and live keys and values, each read once, at the read rate that is measured first, and
products by 790 TFLOP/s where those take longer; attention is added, because it does not overlap the products. Random
models never agree, so drafts are accepted by chance, 0.7 of them given those before ("synthetic acceptance"). Times are
medians of calls of many rounds each, compilation left out.

Lines: 1 plain decoding at one row; 2 the target over 5 and 8 rows; 3 plain decoding of batches; 4, 5, 6 the target over
a batch of 5 rows, 5 with a cache of which an eighth is live; 9 rounds with an EAGLE head, 10 with a draft model, 11
with an EAGLE-3 head; 12 a parallel head's round of 8 drafts over one of 3; 13 wall time of ``generate`` over device
rounds; 14 sampled over argmax drafts; 15 line 1 with quantised weights. Lines 7 and 8 are those of
``benchmarks.verify``."""

import argparse
import dataclasses
import json
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence

import jax

from benchmarks import bandwidth
from benchmarks.programs import PAGE, Bench, Decoding, Forward
from benchmarks.shapes import SHAPES
from benchmarks.wall import generate_seconds

Measure = Callable[[int], Iterator["Figure"]]  # of a batch size

ACCEPTANCE = 0.7
SYNTHETIC = f"synthetic acceptance {ACCEPTANCE}"
LENGTH, LONG, NEW = 512, 896, 256  # prompts, the longer one around 1,024 live slots, and tokens after it
SMALLER = 16  # lengths of a smoke run are so many times less


@dataclasses.dataclass(frozen=True)
class Figure:
    """A line of the table.

    Attributes:
      row: its number.
      what: what was measured.
      unit: of the numbers: ``ms``, ``x`` for a ratio, ``%``.
      measured, floor: the figure, and the least that it could be.
      goal, beyond: what it is to reach; None for no goal.
      kernels: launches of a round, None for a ratio.
      tokens: that a round gave a row, None where none were drafted.
    """

    row: int
    what: str
    unit: str
    measured: float
    floor: float
    goal: float | None = None
    beyond: float | None = None
    kernels: int | None = None
    tokens: float | None = None

    def __str__(self) -> str:
        digits = 3 if self.unit == "ms" else 2
        show = lambda x, digits=digits: "-" if x is None else f"{x:.{digits}f}"  # noqa: E731
        cells = [show(x) for x in (self.floor, self.goal, self.beyond, self.measured)]
        cells += [self.unit, show(self.measured / self.floor if self.floor else None, 2)]
        return _columns(self.row, self.what, *cells, self.kernels or "-", show(self.tokens, 2), self.verdict)

    @property
    def verdict(self) -> str:
        if self.goal is None or self.beyond is None:
            return ""
        return "beyond" if self.measured <= self.beyond else "met" if self.measured <= self.goal else "short"


def _columns(row, what, floor, goal, beyond, measured, unit, ratio, kernels, tokens, verdict) -> str:
    numbers = f"{floor:>7} {goal:>7} {beyond:>7} {measured:>8} {unit:<2} {ratio:>7} {kernels:>7} {tokens:>6}"
    return f"{row:>3}  {what:<82} {numbers}  {verdict}"


HEADER = _columns("row", "what", "floor", "goal", "beyond", "measured", "", "/ floor", "kernels", "tokens", "")


@dataclasses.dataclass(frozen=True)
class Table:
    """The lines, over one set of weights.

    Attributes:
      bench: the weights.
      divisor: of all lengths; 1 but for smoke runs.
      goals: whether they are for this shape.
    """

    bench: Bench
    divisor: int
    goals: bool

    def decoding(self, method: str | None, K: int, batch: int, start: int = LENGTH, **how) -> Decoding:
        return Decoding(method, K, batch, start // self.divisor, NEW // self.divisor, ACCEPTANCE, **how)

    def forward(self, batch: int, width: int, live: int, capacity: int) -> Forward:
        capacity = max(capacity // self.divisor, PAGE)
        return Forward(batch, width, live // self.divisor, capacity, 64 // self.divisor)

    def timed(self, row: int, what: Decoding | Forward, *goals: float) -> Figure:
        """A line in milliseconds."""
        timed = self.bench.time(what)
        tokens = timed.tokens if isinstance(what, Decoding) and what.K else None
        figure = self.figure(row, str(what), "ms", 1e3 * timed.seconds, 1e3 * timed.floor, *goals)
        return dataclasses.replace(figure, kernels=timed.kernels, tokens=tokens)

    def figure(self, row: int, what: str, unit: str, measured: float, floor: float, *goals: float) -> Figure:
        return Figure(row, what, unit, measured, floor, *(goals if self.goals else ()))

    def plain(self, batch: int) -> Iterator[Figure]:
        if batch == 1:
            yield self.timed(1, self.decoding(None, 0, 1, LONG), 4.0, 3.8)
        else:
            yield self.timed(3, self.decoding(None, 0, batch), *{16: (4.5, 4.2), 64: (6.0, 5.5)}[batch])

    def quantized(self, batch: int) -> Iterator[Figure]:
        for quantization in ("int8", "fp8"):
            what = self.decoding(None, 0, batch, LONG, quantization=quantization)
            yield self.timed(15, what, 2.7, 2.7)

    def narrow_passes(self, batch: int) -> Iterator[Figure]:
        """To be within 3% of line 1."""
        goal = 1.03e3 * self.bench.time(self.decoding(None, 0, 1, LONG)).seconds
        for width in (5, 8):
            yield self.timed(2, self.forward(batch, width, 1024, 1024), goal, goal)

    def passes(self, row: int, live: int, capacity: int, *goals: float) -> Measure:
        return lambda batch: iter([self.timed(row, self.forward(batch, 5, live, capacity), *goals)])

    def rounds(self, row: int, method: str, goals: dict[int, tuple[float, float]], start: int = LENGTH) -> Measure:
        return lambda batch: iter([self.timed(row, self.decoding(method, 4, batch, start), *goals[batch])])

    def parallel(self, batch: int) -> Iterator[Figure]:
        more, few = (self.decoding("parallel", K, batch, LONG) for K in (8, 3))
        yield from (self.timed(12, what) for what in (more, few))
        times = self.bench.time(more), self.bench.time(few)
        ratio, floor = times[0].seconds / times[1].seconds, times[0].floor / times[1].floor
        yield self.figure(12, f"{few.method}, K = 8 over K = 3; {SYNTHETIC}", "x", ratio, floor, 1.05, 1.02)

    def host(self, batch: int) -> Iterator[Figure]:
        what = self.decoding(None, 0, batch, LONG)
        device, wall = self.bench.time(what).seconds, generate_seconds(self.bench, what)
        yield self.figure(13, "a token of generate, wall time; floor: device time", "ms", 1e3 * wall, 1e3 * device)
        yield self.figure(13, "wall time of generate over device rounds", "%", 100 * (wall / device - 1), 0, 3, 1)

    def sampled_over_argmax(self, batch: int) -> Iterator[Figure]:
        sample, argmax = (self.decoding("eagle", 4, batch, draft_sampling=how) for how in ("sample", "argmax"))
        yield from (self.timed(14, what) for what in (sample, argmax))
        extra = 100 * (self.bench.time(sample).seconds / self.bench.time(argmax).seconds - 1)
        yield self.figure(14, f"eagle, sampled over argmax drafts, batch {batch}; {SYNTHETIC}", "%", extra, 0, 1.5, 1)

    def lines(self) -> list[tuple[int, int, Measure]]:
        """(row, batch, how it is measured), the most telling first."""
        live, half_dead = self.passes(4, 1024, 1024, 5.0, 4.6), self.passes(5, 512, 4096, 4.8, 4.4)
        many = self.passes(6, 1024, 1024, 10.5, 9.5)
        eagle = self.rounds(9, "eagle", {1: (5.9, 5.6), 16: (6.6, 6.2), 64: (11.5, 10.5)})
        model = self.rounds(10, "draft_model", {1: (6.8, 6.4), 16: (7.6, 7.2), 64: (13.5, 12.5)})
        eagle3 = self.rounds(11, "eagle3", {1: (5.0, 4.7)}, LONG)
        return [
            *((1, 1, self.plain), (4, 16, live), (9, 1, eagle), (11, 1, eagle3), (3, 16, self.plain)),
            *((5, 16, half_dead), (9, 16, eagle), (6, 64, many), (10, 1, model), (2, 1, self.narrow_passes)),
            *((3, 64, self.plain), (9, 64, eagle), (10, 16, model), (12, 1, self.parallel), (13, 1, self.host)),
            *((14, 16, self.sampled_over_argmax), (10, 64, model), (15, 1, self.quantized)),
        ]


def chosen(lines, rows: Sequence[int] | None, batches: Sequence[int] | None):
    """The lines asked for, in the order of ``rows``."""
    picked = [line for line in lines if batches is None or line[1] in batches]
    return picked if rows is None else [line for row in rows for line in picked if line[0] == row]


def run(args) -> bool:
    """Print the lines and write them; whether all of them could be measured."""
    rates, rate = bandwidth.for_floors(args.bandwidth)
    device = jax.devices()[0].device_kind
    shape = "tiny" if args.smoke else args.shape
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    print(f"{shape}, {dtype}, random weights, on {device}; jax {jax.__version__}")
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s\n{HEADER}", flush=True)
    where = {"device": device, "jax": jax.__version__, "shape": shape, "dtype": dtype, "smoke": args.smoke}
    where |= {"bandwidth": rate, "rates": rates, "synthetic_acceptance": ACCEPTANCE}
    bench = Bench(SHAPES[shape], dtype, rate, 1 if args.smoke else args.repeats, args.profile)
    table = Table(bench, SMALLER if args.smoke else 1, goals=shape == "llama-3.1-8b")
    figures, failed = [], []
    for row, batch, measure in chosen(table.lines(), args.rows, args.batches):
        try:
            for figure in measure(batch):
                print(figure, flush=True)
                figures.append(figure)
        except Exception:  # the device's time is dear: one line that cannot be measured must not cost the others
            failed.append((row, batch))
            print(f"{row:>3}  batch {batch} FAILED", flush=True)
            traceback.print_exc()
        if args.json:
            found = {"failed": failed, "lines": [dataclasses.asdict(figure) for figure in figures]}
            args.json.write_text(json.dumps(where | found, indent=1) + "\n")
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--rows", type=int, nargs="+", metavar="N", help="lines of the table, in this order")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", help="batch sizes among them")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each program's rounds")
    parser.add_argument("--json", type=pathlib.Path, metavar="OUT")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and lengths, any machine, meaningless times")
    args = parser.parse_args()
    if not args.smoke and args.shape != "tiny" and jax.default_backend() != "gpu":
        parser.error("no GPU: times of this shape need one; --smoke runs a tiny version here")
    return 0 if run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
