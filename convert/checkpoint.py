"""Parameters as an Orbax checkpoint, written one at a time.

The checkpoint is a plain one, a nested dict of numpy arrays that ``orbax.checkpoint`` restores anywhere. It is stored
uncompressed with one folder a parameter: weights hardly compress, and a damaged file then names its parameter.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from jspec.checkpoints.orbax import quiet

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


def _nest(flat: dict) -> dict:
    tree: dict = {}
    for name, leaf in flat.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree
