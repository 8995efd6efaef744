"""``StoredParams``: the params of a checkpoint folder, read one at a time; and what shapes and dtypes they have."""

import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jspec.checkpoints.files.ranges import Index, pieces, results
from jspec.checkpoints.files.tensor import NUMPY_DTYPES, STORED_DTYPES
from jspec.config import ModelConfig
from jspec.config.heads import HeadConfig

Read = Callable[[str, Index], np.ndarray]
AHEAD = 4  # parts that are read side by side
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

    So a caller that sends one piece after another to its devices has a few of them in host memory at a time, and not the
    model. In a terminal a progress bar shows how much was read. Once all arrays have been read, the log has the seconds.

    Args:
      folder: the checkpoint folder, for the bar.
      shapes: name -> shape, of every array.
      read: reads a part of the array of a name; ``()`` is all of it. Several threads may call it.
      whole: whether it reads all of an array for any part of it.
    """

    def __init__(self, folder: str | Path, shapes: Mapping[str, tuple[int, ...]], read: Read, whole: bool = False):
        self.shapes, self._folder, self._read, self._whole = shapes, Path(folder), read, whole
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
        return self.ahead([(name, index) for index in indices], 1)

    def pieces(self, name: str, index: Index, itemsize: int) -> list[Index]:
        """A part of an array in pieces that are read by themselves, numbers of which have so many bytes."""
        return [index] if self._whole else pieces(index, self.shapes[name], itemsize)

    def ahead(self, wanted: Sequence[tuple[str, Index]], most: int = AHEAD) -> Iterator[np.ndarray]:
        """Parts of arrays, those of one array side by side in ``wanted``. At most ``most`` of them are in host memory: the
        one that was returned last, and those that are read meanwhile."""
        new = self._unread & {name for name, _ in wanted}
        calls = [functools.partial(self._read, *part) for part in wanted]
        parts = results(calls, 1 if self._whole else most)
        for place, (name, _) in enumerate(wanted, 1):
            part = next(parts)
            self._bytes += part.nbytes * (name in new)
            if name in self._unread and (place == len(wanted) or wanted[place][0] != name):
                self._unread.discard(name)
                self._show(math.prod(self.shapes[name]))
            yield part
            del part  # before the next one is read

    def without(self, names: Container[str]) -> "StoredParams":
        """The same params but for some, whose arrays are not read."""
        shapes = {name: shape for name, shape in self.shapes.items() if name not in names}
        return StoredParams(self._folder, shapes, self._read, self._whole)

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
