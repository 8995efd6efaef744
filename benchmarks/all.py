"""Every benchmark of a GPU in one go, each in a process of its own and under a time limit.

    python -m benchmarks.all --out DIR                       # within 22 minutes on an H200
    python -m benchmarks.all --out DIR --only round verify   # some of them
    python -m benchmarks.all --out DIR --minutes 45          # all of their figures
    python -m benchmarks.all --out DIR --smoke               # tiny and anywhere, with meaningless times

It needs neither a network nor git; without git, set JSPEC_COMMIT to what ``git describe --always --exclude '*' --abbrev=40
--dirty`` prints, or the results cannot name their commit. Each benchmark measures its most telling figures first, begins no
further one when its share of the time is nearly over, and is ended when it is over; its result has what was measured until
then. To have the documents state the new figures, move the files of DIR into benchmarks/results/ and run ``python -m
benchmarks.tables``. Exits 1 if a benchmark failed."""

import argparse
import dataclasses
import pathlib
import subprocess
import sys
import time

from benchmarks.report import results

MARGIN = 45.0  # seconds that the figure takes which was begun last


@dataclasses.dataclass(frozen=True)
class Part:
    """One benchmark.

    Attributes:
      share: of all the time.
      options: of its command line.
      smoke: further options of a smoke run, which keep it short.
      has_limit: whether it has ``--seconds``.
    """

    share: float
    options: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ()
    has_limit: bool = True


PARTS = {
    "round": Part(0.22, smoke=("--lines", "1", "2")),
    "verify": Part(0.09, ("--only", "time"), ("--ops", "match", "draw")),
    "efficiency": Part(0.18, smoke=("--batches", "1", "--drafts", "0", "1")),
    "quantization": Part(0.045, ("--only", "passes"), has_limit=False),
    "serving": Part(0.465, smoke=("--only", "1", "--repeats", "1")),
}


def measure(name: str, file: pathlib.Path, seconds: float, smoke: bool) -> bool:
    """Run one benchmark for at most so many seconds; whether it did what it was to do in them."""
    part = PARTS[name]
    options = [*part.options, *(("--smoke", *part.smoke) if smoke else ()), "--json", str(file)]
    if part.has_limit:
        options += ["--seconds", f"{max(seconds - MARGIN, seconds / 2):.0f}"]
    print(f"\n== {name}, at most {seconds:.0f} seconds", flush=True)
    began = time.monotonic()
    try:
        code = subprocess.run([sys.executable, "-m", results.module_of(name), *options], timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        print(f"{name} was ended after {seconds:.0f} seconds; its result has what was measured until then", flush=True)
        return file.exists()
    print(f"{name} took {time.monotonic() - began:.0f} seconds", flush=True)
    return code == 0 and file.exists()


def summary(runs: list[results.Result]) -> str:
    """A line for each figure, with its floor beside it."""
    line = "{:<13} {:<44} {:>10} {:>10} {:>7} {:>8}  {}"
    lines = [line.format("benchmark", "figure", "measured", "floor", "ratio", "goal", "")]
    for result in runs:
        flat = dataclasses.replace(result, measured=_flat(result.measured), floors=_flat(result.floors))
        for key, figure in results.latest([flat]).items():
            digits = 3 if figure.details.get("unit") != "us" else 1
            scale = 1e3 if result.benchmark == "efficiency" else 1  # seconds, shown in milliseconds
            floor = "-" if figure.floor is None else f"{scale * figure.floor:,.{digits}f}"
            ratio = f"{figure.measured / figure.floor:.2f}" if figure.floor else "-"
            goal = "-" if figure.goal is None else f"{figure.goal:.{digits}f}"
            cells = f"{scale * figure.measured:,.{digits}f}", floor, ratio, goal
            lines.append(line.format(result.benchmark, key, *cells, figure.verdict).rstrip())
    return "\n".join(lines)


def _flat(table: dict) -> dict[str, float]:
    """Figures by batch and K as figures by one key, others as they are."""
    flat = {}
    for key, value in table.items():
        flat |= {f"batch {key}, K = {K}": x for K, x in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--minutes", type=float, default=21.5, help="of all benchmarks together, chosen or not")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, any machine, meaningless times")
    args = parser.parse_args()
    began = time.strftime("%Y-%m-%dT%H%M", time.gmtime())
    args.out.mkdir(parents=True, exist_ok=True)
    files = {name: args.out / f"{name}-{began}.json" for name in args.only}
    good = {name: measure(name, files[name], 60 * args.minutes * PARTS[name].share, args.smoke) for name in args.only}
    print("\n" + summary([results.read(file) for file in files.values() if file.exists()]))
    for name in (name for name, done in good.items() if not done):
        print(f"FAILED: {name}; what it measured before is in {files[name]}, if that is there", file=sys.stderr)
    return 0 if all(good.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
