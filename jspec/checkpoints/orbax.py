"""The Orbax checkpoint of a converted folder: its shapes, and its arrays read back as a flat dict."""

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jspec.checkpoints.json_files import read_json, reason_of
from jspec.checkpoints.refusal import Refusal

METADATA = "_METADATA"  # the names of the arrays
HEADER = ".zarray"  # shape and dtype, in the folder of each array
DTYPES = ("<f4", "<f2", "bfloat16", "|i1", "float8_e4m3fn", "<i4")
MAX_REASON = 300  # characters

T = TypeVar("T")


class _Together(ocp.type_handlers.NumpyHandler):
    """Reads arrays at the same time, and waits for all of them even if one fails.

    Orbax itself leaves the event loop at the first failure, and TensorStore then prints a traceback for each array that
    arrives after it."""

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[np.ndarray]:
        args = args or [ocp.RestoreArgs()] * len(infos)
        reads = [super(_Together, self).deserialize([info], [arg]) for info, arg in zip(infos, args, strict=True)]
        results = await asyncio.gather(*reads, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [array for [array] in results]  # pyright: ignore[reportGeneralTypeIssues]


def read_shapes(path: Path, where: str) -> dict[str, tuple[int, ...]]:
    """Dotted name -> shape of each array in the checkpoint at ``path``; reads no numbers.

    Args:
      path: the checkpoint, a folder in which no symbolic link leads outside.
      where: its name, for messages.

    Raises:
      Refusal: it names arrays that are not there, or stores one in another way than jspec does.
    """
    named = _named(read_json(path / METADATA, f"{where}/{METADATA}"))
    held = {folder.name for folder in path.iterdir() if (folder / HEADER).exists()}
    if named != held:
        [name, *_] = sorted(named ^ held) if named else [METADATA]
        raise Refusal(f"{where}: {METADATA} and the folders disagree about {name!r}; convert the checkpoint again")
    return {name: _shape(read_json(path / name / HEADER, f"{where}/{name}/{HEADER}"), where, name) for name in held}


def load_params(path: Path) -> dict[str, np.ndarray]:
    """Dotted name -> array of the checkpoint at ``path``, in the stored dtype.

    Raises:
      Refusal: Orbax cannot read it.
    """

    def restore():
        registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, _Together()))
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
            return checkpointer.restore(path.resolve())

    def refusal(error: Exception) -> Refusal:
        return Refusal(f"{path}: cannot be restored ({reason_of(error)[:MAX_REASON]}); convert the checkpoint again")

    return dict(_flatten(quietly(restore, refusal)))


def quietly(function: Callable[[], T], refusal: Callable[[Exception], Exception]) -> T:
    """What ``function`` returns; what Orbax, TensorStore and asyncio log meanwhile is held back.

    Whatever goes wrong is told once, by the exception that ``refusal`` makes from theirs, which are of many kinds, or by
    theirs when it returns that. A ``Refusal`` passes through.
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
        gc.collect()  # a task that failed as well speaks when it is collected
    raise failure


def _named(metadata: Any) -> set[str]:
    """The arrays that Orbax would read: a joined path of keys each, which is the name of a folder."""
    try:
        return {".".join(part["key"] for part in leaf["key_metadata"]) for leaf in metadata["tree_metadata"].values()}
    except (AttributeError, IndexError, KeyError, TypeError):
        return set()


def _shape(header: Any, where: str, name: str) -> tuple[int, ...]:
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


def _flatten(tree: dict) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield ".".join(str(part.key) for part in path), np.asarray(leaf)


@contextlib.contextmanager
def quiet(names: Sequence[str] = ("absl",), level: int = logging.ERROR):
    """Hold back what loggers say below ``level``: Orbax logs every save, and features that are off here on purpose."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)
