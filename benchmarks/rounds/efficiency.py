"""Where speculation pays: what a round costs by batch size and number of drafts, and the speed-up that follows from it by
acceptance length.

    python -m benchmarks.rounds.efficiency --method eagle3 --json FILE  # every batch and number of drafts; needs a GPU
    python -m benchmarks.rounds.efficiency --batches 16 --drafts 0 4    # some rounds
    python -m benchmarks.rounds.efficiency --smoke                      # tiny and anywhere, with meaningless times

``--json`` writes a result, see benchmarks/report/results.py; its figures are seconds by batch size, then by K. Kept under
benchmarks/results/, ``python -m benchmarks.tables`` makes a document, a plot and a table of costs for
``jspec.load(costs=...)`` of it. Random models never agree, so drafts are accepted by chance ("synthetic acceptance"). Shapes
are fixed, so a round does the same work however many drafts are accepted. K = 0 is plain decoding without a drafter;
speed-up is over K = 0."""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Sequence

import jax

from benchmarks.kernels import bandwidth
from benchmarks.report import results
from benchmarks.report.markdown import paragraph, table
from benchmarks.rounds.bench import Bench
from benchmarks.rounds.programs import Decoding
from benchmarks.shapes import SHAPES

BATCHES, DRAFTS = (1, 16, 64, 4), tuple(range(9))  # the most telling batch first
LENGTHS = (1.5, 2.0, 2.5, 3.0)  # acceptance lengths, the bonus or recovered token included
ACCEPTANCE = 0.7
START, NEW, SMALLER = 512, 256, 16


