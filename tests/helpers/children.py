"""Processes that tests start."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parents[2]


def environment(*folders: Path) -> dict[str, str]:
    """The variables of a process that runs jspec of this tree on the CPU, and compiles as quickly as the tests do.

    Args:
      *folders: where it finds modules, besides the tree.
    """
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *folders))), "JAX_PLATFORMS": "cpu"}
    found["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    if jax.config.jax_compilation_cache_dir is not None:
        found["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
        found["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return found


def run_library(script: str, folder: Path, *arguments: Any):
    """Run a script of another library in a folder, in a process of its own, because importing such a library changes torch.

    To import one takes seconds, so that a file of tests has it write all that the tests read at once. It has one thread:
    threads of torch that wait for work keep the cores of other tests busy.

    Args:
      script: finds its arguments as JSON in ``sys.argv``.
      folder: where it writes.
      *arguments: strings, numbers, lists and dicts.
    """
    command = [sys.executable, "-W", "ignore", "-c", script, *map(json.dumps, arguments)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Whatever fails before it ends: who leaves its ``with`` waits for it."""
    try:
        yield process
    finally:
        process.kill()
