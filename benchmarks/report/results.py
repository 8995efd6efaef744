"""What a benchmark measured, in one JSON file per run, with the code, the versions and the device that it was measured on.

The files of ``benchmarks/results`` are the source of every figure that README.md and docs/ state; ``python -m
benchmarks.tables`` writes the documents from them. A later run does not replace the file of an earlier one: where two
runs measured the same thing, the documents state the later one."""

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib

import jspec

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMMIT = "JSPEC_COMMIT"  # what `git describe --always --exclude '*' --abbrev=40 --dirty` prints, where there is no git


@dataclasses.dataclass(frozen=True)
class Result:
    """One run of one benchmark. None stands for what is not known, which only transcribed results have.

    Attributes:
      benchmark: name of the module that measured it, without its folder, such as ``round``.
      date: when the run began, in UTC, as ISO 8601 has it; a day alone where the time is not known.
      commit: of the code.
      dirty: whether the code differed from that commit.
      versions: of jspec, jax, jaxlib, python, and of driver and cuda where there are any.
      device: ``kind``, as JAX names it; ``bandwidth``, the bytes per second that floors are counted with; ``rates``, the
        rates at which memory was read and copied in this run, empty if they were not measured.
      command: the command line.
      settings: that the figures depend on, ``smoke`` among them: times of a smoke run mean nothing.
      measured: the figures. Most benchmarks have numbers by key; each benchmark says what its keys are.
      floors: the least that a figure could be, by the same keys.
      goals: ``{"goal": number, "stretch": number}`` by the same keys, for figures that have goals.
      details: by the same keys, whatever else belongs to a figure, such as its unit.
      source: the document that the figures were transcribed from, None if the benchmark wrote this file itself.
      note: for the reader of the file.
    """

    benchmark: str
    date: str
    commit: str | None
    dirty: bool | None
    versions: dict[str, str | None]
    device: dict[str, Any]
    command: str
    settings: dict[str, Any]
    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    floors: dict[str, Any] = dataclasses.field(default_factory=dict)
    goals: dict[str, Any] = dataclasses.field(default_factory=dict)
    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    source: str | None = None
    note: str | None = None

    @property
    def day(self) -> str:
        return self.date[:10]

    @property
    def current_command(self) -> str:
        """The command line with today's module: earlier runs were made before the benchmarks had folders."""
        return self.command.replace(f"benchmarks.{self.benchmark}", module_of(self.benchmark), 1)

    @property
    def code(self) -> str:
        """The commit for a table: seven digits, with a plus sign if the code differed from it; ``-`` if unknown."""
        return "-" if self.commit is None else self.commit[:7] + ("+" if self.dirty else "")


def begin(
    benchmark: str, settings: dict[str, Any], bandwidth: float | None = None, rates: dict | None = None
) -> Result:
    """A result without figures, of a run that begins now on the first device of this process."""
    commit, dirty = code()
    now = datetime.datetime.now(datetime.UTC)
    return Result(
        benchmark,
        date=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        commit=commit,
        dirty=dirty,
        versions=versions(),
        device={"kind": jax.devices()[0].device_kind, "bandwidth": bandwidth, "rates": rates or {}},
        command=command_of(benchmark, sys.argv[1:]),
        settings=settings,
    )


def command_of(benchmark: str, args: Sequence[str]) -> str:
    """The command with these arguments. Of a file with an absolute path, it has the name only, which is what a reader of
    another machine can use."""
    named = (pathlib.Path(arg).name if pathlib.Path(arg).is_absolute() else arg for arg in args)
    return shlex.join(["python", "-m", module_of(benchmark), *named])


def module_of(benchmark: str) -> str:
    """``benchmarks.rounds.round`` of ``round``, which is a file in a folder of benchmarks, or a package."""
    folder = ROOT / "benchmarks"
    (file,) = (*folder.glob(f"*/{benchmark}.py"), *folder.glob(f"**/{benchmark}/__main__.py"))
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")


