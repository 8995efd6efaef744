"""Parameters as an Orbax checkpoint, written one at a time.

The checkpoint is a plain one, a nested dict of numpy arrays that ``orbax.checkpoint`` restores anywhere. It is stored
uncompressed with one folder a parameter: weights hardly compress, and a damaged file then names its parameter.
"""

import dataclasses
import errno
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from jspec.checkpoints.orbax import quietly

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
    """Write ``params`` (dotted names) as the nested dict at ``path``, an absolute path that does not exist yet.

    Raises:
      OSError: the disk is full or fails.
      Refusal: as the makers of ``params`` raise it.
    """

    def save():
        registry = ocp.type_handlers.create_type_handler_registry((LazyArray, _OneAtATime()))
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(_nest(params)))

    quietly(save, _as_os_error)
    marker = path / _MARKER
    if marker.exists():  # Orbax writes the absolute path of the moment into it; only its presence counts
        marker.write_text("committed\n")


def bytes_on_disk(params: dict[str, LazyArray], block: int) -> int:
    """An upper bound of what ``save_params`` writes, on a disk that hands out space in blocks of ``block`` bytes.

    Each array has a file, a header of up to a few hundred bytes and a folder of its own; three files name them all.
    """
    numbers = sum(whole_blocks(array.nbytes, block) + 2 * block for array in params.values())
    names = sum(512 + 128 * name.count(".") + 2 * len(name) for name in params)
    return numbers + whole_blocks(names, block) + 6 * block


def whole_blocks(size: int, block: int) -> int:
    """``size`` rounded up to whole blocks."""
    return -(-size // block) * block


def _as_os_error(error: Exception) -> Exception:
    """TensorStore reports what the system said as text, in a ValueError."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename)
    text = str(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    if code is None and not re.search("RESOURCE_EXHAUSTED|No space left on device|Disk quota exceeded", text):
        return error
    number = int(code[1]) if code else errno.ENOSPC
    return OSError(number, os.strerror(number))


def _nest(flat: dict) -> dict:
    tree: dict = {}
    for name, leaf in flat.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree
