"""What each file of tests costs: seconds of CPU, and how much is traced, lowered and compiled.

``build/test-costs.json`` is written at the end of every run. Seconds depend on the machine; the numbers of traces, of
compilations and of StableHLO operations hardly do. ``make test`` fails where they pass the budget in
``tests/costs_budget.json``, once ``make budget`` has made the figures of a run the budget. A file that shares engines with
others pays for them if it comes first, which is why a file may exceed its own figure by more than all files together may
exceed theirs.
"""

import collections
import json
import resource
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler

ROOT = Path(__file__).parents[2]
REPORT, BUDGET = ROOT / "build" / "test-costs.json", ROOT / "tests" / "costs_budget.json"
QUICK = "not long and not nightly and not gpu and not real"  # the tests that pyproject.toml has run
COUNTED = ("traces", "compilations", "operations")
SLACK_OF_ALL, SLACK_OF_A_FILE = 1.15, 2.0
TWO_ENGINES = {"traces": 6000, "compilations": 80, "operations": 120_000}  # which another file may have paid for
_EVENTS = {
    "jaxpr_trace_duration": "traces",
    "jaxpr_to_mlir_module_duration": "lowerings",
    "backend_compile_duration": "compilations",
}


class Costs:
    """A pytest plugin, in every process of a run."""

    def __init__(self, config):
        self._config, self._file = config, None
        self._totals = collections.Counter()
        self.files: dict[str, dict[str, float]] = {}
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        self._count_operations()

    def _listen(self, event: str, seconds: float, **_):
        name = _EVENTS.get(event.rsplit("/", 1)[-1])
        if name is not None:
            self._totals[name] += 1
            self._totals[f"{name}_s"] += seconds

    def _count_operations(self):
        """Count the operations of every module that is compiled, cached or not."""
        compile_module = compiler.compile_or_get_cached

        def counting(backend, module, *args, **kwargs):
            self._totals["operations"] += _operations(module.operation)
            return compile_module(backend, module, *args, **kwargs)

        compiler.compile_or_get_cached = counting

    def pytest_runtest_protocol(self, item, nextitem):
        del nextitem
        file = str(item.path.relative_to(ROOT / "tests"))
        if file != self._file:
            self._close()
            self._file, self._start = file, self._now()
        self._totals["tests"] += 1

    def _now(self) -> collections.Counter:
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        now = collections.Counter(self._totals)
        now.update(cpu_s=own.ru_utime + own.ru_stime, children_s=children.ru_utime + children.ru_stime)
        return now

    def _close(self):
        if self._file is not None:
            costs = self._now()
            costs.subtract(self._start)
            _add(self.files, self._file, costs)

    def pytest_sessionfinish(self, session, exitstatus):
        self._close()
        output = getattr(self._config, "workeroutput", None)
        if output is not None:  # a worker of pytest-xdist
            output["costs"] = self.files
            return
        REPORT.parent.mkdir(exist_ok=True)
        files = dict(sorted(self.files.items()))
        REPORT.write_text(json.dumps({file: _rounded(costs) for file, costs in files.items()}, indent=1) + "\n")
        if exitstatus == 0 and not _selected(self._config):
            self._exceeded = exceeded(files, json.loads(BUDGET.read_text())) if BUDGET.exists() else []
            if self._exceeded:
                session.exitstatus = 1

    def pytest_testnodedown(self, node, error):
        del error
        for file, costs in getattr(node, "workeroutput", {}).get("costs", {}).items():
            _add(self.files, file, costs)

    def pytest_terminal_summary(self, terminalreporter):
        for line in getattr(self, "_exceeded", ()):
            terminalreporter.write_line(line, red=True)
        heaviest = sorted(self.files.items(), key=lambda entry: -entry[1]["cpu_s"] - entry[1]["children_s"])[:10]
        if len(self.files) > len(heaviest):
            seconds = sum(costs["cpu_s"] + costs["children_s"] for costs in self.files.values())
            terminalreporter.write_line(f"{seconds:.0f} s of CPU ({REPORT.relative_to(ROOT)}); the longest files:")
            for file, costs in heaviest:
                terminalreporter.write_line(f"  {costs['cpu_s'] + costs['children_s']:6.1f} s  {file}")


def exceeded(files: dict[str, dict[str, float]], budget: dict[str, dict[str, float]]) -> list[str]:
    """What passes the budget, a line for each; [] if nothing does."""
    lines = []
    for what in COUNTED:
        total, allowed = sum(costs.get(what, 0) for costs in files.values()), sum(row[what] for row in budget.values())
        if total > SLACK_OF_ALL * allowed:
            lines.append(f"all tests: {total:.0f} {what}, but the budget is {allowed} and {SLACK_OF_ALL - 1:.0%} more")
        for file, costs in files.items():
            most = SLACK_OF_A_FILE * budget.get(file, {}).get(what, 0) + TWO_ENGINES[what]
            if costs.get(what, 0) > most:
                lines.append(f"{file}: {costs[what]:.0f} {what}, but at most {most:.0f} are in the budget")
    return lines and [
        *lines,
        "Take as much away elsewhere, or say in the commit why it is needed, and run `make budget`.",
    ]


def _selected(config) -> bool:
    """Whether the run was one of some tests only."""
    option = config.option
    some = ("keyword", "lf", "failedfirst", "collectonly", "deselect", "ignore")
    everything = config.args_source == config.ArgsSource.TESTPATHS and option.markexpr == QUICK
    return not everything or any(getattr(option, name, None) for name in some)


def _operations(operation) -> int:
    """How many operations are in an MLIR operation, at any depth."""
    return sum(1 + _operations(inner.operation) for region in operation.regions for block in region for inner in block)


def _add(files: dict[str, dict[str, float]], file: str, costs: Any):
    held = files.setdefault(file, {})
    for name, cost in costs.items():
        held[name] = held.get(name, 0) + cost


def _rounded(costs: dict[str, float]) -> dict[str, float]:
    return {name: round(costs[name], 1) if name.endswith("_s") else int(costs[name]) for name in sorted(costs)}


def write_budget():
    """Make the figures of the last run the budget."""
    files = json.loads(REPORT.read_text())
    BUDGET.write_text(
        "{\n"
        + ",\n".join(
            f' "{file}": {json.dumps({what: costs.get(what, 0) for what in COUNTED})}' for file, costs in files.items()
        )
        + "\n}\n"
    )


if __name__ == "__main__":
    write_budget()
