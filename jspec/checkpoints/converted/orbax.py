"""Reads the Orbax checkpoint of a converted folder: the shapes of its arrays, and one array at a time."""

import contextlib
import gc
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401 (lets NumPy know bfloat16 and float8_e4m3fn by their names)
import numpy as np

from jspec.checkpoints.converted.params import Index, bounds_of
from jspec.checkpoints.files.json_files import read_json, reason_of
from jspec.checkpoints.files.ranges import read_range
from jspec.checkpoints.files.refusal import Refusal

METADATA = "_METADATA"  # file with the names of the arrays
HEADER = ".zarray"  # file with shape and dtype, in the folder of each array
DTYPES = ("<f4", "<f2", "bfloat16", "|i1", "|u1", "float8_e4m3fn", "<i4", "<u4")
MAX_REASON = 300  # characters

T = TypeVar("T")


def read_shapes(path: Path, where: str) -> dict[str, tuple[int, ...]]:
    """Dotted name -> shape of each array in an Orbax checkpoint, from its metadata; no array is read.

    Args:
      path: the folder of the checkpoint; the caller has checked that no symbolic link in it leads outside.
      where: its name, for messages.

    Raises:
      Refusal: the metadata and the files name different arrays, or an array is stored in another way than jspec does.
    """
    listed = _listed_names(read_json(path / METADATA, f"{where}/{METADATA}"))
    found = {folder.name for folder in path.iterdir() if (folder / HEADER).exists()}
    if listed != found:
        [name, *_] = sorted(listed ^ found) if listed else [METADATA]
        raise Refusal(f"{where}: {METADATA} and the folders disagree about {name!r}; convert the checkpoint again")
    return {name: _shape(read_json(path / name / HEADER, f"{where}/{name}/{HEADER}"), where, name) for name in found}


def load_param(path: Path, name: str, index: Index = ()) -> np.ndarray:
    """The array ``name``, or a part of it, in its stored dtype, of the Orbax checkpoint at ``path``.

    Its numbers are read from its *chunks*, the files of equal parts of it, of each the bytes of the part alone. Orbax
    itself would read all arrays of a checkpoint at once, and each as a whole.

    Raises:
      Refusal: it cannot be read.
    """
    try:
        header = read_json(path / name / HEADER, f"{path}/{name}/{HEADER}")
        shape, size, dtype = tuple(header["shape"]), tuple(header["chunks"]), np.dtype(header["dtype"])
        bounds = bounds_of(index, shape)
        over = [range(first // n, -(-stop // n)) for (first, stop), n in zip(bounds, size, strict=True)]
        if all(len(chunks) == 1 for chunks in over):  # the file holds all of the part
            return _of_chunk(path / name, [chunks[0] for chunks in over], size, dtype, bounds)[1]
        out = np.empty([max(stop - first, 0) for first, stop in bounds], dtype)
        for number in itertools.product(*over):
            at, part = _of_chunk(path / name, number, size, dtype, bounds)
            out[at] = part
        return out
    except (OSError, ValueError) as error:
        reason = reason_of(error)[:MAX_REASON]
        raise Refusal(f"{path}: {name!r} cannot be restored ({reason}); convert the checkpoint again") from None


def _of_chunk(
    folder: Path, number: Sequence[int], size: tuple[int, ...], dtype: np.dtype, bounds: list[tuple[int, int]]
) -> tuple[Index, np.ndarray]:
    """What a chunk has of a part of its array, behind the place of that in the part.

    Args:
      folder: of the array.
      number: of the chunk along each axis.
      size: of each chunk; those at the ends are as large, and reach beyond the array.
      dtype: of the numbers.
      bounds: of the part in the array.
    """
    at, within = [], []
    for i, n, (first, stop) in zip(number, size, bounds, strict=True):
        begin, end = max(first, i * n), min(stop, (i + 1) * n)
        at.append(slice(begin - first, end - first))
        within.append(slice(begin - i * n, end - i * n))
    file, nbytes = folder / (".".join(map(str, number)) or "0"), math.prod(size) * dtype.itemsize
    if (found := file.stat().st_size) != nbytes:
        raise ValueError(f"{file.name} has {found} bytes, not {nbytes}")
    return tuple(at), read_range(file, dtype, size, tuple(within))


def quietly(function: Callable[[], T], refusal: Callable[[Exception], Exception]) -> T:
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


def _listed_names(metadata: Any) -> set[str]:
    """The dotted names of the arrays that Orbax's metadata lists; empty if it is not as Orbax writes it.

    Each is also the name of the folder in which the array is stored."""
    try:
        return {".".join(part["key"] for part in leaf["key_metadata"]) for leaf in metadata["tree_metadata"].values()}
    except (AttributeError, IndexError, KeyError, TypeError):
        return set()


def _shape(header: Any, where: str, name: str) -> tuple[int, ...]:
    """The shape in the zarr header of the array ``name``, after a check that the array is stored as jspec stores it."""
    try:
        shape, chunks = tuple(header["shape"]), tuple(header["chunks"])
        sane = all(type(n) is int and n >= 0 for n in (*shape, *chunks))
        sane = sane and all(1 <= chunk <= max(n, 1) for n, chunk in zip(shape, chunks, strict=True))
        sane = sane and header["dtype"] in DTYPES and header["compressor"] is None and header["filters"] is None
        sane = sane and header["order"] == "C" and header.get("dimension_separator", ".") == "."
    except (KeyError, TypeError, ValueError):
        shape, sane = (), False
    if not sane:
        raise Refusal(
            f"{where}/{name}/{HEADER}: does not describe an uncompressed array of a known dtype; "
            "convert the checkpoint again"
        )
    return shape


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
