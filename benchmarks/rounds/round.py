"""How long a decode round takes on one GPU with random weights, beside the floor that memory and arithmetic set and
beside the goal.

    python -m benchmarks.rounds.round --shape llama-3.1-8b               # every line of the table
    python -m benchmarks.rounds.round --lines 1 4 9 --batches 1 16       # some lines
    python -m benchmarks.rounds.round --json FILE                   # also writes a result, see benchmarks/report/results.py
    XLA_FLAGS=--xla_gpu_enable_command_buffer= python -m benchmarks.rounds.round --profile --lines 1  # its kernels
    python -m benchmarks.rounds.round --smoke                            # tiny and anywhere, with meaningless times

The floor of a pass is the time in which its weights can be read once, at the read rate that is measured first, or the
time of its products at 790 TFLOP/s if that is longer. The time in which the live keys and values can be read once is
added, because attention does not overlap the products. Random models never agree, so drafts are accepted by chance: each
draft with probability 0.7 if those before it were accepted ("synthetic acceptance"). A time is the median over calls of
many rounds each; compilation is left out.

The lines of the table:

    1   plain decoding, one row
    2   a verify pass of the target, one row of 5 and of 8 query tokens
    3   plain decoding, 16 and 64 rows
    4   a verify pass, 16 rows of 5 query tokens, all slots of the cache live
    5   the same with an eighth of the slots live
    6   a verify pass, 64 rows of 5 query tokens
    9   rounds with an EAGLE head
    10  rounds with a draft model
    11  rounds with an EAGLE-3 head
    12  a round of 8 drafts of a parallel draft head over a round of 3 drafts
    13  wall time of ``generate`` over the time of its rounds on the device
    14  rounds with sampled drafts over rounds with argmax drafts
    15  line 1 with quantised weights
    16  rounds with a DSpark head of 5 layers, 7 drafts
    17  line 9 with a draft vocabulary of 32,768 tokens
    18  the same with the draft head in int8
    19  line 10 with a draft vocabulary of 32,768 tokens and the draft model in int8

Lines 7 and 8 are those of ``benchmarks.kernels.verify``. A figure's key in the result is the number of its line, followed
by what tells it from other figures of that line, as in ``9, batch 16``."""

import argparse
import dataclasses
import pathlib
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax

from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import PAGE, Decoding, Forward
from benchmarks.rounds.wall import generate_seconds
from benchmarks.shapes import SHAPES

Measure = Callable[[int], Iterator["Figure"]]  # of a batch size

