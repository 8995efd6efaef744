"""How long rounds of vLLM and of jspec take on the same shapes, in turn on one NVIDIA GPU.

    python -m venv DIR && DIR/bin/pip install vllm              # any version
    python -m benchmarks.peers --vllm-python DIR/bin/python     # every row, an hour or two
    python -m benchmarks.peers --vllm-python DIR/bin/python --rows 8b 8b-fp8 --batches 1 16
    python -m benchmarks.peers --vllm-python DIR/bin/python --smoke --out OUT  # tiny and anywhere, with meaningless times

Each side of a row runs in a process of its own, which frees the card. The result is written after each row. Without
--out it goes to benchmarks/results, and docs/results/beside-vllm.md and README.md are written with it. A side that
fails, takes too long or has no room is in the result with its reason. ``benchmarks.report.peers_table`` says what is
not equal on both sides. Keys of the result are ``<row>, <number of rows> rows, <side>``, in milliseconds of a round."""

import argparse
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile

from benchmarks import tables
from benchmarks.peers.children import Side, jspec_side, vllm_side
from benchmarks.peers.rows import ACCEPTANCE, BATCHES, DRAFTS, ROWS, SMOKE
from benchmarks.report import peers_table, results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", required=True, metavar="PYTHON", help="the interpreter that has vLLM")
    parser.add_argument("--rows", choices=ROWS, nargs="+", default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, metavar="N", help="numbers of rows")
    parser.add_argument("--seconds", type=float, default=1200, help="for each side of a row (default: %(default)s)")
    parser.add_argument("--out", type=pathlib.Path, default=results.RESULTS, metavar="DIR", help="of the result")
    parser.add_argument("--smoke", action="store_true", help="small models, any machine, meaningless times")
    args = parser.parse_args()
    if args.smoke and args.out == results.RESULTS:
        parser.error("--out: a smoke run is no result; name another folder")
    python = os.path.abspath(shutil.which(args.vllm_python) or args.vllm_python)  # children run in another folder
    if not has_vllm(python):
        parser.error(
            f"--vllm-python {args.vllm_python}: expected a Python that has vLLM; make one with `python -m venv DIR && "
            "DIR/bin/pip install vllm` and give DIR/bin/python"
        )
    file = compare(args, python)
    if file is None:
        return 1
    if args.out == results.RESULTS:
        tables.write()
    print(f"\n{peers_table.section([results.read(file)])}\n\nwrote {file}")
    return 0


def has_vllm(python: str) -> bool:
    """Whether vLLM is there for an interpreter; it is not imported, which takes long."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", code], cwd="/", check=False).returncode == 0
    except OSError:
        return False


def compare(args: argparse.Namespace, python: str) -> pathlib.Path | None:
    """Measure both sides of every row, and write the result; its file, None if jspec itself does not run here."""
    logs, result, file = pathlib.Path(tempfile.mkdtemp(prefix="peers-")), None, args.out
    print(f"logs: {logs}", flush=True)
    for name, row in (SMOKE if args.smoke else {name: ROWS[name] for name in args.rows}).items():
        rate = None if result is None else result.device["bandwidth"]
        ours = jspec_side(name, args.batches, args.seconds, logs / f"{name}-jspec.log", rate)
        if result is None:
            if not ours.about:
                print(f"jspec does not run here:\n{(logs / f'{name}-jspec.log').read_text()}", file=sys.stderr)
                return None
            result = begun(ours, args)
            file = args.out / f"peers-{result.date[:16].replace(':', '')}.json"
        theirs = vllm_side(python, name, row, args.batches, args.seconds, logs / f"{name}-vllm.log")
        result.versions.update(theirs.about)
        for side, of in (("vLLM", theirs), ("jspec", ours)):
            add(result, name, side, of)
        results.write(result, file)
        for line in peers_table.lines({name: result}):
            print(" | ".join(line), flush=True)
    return file


def begun(ours: Side, args: argparse.Namespace) -> results.Result:
    """The result of a run that began as jspec's side of its first row says."""
    settings = {"batches": list(args.batches), "drafts": DRAFTS, "synthetic_acceptance": ACCEPTANCE, "reasons": {}}
    command = results.command_of("peers", sys.argv[1:])
    return results.Result(**{**ours.about, "command": command, "settings": {**settings, "smoke": args.smoke}})


def add(result: results.Result, name: str, side: str, of: Side):
    """Put what a side of a row came to into the result."""
    for rows, figure in of.figures.items():
        key = peers_table.key_of(name, rows, side)
        more = {name: value for name, value in figure.items() if name not in ("ms", "floor")}
        result.measured[key], result.details[key] = figure["ms"], {"unit": "ms", **more}
        if "floor" in figure:
            result.floors[key] = figure["floor"]
    if of.reasons:
        result.settings["reasons"][f"{name}, {side}"] = {str(rows): reason for rows, reason in of.reasons.items()}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a side that runs is ended, too
    sys.exit(main())