def code() -> tuple[str | None, bool | None]:
    """The commit of this code and whether the code differs from it: of git, else of the environment, else unknown."""
    described = os.environ.get(COMMIT) or _output(
        "git", "describe", "--always", "--exclude", "*", "--abbrev=40", "--dirty"
    )
    if not described:
        print(f"WARNING: no git here and {COMMIT} is not set: the result cannot name its commit", file=sys.stderr)
        return None, None
    return described.removesuffix("-dirty"), described.endswith("-dirty")


def versions() -> dict[str, str | None]:
    """Of jspec and what it runs on."""
    by_name: dict[str, str | None] = {"jspec": jspec.__version__, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
    by_name["python"] = platform.python_version()
    if jax.default_backend() == "gpu":
        cuda = re.search(r"cuda (\d+)", jax.devices()[0].client.platform_version)
        by_name["cuda"] = f"{int(cuda.group(1)) // 1000}.{int(cuda.group(1)) % 1000 // 10}" if cuda else None
        drivers = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        by_name["driver"] = drivers[0].strip() if drivers else None
    return by_name


def write(result: Result, file: pathlib.Path):
    """Write the JSON that ``read`` reads. The file is whole at any time, also if this process is killed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    partial.replace(file)


def read(file: pathlib.Path) -> Result:
    """The result in a JSON file.

    Raises:
      ValueError: the file is no such result.
    """
    try:
        return Result(**json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: expected the JSON of benchmarks.report.results.Result; {error}") from error


def read_all(benchmark: str, device: str | None = None, folder: pathlib.Path = RESULTS) -> list[Result]:
    """The results of one benchmark, the earliest first; of one date, in the order of the names of their files.

    Args:
      benchmark: as its results name it.
      device: only those measured on this kind of device; None for all.
      folder: where the files lie.

    Raises:
      ValueError: a file there is no result, or is of a smoke run.
    """
    by_file = {file: read(file) for file in sorted(folder.glob("*.json"))}
    for file, result in by_file.items():
        if result.settings.get("smoke"):
            raise ValueError(f"{file} is of a smoke run: its times mean nothing; remove it from the results")
    chosen = [one for one in by_file.values() if one.benchmark == benchmark and device in (None, one.device["kind"])]
    return sorted(chosen, key=lambda result: result.date)


@dataclasses.dataclass(frozen=True)
class Figure:
    """One number of a result, with what it is compared with.

    Attributes:
      key: of the number in its result.
      measured: the number.
      floor: the least that it could be.
      goal, stretch: what it is to reach, and what would be better than that; None for no goal.
      details: whatever else belongs to it. ``more_is_better`` is there, and true, for a rate.
      result: the run that it was measured in.
    """

    key: str
    measured: float
    floor: float | None
    goal: float | None
    stretch: float | None
    details: dict[str, Any]
    result: Result

    @property
    def is_short(self) -> bool:
        """Whether it misses its goal. A figure is the better the smaller it is, unless it is a rate."""
        return self.goal is not None and not self._reaches(self.goal)

    @property
    def verdict(self) -> str:
        """In words, for a table; empty without a goal."""
        if self.goal is None:
            return ""
        if self.is_short:
            percent = 100 * abs(self.measured / self.goal - 1)
            return f"short by {percent:.0f}%" if percent >= 1 else f"short by {percent:.1g}%"
        return "beyond" if self.stretch is not None and self._reaches(self.stretch) else "met"

    @property
    def measured_on(self) -> str:
        """The day, and the commit if it is known, for a table."""
        return f"{self.result.day}, {self.result.code}" if self.result.commit else self.result.day

    def _reaches(self, mark: float) -> bool:
        return self.measured >= mark if self.details.get("more_is_better") else self.measured <= mark


def latest(results: Sequence[Result]) -> dict[str, Figure]:
    """Every figure by its key, of the last result that has it. The results are in order, the earliest first."""
    figures = {}
    for result in results:
        for key, measured in result.measured.items():
            goals = result.goals.get(key, {})
            compared = result.floors.get(key), goals.get("goal"), goals.get("stretch")
            figures[key] = Figure(key, measured, *compared, result.details.get(key, {}), result)
    return figures


def _output(*command: str) -> str:
    """What a command prints, empty if it is not there or fails."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