@dataclasses.dataclass
class Costs:
    """What rounds of one drafter cost on one kind of device.

    ``rounds``, ``floors`` and ``kernels`` are by batch size, then by K, both as strings, as JSON has them.

    Attributes:
      device, method, shape, dtype: what was measured.
      synthetic_acceptance: of every draft.
      bandwidth: bytes per second that floors are counted with.
      rounds: seconds of a round.
      floors: the least that it could take.
      kernels: its launches.
      measured_in: the run that the rounds of a batch size were measured in.
    """

    device: str
    method: str
    shape: str
    dtype: str
    synthetic_acceptance: float
    bandwidth: float
    rounds: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    floors: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    kernels: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    measured_in: dict[str, results.Result] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> dict:
        """The table of costs that ``jspec.engine.adaptive.cost_table.CostTable`` reads."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[:-1]}

    def speed_up(self, batch: str, K: str, length: float, floors: bool = False) -> float | None:
        """Tokens per second over those of plain decoding, or None if no round gives so many or one was not measured."""
        row = (self.floors if floors else self.rounds)[batch]
        if length > int(K) + 1 or "0" not in row or K not in row:
            return None
        return length * row["0"] / row[K]

    def break_even(self, batch: str, K: str) -> float:
        """The acceptance length from which on K drafts give more tokens per second than plain decoding."""
        return self.rounds[batch][K] / self.rounds[batch]["0"]


def costs_of(runs: Sequence[results.Result]) -> Costs:
    """The costs in several runs of one method on one kind of device, the earliest run first.

    Rounds of a batch size are compared with each other, so they are all of one run: the one that has most of them, and of
    several the last.
    """
    last = runs[-1]
    settings = (last.settings[name] for name in ("method", "shape", "dtype", "synthetic_acceptance"))
    costs = Costs(last.device["kind"], *settings, last.device["bandwidth"])
    for batch in sorted({batch for run in runs for batch in run.measured}, key=int):
        run = max((run for run in runs if batch in run.measured), key=lambda run: (len(run.measured[batch]), run.date))
        tables = (costs.rounds, run.measured), (costs.floors, run.floors), (costs.kernels, run.details["kernels"])
        for by_batch, measured in tables:
            by_batch[batch] = dict(sorted(measured[batch].items(), key=lambda item: int(item[0])))
        costs.measured_in[batch] = run
    return costs


def markdown(costs: Costs) -> str:
    """docs/results/efficiency-<method>.md: a section for each batch size."""
    introduction = f"""Measured by `python -m benchmarks.rounds.efficiency --method {costs.method}` on {costs.device},
    {costs.dtype},
    random weights, synthetic acceptance {costs.synthetic_acceptance:g} of every draft; written by `python -m
    benchmarks.tables` from [`benchmarks/results/`](../../benchmarks/results). The floor is the time in which
    what a round needs can be read and multiplied. Speed-up is in tokens per second over K = 0, at an acceptance length
    (bonus token included). The same round times are in [efficiency-{costs.method}.json](efficiency-{costs.method}.json), for
    `jspec.load(costs=...)`."""
    parts = [f"# What rounds cost: {costs.shape}, {costs.method}", paragraph(introduction)]
    parts.append(f"![Speed-up by drafts per round](efficiency-{costs.method}.png)")
    columns = ("K", "ms a round", "floor", "ratio", "launches", *(f"x at {length:g}" for length in LENGTHS))
    for batch, row in costs.rounds.items():
        run = costs.measured_in[batch]
        commit = f", commit {run.code}" if run.commit else ""
        where = f"Measured {run.day} with jax {run.versions['jax']}{commit}; floors at"
        parts += [f"## Batch {batch}", f"{where} {run.device['bandwidth'] / 1e9:,.0f} GB/s."]
        parts.append(table(columns, (_cells(costs, batch, K) for K in row)))
    return "\n\n".join(parts) + "\n"


def _cells(costs: Costs, batch: str, K: str) -> list[str]:
    """A row of the table: times, floor and launches of a round, and the speed-up by acceptance length."""
    seconds, floor = costs.rounds[batch][K], costs.floors[batch][K]
    speed_ups = [costs.speed_up(batch, K, length) if K != "0" else None for length in LENGTHS]
    cells = [K, f"{1e3 * seconds:.3f}", f"{1e3 * floor:.3f}", f"{seconds / floor:.2f}", str(costs.kernels[batch][K])]
    return cells + ["-" if x is None else f"{x:.2f}" for x in speed_ups]


def plot(costs: Costs, file: pathlib.Path):
    """A panel per batch size: speed-up by K, a line per acceptance length, dotted where rounds were at their floors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted(costs.rounds, key=int)
    figure, axes = pyplot.subplots(1, len(batches), figsize=(3.2 * len(batches), 3.2), sharey=True, squeeze=False)
    for panel, batch in zip(axes.flat, batches, strict=True):
        for i, length in enumerate(LENGTHS):
            for floors in (False, True):
                known = [(int(K), costs.speed_up(batch, K, length, floors)) for K in costs.rounds[batch] if K != "0"]
                points = [point for point in known if point[1] is not None]
                style = {"linestyle": ":", "linewidth": 1} if floors else {"marker": ".", "label": f"{length:g}"}
                panel.plot([K for K, _ in points], [x for _, x in points], color=f"C{i}", **style)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_title(f"batch {batch}", fontsize=10)
        panel.grid(alpha=0.3)
    axes.flat[-1].legend(title="acceptance length", fontsize=7, title_fontsize=7, loc="upper right")
    figure.supxlabel("drafts per round")
    figure.supylabel("speed-up over plain decoding")
    figure.suptitle(f"{costs.shape}, {costs.method}, {costs.device}; dotted: all rounds at their floors", fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def measure(args) -> results.Result:
    """Time the rounds asked for; the result is written after each."""
    until = time.monotonic() + args.seconds
    rates, rate = bandwidth.for_floors(args.bandwidth)
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    shape, divisor = ("tiny", SMALLER) if args.smoke else (args.shape, 1)
    settings = {"method": args.method, "shape": shape, "dtype": dtype, "synthetic_acceptance": ACCEPTANCE}
    result = results.begin("efficiency", settings | {"smoke": args.smoke}, rate, rates)
    result.details["kernels"] = {}
    bench = Bench(SHAPES[shape], dtype, rate, 1 if args.smoke else args.repeats)
    print(f"{bandwidth.describe(rates)}; floors at {rate / 1e9:,.0f} GB/s", flush=True)
    for batch in args.batches:
        for K in args.drafts:
            what = Decoding(args.method if K else None, K, batch, START // divisor, NEW // divisor, ACCEPTANCE)
            if time.monotonic() > until:
                print(f"{what} left out: {args.seconds:.0f} seconds are over", flush=True)
                continue
            timed = bench.time(what)
            tables = (result.measured, timed.seconds), (result.floors, timed.floor)
            for by_batch, value in (*tables, (result.details["kernels"], timed.kernels)):
                by_batch.setdefault(str(batch), {})[str(K)] = value
            print(f"{what}: {1e3 * timed.seconds:.3f} ms, floor {1e3 * timed.floor:.3f}", flush=True)
            if args.json:
                results.write(result, args.json)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--method", choices=("draft_model", "eagle", "eagle3", "parallel"), default="eagle3")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="B")
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS, metavar="K", help="0 is plain decoding")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the result there")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further rounds after so long")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and lengths, any machine, meaningless times")
    args = parser.parse_args()
    if not args.smoke and args.shape != "tiny" and jax.default_backend() != "gpu":
        parser.error("no GPU: times of this shape need one; --smoke runs a tiny version here")
    result = measure(args)
    if result.measured:
        print(markdown(costs_of([result])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
