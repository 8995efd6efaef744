"""Writes parameters as an Orbax checkpoint, one at a time, so that memory holds one parameter and not the model.

The checkpoint is a nested dict of numpy arrays, which ``orbax.checkpoint`` restores without jspec. Each parameter has a
folder of its own, so that the path of a damaged file names the parameter. Nothing is compressed, because weights hardly
get smaller, and so the bytes of a part of a parameter are found by its place.
"""

import dataclasses
import errno
import gc
import logging
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from jspec.checkpoints.converted.orbax import quiet
from jspec.checkpoints.files.refusal import Refusal

_MARKER = "commit_success.txt"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array whose values are made when it is written and dropped right after.

    Attributes:
      shape, dtype: of the array.
      make: returns its values.
      chunk: the shape of the parts that have a file each.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]
    chunk: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def files(self) -> int:
        """How many files hold its values."""
        return math.prod(-(-size // each) for size, each in zip(self.shape, self.chunk, strict=True))


class _OneAtATime(ocp.type_handlers.NumpyHandler):
    """An Orbax handler that writes lazy arrays as numpy arrays, each before the next one is made.

    Orbax's own handler writes an array in chunks of a given size, but not of a given shape."""

    async def serialize(self, values: Sequence[LazyArray], infos, args=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        for value, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            await _write(Path(info.parent_dir) / info.name, value)
        return []


async def _write(folder: Path, lazy: LazyArray):
    """Write an array as Orbax does, but for the shape of its chunks."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": folder.as_posix()},
        "store_data_equal_to_fill_value": True,  # otherwise a chunk of zeros has no file
        "metadata": {"shape": lazy.shape, "chunks": [max(size, 1) for size in lazy.chunk], "compressor": None},
    }
    store = await tensorstore.open(spec, dtype=tensorstore.dtype(lazy.dtype), create=True)
    await store.write(lazy.make(), can_reference_source_data_indefinitely=True)


def save_params(path: Path, params: dict[str, LazyArray]):
    """Write an Orbax checkpoint.

    Args:
      path: the folder to create, an absolute path that does not exist yet.
      params: dotted name -> array; each dot of a name becomes a level of the nested dict.

    Raises:
      OSError: the disk is full or fails.
      Refusal: an array's ``make`` raised it.
    """

    def save():
        registry = ocp.type_handlers.create_type_handler_registry((LazyArray, _OneAtATime()))
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(_nest(params)))

    _quietly(save, _as_os_error)
    marker = path / _MARKER
    if marker.exists():
        # Orbax writes the path of the temporary folder into this file, although only its presence counts. With a fixed
        # text, two conversions of one checkpoint give equal files.
        marker.write_text("committed\n")


def bytes_on_disk(params: dict[str, LazyArray], block: int) -> int:
    """An upper bound of the bytes that ``save_params`` takes on a disk that allocates blocks of ``block`` bytes.

    Each array takes its values, whose files may each end in a block that is not full, a header of up to a few hundred bytes
    and a folder. Three more files list all names.
    """
    numbers = sum(whole_blocks(array.nbytes, block) + (array.files + 1) * block for array in params.values())
    names = sum(512 + 128 * name.count(".") + 2 * len(name) for name in params)
    return numbers + whole_blocks(names, block) + 6 * block


def whole_blocks(size: int, block: int) -> int:
    """``size`` rounded up to whole blocks."""
    return -(-size // block) * block


def _as_os_error(error: Exception) -> Exception:
    """The ``OSError`` that an exception of TensorStore stands for; any other exception is returned as it is.

    TensorStore reports errors of the operating system as text in a ``ValueError``."""
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror, error.filename)
    text = str(error)
    code = re.search(r"os_error_code='(\d+)'", text)
    if code is None and not re.search("RESOURCE_EXHAUSTED|No space left on device|Disk quota exceeded", text):
        return error
    number = int(code[1]) if code else errno.ENOSPC
    return OSError(number, os.strerror(number))


def _nest(flat: dict) -> dict:
    """``{"a.b": x}`` as ``{"a": {"b": x}}``."""
    tree: dict = {}
    for name, leaf in flat.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def _quietly(function: Callable[[], T], refusal: Callable[[Exception], Exception]) -> T:
    """The result of ``function``, during which Orbax, TensorStore and asyncio log nothing.

    These libraries raise exceptions of many kinds, and log the same failure besides. Here a failure is reported once.

    Args:
      function: what to call.
      refusal: makes the exception to raise from the one that ``function`` raised, or returns the same one. A ``Refusal``
        that ``function`` raises is raised unchanged.
    """
    with quiet(("absl", "asyncio"), logging.CRITICAL + 1):
        try:
            return function()
        except Refusal as error:
            failure: Exception = error.with_traceback(None)
        except Exception as error:
            failure = refusal(error)
            if failure is error:
                raise
        failure.__context__ = failure.__cause__ = None
        gc.collect()  # asyncio logs the failure of an abandoned task when the task is collected, so collect it silenced
    raise failure
