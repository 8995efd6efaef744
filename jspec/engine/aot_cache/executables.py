"""Compiled programs kept on disk with all that is needed to call them, so that the next start neither traces nor compiles.

JAX's own cache finds what XLA made of a program, but only once Python has traced the program, which takes longer than
reading the file. Here the name of the file follows from what the program is made of, without tracing it."""

import contextlib
import pathlib
import pickle
import threading
import time
import warnings
from typing import Any

import jax
from jax.experimental import serialize_executable

from jspec.compilation_cache import CompilationCacheWarning
from jspec.engine.aot_cache.files import file_of, write_whole

_FOUND = "/jax/compilation_cache/cache_hits"  # JAX's event
DAYS_KEPT = 30  # of a program that no start has needed meanwhile: new code of jspec makes new files


class KeptPrograms:
    """The programs of engines that are made of the same things.

    Args:
      made_of: anything whose ``repr`` says all that tracing the programs depends on, but for the code of jspec and the
        shapes of arguments. None keeps nothing.
    """

    def __init__(self, made_of: object | None):
        self._made_of = made_of

    def read(self, path: pathlib.Path | None, name: str, args: tuple) -> jax.stages.Compiled | None:
        """The program of this name in such a file, for such arguments; None if it is not kept. Several threads may read at a
        time.

        A file that cannot be used is a ``CompilationCacheWarning``, and is deleted.
        """
        if path is None or not path.is_file():
            return None
        try:
            path.touch()
            return serialize_executable.deserialize_and_load(
                *pickle.loads(path.read_bytes()), execution_devices=_devices(args)
            )
        except Exception as error:  # of many types, as the file may hold anything
            warnings.warn(
                f"{path}: {type(error).__name__}: {error}; program {name!r} is compiled again",
                CompilationCacheWarning,
                stacklevel=2,
            )
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def write(self, path: pathlib.Path | None, name: str, compiled: jax.stages.Compiled):
        """Keep a program for the next start; one that cannot be kept is a ``CompilationCacheWarning``."""
        if path is None:
            return
        try:
            write_whole(path, pickle.dumps(serialize_executable.serialize(compiled)))
            _delete_old(path.parent)
        except Exception as error:  # of serialization, which JAX calls experimental, or of the disk
            warnings.warn(
                f"{path}: {type(error).__name__}: {error}; the next start compiles program {name!r} again",
                CompilationCacheWarning,
                stacklevel=2,
            )

    def file(self, name: str, options: object, args: tuple) -> pathlib.Path | None:
        """Where such a program is kept, if it is; None if nothing is kept. The settings of JAX are those of this thread."""
        if self._made_of is None:
            return None
        leaves, structure = jax.tree.flatten(args)
        shapes = [(leaf.shape, str(leaf.dtype), str(getattr(leaf, "sharding", None))) for leaf in leaves]
        return file_of(f"jspec-{name}", (self._made_of, options, structure, shapes), ".program")


def compile_lowered(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """What XLA makes of a traced program, or JAX's cache holds, and whether it may be kept.

    On the CPU, what comes from JAX's cache may not: when it is serialized, its machine code is left out (as of jax 0.12), so
    that its first call by a later start would fail.
    """
    before = _here.num_found
    program = lowered.compile()
    return program, jax.default_backend() != "cpu" or _here.num_found == before


def _delete_old(folder: pathlib.Path):
    """Delete the programs that no start has needed for long."""
    for file in folder.glob("jspec-*.program"):
        with contextlib.suppress(FileNotFoundError):  # another process does the same
            if file.stat().st_mtime < time.time() - DAYS_KEPT * 24 * 3600:
                file.unlink()


def _devices(args: tuple) -> list[Any]:
    """The devices of a program with these arguments."""
    for leaf in jax.tree.leaves(args):
        if getattr(leaf, "sharding", None) is not None:
            return sorted(leaf.sharding.device_set, key=lambda device: device.id)
    return jax.devices()[:1]


class _Here(threading.local):
    """How many programs JAX's cache has had for this thread."""

    num_found = 0


_here = _Here()


def _note(event: str, **_):
    """JAX calls this in the thread that compiles."""
    if event == _FOUND:
        _here.num_found += 1


# Here, and not where it is needed, because a module is executed once per process.
jax.monitoring.register_event_listener(_note)
