"""Reads the Orbax checkpoint of a converted folder: the shapes of its arrays, and one array at a time."""

import contextlib
import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 (lets NumPy know bfloat16 and float8_e4m3fn by their names)
import numpy as np

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.json_files import reason_of
from jspec.checkpoints.files.ranges import Index, bounds_of, read_range
from jspec.checkpoints.files.refusal import Refusal

METADATA = "_METADATA"  # file with the names of the arrays
HEADER = ".zarray"  # file with shape and dtype, in the folder of each array
DTYPES = ("<f4", "<f2", "bfloat16", "|i1", "|u1", "float8_e4m3fn", "<i4", "<u4")
MAX_REASON = 300  # characters

Check = Callable[[str, memoryview], None]  # (name of a file in the folder, its bytes); raises a Refusal


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array of an Orbax checkpoint, whose header was read and checked and whose numbers are not read yet.

    Its numbers are in *chunks*, the files of equal parts of it.

    Attributes:
      folder: the converted folder.
      name: the path of the array's own folder in it, ``params/layers.0.mlp.down.weight``.
      shape, dtype: of the array.
      chunk: the shape of the chunks; those at the ends are as large, and reach beyond the array.
    """

    folder: Folder
    name: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    def read(self, index: Index = (), check: Check | None = None) -> np.ndarray:
        """The array, or a part of it, in its stored dtype; of each chunk, only the bytes of the part are read.

        Orbax itself would read all arrays of a checkpoint at once, and each as a whole.

        Args:
          index: which part.
          check: is called with all bytes of each chunk that has numbers of the part, which is then read as a whole.

        Raises:
          Refusal: it cannot be read, or ``check`` raised it.
        """
        bounds = bounds_of(index, self.shape)
        over = [range(first // n, -(-stop // n)) for (first, stop), n in zip(bounds, self.chunk, strict=True)]
        try:
            if all(len(numbers) == 1 for numbers in over):  # one chunk holds all of the part
                return self._read_chunk([numbers[0] for numbers in over], bounds, check)[1]
            out = np.empty([max(stop - first, 0) for first, stop in bounds], self.dtype)
            for number in itertools.product(*over):
                at, part = self._read_chunk(number, bounds, check)
                out[at] = part
            return out
        except Refusal:
            raise
        except (OSError, ValueError) as error:
            where, _, name = f"{self.folder.given}/{self.name}".rpartition("/")
            reason = reason_of(error)[:MAX_REASON]
            raise Refusal(f"{where}: {name!r} cannot be restored ({reason}); convert the checkpoint again") from None

    def _read_chunk(
        self, number: Sequence[int], bounds: list[tuple[int, int]], check: Check | None
    ) -> tuple[Index, np.ndarray]:
        """Where the numbers of a part that one chunk holds go in the part, and these numbers.

        Args:
          number: of the chunk along each axis.
          bounds: of the part in the array.
          check: as for ``read``.
        """
        at, within = [], []
        for i, n, (first, stop) in zip(number, self.chunk, bounds, strict=True):
            begin, end = max(first, i * n), min(stop, (i + 1) * n)
            at.append(slice(begin - first, end - first))
            within.append(slice(begin - i * n, end - i * n))
        name = f"{self.name}/{'.'.join(map(str, number)) or '0'}"
        file, expected = self.folder.root / name, math.prod(self.chunk) * self.dtype.itemsize
        if (size := file.stat().st_size) != expected:
            raise ValueError(f"{file.name} has {size} bytes, not {expected}")
        if check is None:
            return tuple(at), read_range(file, self.dtype, self.chunk, tuple(within))
        chunk = read_range(file, self.dtype, self.chunk)
        check(name, chunk.reshape(-1).view(np.uint8).data)
        return tuple(at), chunk[tuple(within)]


def stored_arrays(folder: Folder, path: str) -> dict[str, StoredArray]:
    """Dotted name -> array, for each array in an Orbax checkpoint. Metadata and headers are read, and no numbers.

    Args:
      folder: the converted folder; the caller has checked that no symbolic link in it leads outside.
      path: the folder of the Orbax checkpoint in it.

    Raises:
      Refusal: the metadata and the files name different arrays, or an array is stored in another way than jspec does.
    """
    listed = _listed_names(folder.json(f"{path}/{METADATA}"))
    present = {array.name for array in (folder.root / path).iterdir() if (array / HEADER).exists()}
    if listed != present:
        [name, *_] = sorted(listed ^ present) if listed else [METADATA]
        where = f"{folder.given}/{path}"
        raise Refusal(f"{where}: {METADATA} and the folders disagree about {name!r}; convert the checkpoint again")
    return {name: _stored_array(folder, f"{path}/{name}") for name in present}


def _listed_names(metadata: Any) -> set[str]:
    """The dotted names of the arrays that Orbax's metadata lists; empty if it is not as Orbax writes it.

    Each is also the name of the folder in which the array is stored."""
    try:
        return {".".join(part["key"] for part in leaf["key_metadata"]) for leaf in metadata["tree_metadata"].values()}
    except (AttributeError, IndexError, KeyError, TypeError):
        return set()


def _stored_array(folder: Folder, name: str) -> StoredArray:
    """The array in the folder ``name``, after a check of its zarr header that it is stored as jspec stores it."""
    header: Any = folder.json(f"{name}/{HEADER}")
    try:
        shape, chunk = tuple(header["shape"]), tuple(header["chunks"])
        sane = all(type(n) is int and n >= 0 for n in (*shape, *chunk))
        sane = sane and all(1 <= part <= max(n, 1) for n, part in zip(shape, chunk, strict=True))
        sane = sane and header["dtype"] in DTYPES and header["compressor"] is None and header["filters"] is None
        sane = sane and header["order"] == "C" and header.get("dimension_separator", ".") == "."
    except (KeyError, TypeError, ValueError):
        shape, chunk, sane = (), (), False
    if not sane:
        raise Refusal(
            f"{folder.given}/{name}/{HEADER}: does not describe an uncompressed array of a known dtype; "
            "convert the checkpoint again"
        )
    return StoredArray(folder, name, shape, chunk, np.dtype(header["dtype"]))


@contextlib.contextmanager
def quiet(names: Sequence[str] = ("absl",), level: int = logging.ERROR):
    """Silence the loggers ``names`` below ``level``, because Orbax logs every save and every feature that is off."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
