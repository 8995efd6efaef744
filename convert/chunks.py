"""The shape of the files in which an array of a converted folder is stored.

A process that loads a model in shards reads the bytes of its own shards alone. Of an array that is sharded by rows, these
bytes lie side by side in one file. Of an array that is sharded by columns, as those behind attention and MLP are, they
would be a few kilobytes of every row. Such an array is stored in *chunks*, which are files of some columns each. So are
experts in MXFP4, which are sharded along axis 1."""

import math
from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.converted.manifest import SMALL
from jspec.config import Shards
from jspec.config.heads import DraftConfig

MOST = 16  # chunks of an array, so that 2, 4, 8 and 16 shards have whole ones; Llama-3.3-70B then has 3,400 files
SMALLEST = SMALL  # bytes of a chunk, because files up to this size are hashed whenever the folder is loaded


def chunk_shapes(
    config: DraftConfig, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]]
) -> dict[str, tuple[int, ...]]:
    """Parameter name -> the shape of its chunks. All chunks of an array have as many numbers.

    Args:
      config: the config of the language model or the draft head; draft heads are not sharded.
      arrays: parameter name -> (shape, dtype).
    """
    model = config.language_model
    splits = {} if model is None else Shards(2).splits(model)
    axes = {name: split.axis for name, split in splits.items()}
    return {name: _chunk(shape, dtype, axes.get(name)) for name, (shape, dtype) in arrays.items()}


def _chunk(shape: tuple[int, ...], dtype: np.dtype, axis: int | None) -> tuple[int, ...]:
    """The shape of the chunks of an array, of which shards have some places along ``axis``; None if each has all."""
    if not axis:  # a single file: rows lie side by side in it
        return shape
    nbytes, size = math.prod(shape) * dtype.itemsize, shape[axis]
    count = MOST
    while size % count or (count > 1 and nbytes // count <= SMALLEST):
        count //= 2
    return (*shape[:axis], size // count, *shape[axis + 1 :])
