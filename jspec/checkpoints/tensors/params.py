"""``StoredParams``: the params of a checkpoint folder, read one at a time; and what shapes and dtypes they have."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.tensor import NUMPY_DTYPES, STORED_DTYPES
from jspec.config import ModelConfig
from jspec.config.heads import HeadConfig

log = logging.getLogger("jspec.loading")


def stored_params(config: ModelConfig | HeadConfig, dtype: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Parameter name -> (shape, dtype) in a converted folder, including the scales of quantised parameters.

    Args:
      config: the config of the language model or the draft head.
      dtype: the dtype of the parameters that are neither quantised nor integers.
    """
    shapes, own = config.param_shapes(), config.param_dtypes()
    params = {n: (shape, np.dtype(own[n]) if n in own else NUMPY_DTYPES[dtype]) for n, shape in shapes.items()}
    for stored in config.stored_params().values():
        params |= {name: (array.shape, STORED_DTYPES[array.dtype]) for name, array in stored.arrays.items()}
    return params


class StoredParams(Mapping[str, np.ndarray]):
    """Dotted name -> array, read from the files whenever it is asked for, and not stored here.

    So a caller that sends one array after another to its devices has one of them in host memory at a time, and not the
    model. In a terminal a progress bar shows how much was read. Once all arrays have been read, the log has the seconds.

    Args:
      folder: the checkpoint folder, for the bar.
      shapes: name -> shape, of every array.
      read: reads a part of the array of a name; ``()`` is all of it.
    """

    def __init__(
        self, folder: str | Path, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str, Index], np.ndarray]
    ):
        self.shapes, self._folder, self._read = shapes, Path(folder), read
        self._unread, self._bytes, self._began = set(shapes), 0, time.perf_counter()
        self._bar: tqdm | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        [array] = self.parts(name, [()])
        return array

    def parts(self, name: str, indices: Sequence[Index]) -> Iterator[np.ndarray]:
        """Some parts of an array, each of which is read when its turn comes. The bytes of others are not read.

        Raises:
          KeyError: there is no array of that name.
        """
        if name not in self.shapes:
            raise KeyError(name)
        return self._parts(name, indices)

    def _parts(self, name: str, indices: Sequence[Index]) -> Iterator[np.ndarray]:
        is_new = name in self._unread
        for left, index in enumerate(indices, 1 - len(indices)):
            part = self._read(name, index)
            if is_new:
                self._bytes += part.nbytes
            if left == 0 and name in self._unread:
                self._unread.discard(name)
                self._show(math.prod(self.shapes[name]))
            yield part
            del part  # before the next one is read

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _show(self, numbers: int):
        if self._bar is None:
            total = sum(math.prod(shape) for shape in self.shapes.values())
            hidden = not sys.stderr.isatty()
            self._bar = tqdm(
                total=total, unit=" weights", unit_scale=True, desc=self._folder.name, disable=hidden, leave=False
            )
        self._bar.update(numbers)
        if not self._unread:
            self._bar.close()
            seconds = time.perf_counter() - self._began
            log.info("%s: %.1f GB of weights read in %.1f s", self._folder, self._bytes / 1e9, seconds)
