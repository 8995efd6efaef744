"""The Orbax checkpoint of a converted folder, read back as a flat dict of named arrays."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from jspec.checkpoints.refusal import Refusal


def load_params(path: Path) -> dict[str, np.ndarray]:
    """Dotted name -> array of the checkpoint at ``path``, in the stored dtype.

    Raises:
      Refusal: Orbax cannot read it.
    """
    try:
        with quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.restore(path.resolve())
    except Exception as error:  # Orbax and TensorStore raise many kinds
        raise Refusal(f"{path}: cannot be restored ({' '.join(str(error).split())[:300]})") from error
    return dict(_flatten(tree))


def _flatten(tree: dict) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield ".".join(str(part.key) for part in path), np.asarray(leaf)


@contextlib.contextmanager
def quiet():
    """Hold back what Orbax logs about every save, and about features that are off here on purpose."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
