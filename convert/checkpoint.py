"""Parameters as an Orbax checkpoint, written one at a time.

The checkpoint is a plain one, a nested dict of numpy arrays that ``orbax.checkpoint`` restores anywhere. It is stored
uncompressed with one folder a parameter: weights hardly compress, and a damaged file then names its parameter.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from convert.refusal import Refusal

_MARKER = "commit_success.txt"


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array that is made when it is written, and dropped right after."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _OneAtATime(ocp.type_handlers.NumpyHandler):
    """Writes lazy arrays as numpy arrays, each before the next is made."""

    def __init__(self):
        super().__init__(deepcopy_host_arrays=False)

    async def serialize(self, values: Sequence[LazyArray], infos, args=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for value, info, arg in zip(values, infos, args or [ocp.SaveArgs()] * len(values), strict=True):
            for written in await super().serialize([value.make()], [info], [arg]):
                written.result()
        return []


def save_params(path: Path, params: dict[str, LazyArray]):
    """Write ``params`` (dotted names) as the nested dict at ``path``, an absolute path that does not exist yet."""
    registry = ocp.type_handlers.create_type_handler_registry((LazyArray, _OneAtATime()))
    with quiet():
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(_nest(params)))
    marker = path / _MARKER
    if marker.exists():  # Orbax writes the absolute path of the moment into it; only its presence counts
        marker.write_text("committed\n")


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


def _nest(flat: dict) -> dict:
    tree: dict = {}
    for name, leaf in flat.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


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
