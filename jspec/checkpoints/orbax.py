"""Reads the Orbax checkpoint of a converted folder: the shapes of its arrays, and one array at a time."""

import contextlib
import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorstore

from jspec.checkpoints.json_files import read_json, reason_of
from jspec.checkpoints.refusal import Refusal

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


def load_param(path: Path, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
    """The array ``name``, or a part of it, in its stored dtype, of the Orbax checkpoint at ``path``.

    It is read by TensorStore, as Orbax does, which itself reads all arrays of a checkpoint at once.

    Raises:
      Refusal: it cannot be read.
    """
    where = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path.resolve() / name)}}
    try:
        return np.asarray(tensorstore.open(where, open=True, read=True).result()[index].read().result())
    except (ValueError, OSError) as error:
        reason = reason_of(error)[:MAX_REASON]
        raise Refusal(f"{path}: {name!r} cannot be restored ({reason}); convert the checkpoint again") from None


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
        sane = sane and all(chunk <= max(n, 1) for n, chunk in zip(shape, chunks, strict=True))
        sane = sane and header["dtype"] in DTYPES and header["compressor"] is None and header["filters"] is None
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