ACCEPTANCE = 0.7
SYNTHETIC = f"synthetic acceptance {ACCEPTANCE}"
DRAFT_TOKENS = 32_768  # of a reduced draft vocabulary
LENGTH, LONG, NEW = 512, 896, 256  # prompts, the longer one around 1,024 live slots, and tokens after it
SMALLER = 16  # lengths of a smoke run are so many times less


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of the table.

    Attributes:
      line: number of its line.
      variant: what tells it from other figures of that line, empty if it is the only one.
      what: what was measured.
      unit: of the numbers: ``ms``, ``x`` for a ratio, ``%``.
      measured: the figure.
      floor: the least that it could be.
      goal, stretch: what it is to reach, and what would be better than that; None for no goal.
      kernels: launches of a round, None for a ratio.
      tokens: that a round gave a row on average, None if none were drafted.
      experts: of how many experts a layer of a mixture read the weights, on average; None for a dense model.
    """

    line: int
    variant: str
    what: str
    unit: str
    measured: float
    floor: float
    goal: float | None = None
    stretch: float | None = None
    kernels: int | None = None
    tokens: float | None = None
    experts: float | None = None

    @property
    def key(self) -> str:
        return f"{self.line}, {self.variant}" if self.variant else str(self.line)

    def add_to(self, result: results.Result):
        """Put it under its key into a result."""
        result.measured[self.key], result.floors[self.key] = self.measured, self.floor
        if self.goal is not None:
            result.goals[self.key] = {"goal": self.goal, "stretch": self.stretch}
        details = {"what": self.what, "unit": self.unit, "kernels": self.kernels, "tokens": self.tokens}
        details["experts"] = self.experts
        result.details[self.key] = {"line": self.line} | {k: x for k, x in details.items() if x is not None}


def keep(figures: Iterable[Figure], result: results.Result, file: pathlib.Path | None):
    """Print figures as they come, and write the result with each to ``file``, if there is one."""
    for figure in figures:
        figure.add_to(result)
        print(printed(results.latest([result])[figure.key]), flush=True)
        if file is not None:
            results.write(result, file)


def printed(figure: results.Figure) -> str:
    """A figure as a line for people to read."""
    more = figure.details
    digits = 3 if more["unit"] == "ms" else 2
    show = lambda x, digits=digits: "-" if x is None else f"{x:.{digits}f}"  # noqa: E731
    cells = [show(x) for x in (figure.floor, figure.goal, figure.stretch, figure.measured)]
    cells += [more["unit"], show(figure.measured / figure.floor if figure.floor else None, 2)]
    return _columns(
        more["line"], more["what"], *cells, more.get("kernels", "-"), show(more.get("tokens"), 2), figure.verdict
    )


def _columns(line, what, floor, goal, stretch, measured, unit, ratio, kernels, tokens, verdict) -> str:
    numbers = f"{floor:>7} {goal:>7} {stretch:>7} {measured:>8} {unit:<2} {ratio:>7} {kernels:>7} {tokens:>6}"
    return f"{line:>4}  {what:<82} {numbers}  {verdict}"


HEADER = _columns("line", "what", "floor", "goal", "stretch", "measured", "", "/ floor", "kernels", "tokens", "")


@dataclasses.dataclass(frozen=True)
class Table:
    """The lines, measured with one set of weights.

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

    def timed(self, line: int, variant: str, what: Decoding | Forward, *goals: float) -> Figure:
        """A figure in milliseconds."""
        timed = self.bench.time(what)
        tokens = timed.tokens if isinstance(what, Decoding) and what.K else None
        figure = self.figure(line, variant, str(what), "ms", 1e3 * timed.seconds, 1e3 * timed.floor, *goals)
        return dataclasses.replace(figure, kernels=timed.kernels, tokens=tokens)

    def figure(
        self, line: int, variant: str, what: str, unit: str, measured: float, floor: float, *goals: float
    ) -> Figure:
        return Figure(line, variant, what, unit, measured, floor, *(goals if self.goals else ()))

    def plain(self, batch: int) -> Iterator[Figure]:
        if batch == 1:
            yield self.timed(1, "", self.decoding(None, 0, 1, LONG), 4.0, 3.8)
        else:
            goals = {16: (4.5, 4.2), 64: (6.0, 5.5)}[batch]
            yield self.timed(3, f"batch {batch}", self.decoding(None, 0, batch), *goals)

    def quantized(self, batch: int) -> Iterator[Figure]:
        for quantization in ("int8", "fp8"):
            what = self.decoding(None, 0, batch, LONG, quantization=quantization)
            yield self.timed(15, quantization, what, 2.7)

    def narrow_passes(self, batch: int) -> Iterator[Figure]:
        """They are to be within 3% of line 1."""
        goal = 1.03e3 * self.bench.time(self.decoding(None, 0, 1, LONG)).seconds
        for width in (5, 8):
            yield self.timed(2, f"T = {width}", self.forward(batch, width, 1024, 1024), goal)

    def passes(self, line: int, live: int, capacity: int, *goals: float) -> Measure:
        return lambda batch: iter([self.timed(line, "", self.forward(batch, 5, live, capacity), *goals)])

    def rounds(
        self, line: int, method: str, goals: dict[int, tuple[float, float]], start: int = LENGTH, K: int = 4
    ) -> Measure:
        variant = "batch {}" if len(goals) > 1 else ""
        return lambda batch: iter(
            [self.timed(line, variant.format(batch), self.decoding(method, K, batch, start), *goals[batch])]
        )

    def small_drafts(
        self, line: int, method: str, quantization: str | None, goals: dict[int, tuple[float, float]]
    ) -> Measure:
        """Rounds with a drafter that has logits of few tokens."""

        def measure(batch: int) -> Iterator[Figure]:
            tokens = min(DRAFT_TOKENS, self.bench.pair.target.vocab_size // 2)
            how = {"draft_vocabulary": tokens, "draft_quantization": quantization}
            yield self.timed(line, f"batch {batch}", self.decoding(method, 4, batch, **how), *goals[batch])

        return measure

    def parallel(self, batch: int) -> Iterator[Figure]:
        more, few = (self.decoding("parallel", K, batch, LONG) for K in (8, 3))
        yield from (self.timed(12, f"K = {what.K}", what) for what in (more, few))
        times = self.bench.time(more), self.bench.time(few)
        ratio, floor = times[0].seconds / times[1].seconds, times[0].floor / times[1].floor
        yield self.figure(12, "", f"{few.method}, K = 8 over K = 3; {SYNTHETIC}", "x", ratio, floor, 1.05, 1.02)

    def host(self, batch: int) -> Iterator[Figure]:
        what = self.decoding(None, 0, batch, LONG)
        device, wall = self.bench.time(what).seconds, generate_seconds(self.bench, what)
        token = "a token of generate, wall time; floor: device time"
        yield self.figure(13, "generate", token, "ms", 1e3 * wall, 1e3 * device)
        yield self.figure(13, "", "wall time of generate over device rounds", "%", 100 * (wall / device - 1), 0, 3, 1)

    def sampled_over_argmax(self, batch: int) -> Iterator[Figure]:
        ways = {how: self.decoding("eagle", 4, batch, draft_sampling=how) for how in ("sample", "argmax")}
        yield from (self.timed(14, how, what) for how, what in ways.items())
        sample, argmax = (self.bench.time(what).seconds for what in ways.values())
        what = f"eagle, sampled over argmax drafts, batch {batch}; {SYNTHETIC}"
        yield self.figure(14, "", what, "%", 100 * (sample / argmax - 1), 0, 1.5, 1)

    def lines(self) -> list[tuple[int, int, Measure]]:
        """(line, batch, how it is measured), the most telling first."""
        live, half_dead = self.passes(4, 1024, 1024, 5.0, 4.6), self.passes(5, 512, 4096, 4.8, 4.4)
        many = self.passes(6, 1024, 1024, 10.5, 9.5)
        eagle = self.rounds(9, "eagle", {1: (5.9, 5.6), 16: (6.6, 6.2), 64: (11.5, 10.5)})
        model = self.rounds(10, "draft_model", {1: (6.8, 6.4), 16: (7.6, 7.2), 64: (13.5, 12.5)})
        eagle3 = self.rounds(11, "eagle3", {1: (5.0, 4.7)}, LONG)
        dspark = self.rounds(16, "dspark", {1: (5.4, 5.1), 16: (7.4, 6.9)}, K=7)
        few = {
            17: self.small_drafts(17, "eagle", None, {1: (5.1, 4.9), 16: (6.3, 6.0), 64: (12.0, 11.3)}),
            18: self.small_drafts(18, "eagle", "int8", {1: (4.9, 4.7), 16: (6.1, 5.8), 64: (11.8, 11.0)}),
            19: self.small_drafts(19, "draft_model", "int8", {1: (6.7, 6.4), 16: (8.2, 7.6), 64: (14.0, 13.0)}),
        }
        return [
            *((1, 1, self.plain), (4, 16, live), (9, 1, eagle), (11, 1, eagle3), (3, 16, self.plain)),
            *((5, 16, half_dead), (9, 16, eagle), (6, 64, many), (10, 1, model), (2, 1, self.narrow_passes)),
            *((3, 64, self.plain), (9, 64, eagle), (10, 16, model), (12, 1, self.parallel), (13, 1, self.host)),
            *((14, 16, self.sampled_over_argmax), (10, 64, model), (15, 1, self.quantized)),
            *((16, 1, dspark), (16, 16, dspark)),
            *((line, batch, few[line]) for batch in (1, 16, 64) for line in few),
        ]


def chosen(lines, numbers: Sequence[int] | None, batches: Sequence[int] | None):
    """The lines asked for, in the order of ``numbers``."""
    picked = [line for line in lines if batches is None or line[1] in batches]
    return picked if numbers is None else [line for number in numbers for line in picked if line[0] == number]


def run(args) -> bool:
    """Print the lines and write the result; whether all of them could be measured."""
    until = time.monotonic() + args.seconds
    rates, rate = bandwidth.for_floors(args.bandwidth)
    shape = "tiny" if args.smoke else args.shape
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    settings = {"shape": shape, "dtype": dtype, "synthetic_acceptance": ACCEPTANCE, "smoke": args.smoke}
    result = results.begin("round", settings | {"failed": [], "left_out": []}, rate, rates)
    print(f"{shape}, {dtype}, random weights, on {result.device['kind']}; jax {jax.__version__}")
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s\n{HEADER}", flush=True)
    bench = Bench(SHAPES[shape], dtype, rate, 1 if args.smoke else args.repeats, args.profile)
    table = Table(bench, SMALLER if args.smoke else 1, goals=shape == "llama-3.1-8b")
    for line, batch, measure in chosen(table.lines(), args.lines, args.batches):
        if time.monotonic() > until:
            result.settings["left_out"].append([line, batch])
            print(f"{line:>4}  batch {batch} left out: {args.seconds:.0f} seconds are over", flush=True)
        elif not add_figures(measure, batch, result):
            result.settings["failed"].append([line, batch])
            print(f"{line:>4}  batch {batch} FAILED", flush=True)
        if args.json:
            results.write(result, args.json)
    return not result.settings["failed"]


def add_figures(measure: Measure, batch: int, result: results.Result) -> bool:
    """Print the figures of a line and put them into the result; whether all of them could be measured."""
    try:
        for figure in measure(batch):
            figure.add_to(result)
            print(printed(results.latest([result])[figure.key]), flush=True)
    except Exception:  # the device's time is dear: one line that cannot be measured must not cost the others
        traceback.print_exc()
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--lines", type=int, nargs="+", metavar="N", help="lines of the table, in this order")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", help="batch sizes among them")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each program's rounds")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further line after so long")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and lengths, any machine, meaningless times")
    args = parser.parse_args()
    if not args.smoke and args.shape != "tiny" and jax.default_backend() != "gpu":
        parser.error("no GPU: times of this shape need one; --smoke runs a tiny version here")
    return 0 if run(args) else 1


if __name__ == "__main__":
    sys.exit(main())
