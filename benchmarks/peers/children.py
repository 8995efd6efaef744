"""The two sides of a row, each in a process of its own that frees the card when it ends.

Such a process prints JSON, an object a line. ``{"about": {..}}`` comes once. For each number of rows there is either
``{"rows": 16, "ms": 4.2, "tokens": 1.0}``, the milliseconds of a round and the tokens that it gave each row, or ``{"rows":
16, "reason": ".."}``. A ``reason`` without ``rows`` is why the rest was not measured. Other output goes to a log."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.folders import head_fields, target_fields, write
from benchmarks.peers.rows import ACCEPTANCE, DRAFTS, Row
from benchmarks.report import results

OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # of the card, which jspec's side takes
LONGEST = 300  # characters of a reason


@dataclasses.dataclass(frozen=True)
class Side:
    """What a side of a row came to.

    Attributes:
      about: what it said of itself.
      figures: number of rows -> what it measured.
      reasons: number of rows -> why it measured nothing.
    """

    about: dict[str, Any]
    figures: dict[int, dict[str, float]]
    reasons: dict[int, str]


def jspec_side(
    name: str, batches: Sequence[int], seconds: float, log: pathlib.Path, bandwidth: float | None = None
) -> Side:
    """jspec's side of the row ``name``; ``bandwidth``, bytes per second for floors, is measured if it is None."""
    rate = [] if bandwidth is None else ["--bandwidth", str(bandwidth)]
    command = [sys.executable, "-m", "benchmarks.peers.of_jspec", name, "--batches", *map(str, batches), *rate]
    return run(command, batches, seconds, log, {MEMORY: os.environ.get(MEMORY, "0.92")})


def vllm_side(python: str, name: str, row: Row, batches: Sequence[int], seconds: float, log: pathlib.Path) -> Side:
    """vLLM's side of a row, under the interpreter ``python``."""
    job = vllm_job(log.parent / name, row, batches)
    script = pathlib.Path(__file__).with_name("of_vllm.py")
    return run([python, str(script), json.dumps(job)], batches, seconds, log, OFFLINE)


def vllm_job(folder: pathlib.Path, row: Row, batches: Sequence[int]) -> dict[str, Any]:
    """What vLLM's side reads; the models' config.json are written into ``folder``."""
    draft = write(folder / "draft", head_fields(row)) if row.method == "eagle" else None
    return {
        "model": write(folder / "target", target_fields(row)),
        "draft": draft,
        "method": row.method,
        "drafts": DRAFTS if row.method else 0,
        "acceptance": ACCEPTANCE,
        "batches": list(batches),
        "prompt": row.prompt,
        "new": row.new,
        "vocabulary": row.shape.vocab_size,
    }


def run(
    command: Sequence[str], batches: Sequence[int], seconds: float, log: pathlib.Path, variables: dict[str, str]
) -> Side:
    """What ``command`` measures within ``seconds``; then it and the processes that it began are ended."""
    environment = {**os.environ, **variables}
    with log.open("w") as errors:
        child = subprocess.Popen(
            command,
            cwd=results.ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            printed, ended = child.communicate(timeout=seconds)[0], f"it ended with status {child.returncode}"
        except subprocess.TimeoutExpired:
            _end(child)
            printed, ended = child.communicate()[0], f"it was ended after {seconds:g} seconds"
        finally:
            _end(child)
    return _read(printed, batches, ended, log)


def _end(child: subprocess.Popen):
    """End a process and its group. vLLM's engine is a process of it, and holds the card as long as it lives."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(100):
            os.killpg(child.pid, signal.SIGKILL)
            child.poll()
            time.sleep(0.1)


def _read(printed: str, batches: Sequence[int], ended: str, log: pathlib.Path) -> Side:
    side, rest = Side({}, {}, {}), ended
    for line in printed.splitlines():
        if not line.startswith("{"):
            continue
        said = json.loads(line)
        side.about.update(said.get("about", {}))
        if "ms" in said:
            side.figures[said.pop("rows")] = said
        elif "rows" in said:
            side.reasons[said["rows"]] = _short(said["reason"])
        elif "reason" in said:
            rest = _short(_cause(log) or said["reason"] if "root cause" in said["reason"] else said["reason"])
    for rows in batches:
        if rows not in side.figures:
            side.reasons.setdefault(rows, rest)
    return side


def _cause(log: pathlib.Path) -> str | None:
    """The last error in a log, but for that of vLLM's first process, which only refers to others."""
    errors = re.findall(r"\b\w+Error: .*", log.read_text())
    return next((error for error in reversed(errors) if "See root cause above" not in error), None)


def _short(reason: str) -> str:
    return " ".join(reason.split())[:LONGEST]
