"""Processes that tests start."""

import os
from pathlib import Path

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
