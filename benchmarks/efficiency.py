"""Where speculation pays: what a round costs by batch size and number of drafts, and the speed-up by acceptance length.

    python -m benchmarks.efficiency --method eagle3              # writes docs/efficiency-eagle3.json, .md and .png
    python -m benchmarks.efficiency --batches 16 --drafts 0 4    # some rounds, the rest from the .json that is there
    python -m benchmarks.efficiency --report                     # table and plot again, from the .json
    python -m benchmarks.efficiency --smoke --out FOLDER         # tiny and anywhere, with meaningless times

The .json is a table of costs for ``jspec.engine.costs``. Random models never agree, so drafts are accepted by chance
("synthetic acceptance"); shapes are fixed, so a round does the same work however many are. K = 0 is plain decoding
without a drafter, and speed-up is over it."""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys

import jax

from benchmarks import bandwidth
from benchmarks.programs import Bench, Decoding
from benchmarks.shapes import SHAPES

DOCS = pathlib.Path(__file__).parents[1] / "docs"
BATCHES, DRAFTS = (1, 4, 16, 64), tuple(range(9))
LENGTHS = (1.5, 2.0, 2.5, 3.0)  # acceptance lengths, the bonus or correction token included
ACCEPTANCE = 0.7
START, NEW, SMALLER = 512, 256, 16


@dataclasses.dataclass
class Costs:
    """Of one drafter on one device; ``rounds``, ``floors`` and ``kernels`` are by batch size, then by K, as JSON has
    them.

    Attributes:
      device, method, shape, dtype: what was measured.
      synthetic_acceptance: of every draft.
      bandwidth: bytes per second that floors are counted with.
      rounds: seconds of a round.
      floors: the least that it could take.
      kernels: its launches.
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

    def put(self, batch: int, K: int, seconds: float, floor: float, kernels: int):
        for table, value in ((self.rounds, seconds), (self.floors, floor), (self.kernels, kernels)):
            row = table.setdefault(str(batch), {})
            row[str(K)] = value
            table[str(batch)] = dict(sorted(row.items(), key=lambda item: int(item[0])))

    def speed_up(self, batch: str, K: str, length: float, floors: bool = False) -> float | None:
        """Tokens per second over those of plain decoding, or None if no round gives so many or one was not measured."""
        row = (self.floors if floors else self.rounds)[batch]
        if length > int(K) + 1 or "0" not in row or K not in row:
            return None
        return length * row["0"] / row[K]


def of_same(file: pathlib.Path, fresh: Costs) -> Costs:
    """What ``file`` has of the same device, drafter and shape, else ``fresh``."""
    if not file.exists():
        return fresh
    stored = Costs(**json.loads(file.read_text()))
    same = ("device", "method", "shape", "dtype", "synthetic_acceptance")
    return stored if all(getattr(stored, name) == getattr(fresh, name) for name in same) else fresh


def markdown(costs: Costs) -> str:
    """The table, a section per batch size."""
    lines = [
        f"# What rounds cost: {costs.shape}, {costs.method}",
        f"\nWritten by `python -m benchmarks.efficiency --method {costs.method}` on {costs.device}, {costs.dtype}, random "
        f"weights, synthetic acceptance {costs.synthetic_acceptance:g} of every draft.\nFloors are at "
        f"{costs.bandwidth / 1e9:,.0f} GB/s. Speed-up is in tokens per second over K = 0, at an acceptance length (bonus "
        "token included).",
        f"\n![Speed-up by drafts per round](efficiency-{costs.method}.png)",
    ]
    for batch, row in sorted(costs.rounds.items(), key=lambda item: int(item[0])):
        lengths = " | ".join(f"x at {length:g}" for length in LENGTHS)
        lines += [f"\n## Batch {batch}\n", f"| K | ms a round | floor | ratio | launches | {lengths} |"]
        lines.append("|" + "---|" * (5 + len(LENGTHS)))
        for K, seconds in row.items():
            floor = costs.floors[batch][K]
            found = [costs.speed_up(batch, K, length) for length in LENGTHS if K != "0"] or [None] * len(LENGTHS)
            cells = [K, f"{1e3 * seconds:.3f}", f"{1e3 * floor:.3f}", f"{seconds / floor:.2f}", costs.kernels[batch][K]]
            cells += ["-" if x is None else f"{x:.2f}" for x in found]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


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


def report(costs: Costs, stem: pathlib.Path):
    """Write the table and the plot."""
    stem.with_suffix(".md").write_text(markdown(costs))
    if importlib.util.find_spec("matplotlib"):
        plot(costs, stem.with_suffix(".png"))
    else:
        print(f"no matplotlib here, so no plot: {stem.with_suffix('.json')} is all that --report needs")


def measure(args, stem: pathlib.Path) -> Costs:
    """Time the rounds asked for; the .json is written after each."""
    rates, rate = bandwidth.for_floors(args.bandwidth)
    dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    shape, divisor = ("tiny", SMALLER) if args.smoke else (args.shape, 1)
    fresh = Costs(jax.devices()[0].device_kind, args.method, shape, dtype, ACCEPTANCE, rate)
    costs = of_same(stem.with_suffix(".json"), fresh)
    bench = Bench(SHAPES[shape], dtype, costs.bandwidth, 1 if args.smoke else args.repeats)
    print(f"{bandwidth.describe(rates)}; floors at {costs.bandwidth / 1e9:,.0f} GB/s", flush=True)
    for batch in args.batches:
        for K in args.drafts:
            what = Decoding(args.method if K else None, K, batch, START // divisor, NEW // divisor, ACCEPTANCE)
            timed = bench.time(what)
            costs.put(batch, K, timed.seconds, timed.floor, timed.kernels)
            print(f"{what}: {1e3 * timed.seconds:.3f} ms, floor {1e3 * timed.floor:.3f}", flush=True)
            stem.with_suffix(".json").write_text(json.dumps(dataclasses.asdict(costs), indent=1) + "\n")
    return costs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--method", choices=("draft_model", "eagle", "eagle3", "parallel"), default="eagle3")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="B")
    parser.add_argument("--drafts", type=int, nargs="+", default=DRAFTS, metavar="K", help="0 is plain decoding")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each program")
    parser.add_argument("--bandwidth", type=float, help="bytes per second for the floors, instead of measuring")
    parser.add_argument("--out", type=pathlib.Path, help="folder of the results, by default docs/", metavar="FOLDER")
    parser.add_argument("--report", action="store_true", help="measure nothing, write table and plot of the .json")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and lengths, any machine, meaningless times")
    args = parser.parse_args()
    if args.smoke and args.out is None:
        parser.error("--smoke needs --out: meaningless times have no place in docs/")
    if not args.smoke and not args.report and args.shape != "tiny" and jax.default_backend() != "gpu":
        parser.error("no GPU: times of this shape need one; --smoke runs a tiny version here")
    stem = (args.out or DOCS) / f"efficiency-{args.method}"
    stem.parent.mkdir(parents=True, exist_ok=True)
    costs = Costs(**json.loads(stem.with_suffix(".json").read_text())) if args.report else measure(args, stem)
    report(costs, stem)
    print(markdown(costs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
