"""On-disk cache of executables: a later process neither traces nor compiles them.

JAX's own cache finds an executable only once Python has traced the program, which takes longer than reading the file. Here
the name of the file follows from a fingerprint that is computed without tracing.
"""

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
from jspec.engine.aot_cache.files import file_of, write_atomically

_HIT = "/jax/compilation_cache/cache_hits"  # JAX's event
DAYS_KEPT = 30  # of an executable that is not read meanwhile: new code of jspec makes new files


class ExecutableCache:
    """Executables of engines with the same fingerprint.

    Args:
      fingerprint: an object whose ``repr`` has everything that tracing the programs depends on, but for the code of jspec
        and the shapes of arguments. None turns the cache off.
    """

    def __init__(self, fingerprint: object | None):
        self._fingerprint = fingerprint

    def read(self, path: pathlib.Path | None, name: str, args: tuple) -> jax.stages.Compiled | None:
        """The executable in a file; None if it is not cached. Several threads may read at the same time.

        A file that cannot be used is a ``CompilationCacheWarning``, and is deleted.
        """
        if path is None or not path.is_file():
            return None
        try:
            path.touch()
            return serialize_executable.deserialize_and_load(
                *pickle.loads(path.read_bytes()), execution_devices=_devices(args)
            )
        except Exception as error:  # of many types, as the file may hold any bytes
            warnings.warn(
                f"{path}: {type(error).__name__}: {error}; program {name!r} is compiled again",
                CompilationCacheWarning,
                stacklevel=2,
            )
            with contextlib.suppress(OSError):
                path.unlink()
            return None

    def write(self, path: pathlib.Path | None, name: str, compiled: jax.stages.Compiled):
        """Cache an executable; a failure is a ``CompilationCacheWarning``."""
        if path is None:
            return
        try:
            write_atomically(path, pickle.dumps(serialize_executable.serialize(compiled)))
            _delete_old(path.parent)
        except Exception as error:  # of serialization, which JAX calls experimental, or of the disk
            warnings.warn(
                f"{path}: {type(error).__name__}: {error}; the next process compiles program {name!r} again",
                CompilationCacheWarning,
                stacklevel=2,
            )

    def file(self, name: str, options: object, args: tuple) -> pathlib.Path | None:
        """The file of a program; None if the cache is off. The settings of JAX are those of this thread."""
        if self._fingerprint is None:
            return None
        leaves, structure = jax.tree.flatten(args)
        shapes = [(leaf.shape, str(leaf.dtype), str(getattr(leaf, "sharding", None))) for leaf in leaves]
        return file_of(f"jspec-{name}", (self._fingerprint, options, structure, shapes), ".program")


def compile_lowered(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, bool]:
    """The executable of a lowered program, from XLA or JAX's cache, and whether it may be cached here.

    On the CPU, an executable from JAX's cache may not: serialisation leaves its machine code out (as of jax 0.12), so that
    its first call by a later process would fail.
    """
    before = _here.num_hits
    program = lowered.compile()
    return program, jax.default_backend() != "cpu" or _here.num_hits == before


def _delete_old(folder: pathlib.Path):
    """Delete executables that were not read for ``DAYS_KEPT`` days."""
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
    """How many hits JAX's cache had for this thread."""

    num_hits = 0


_here = _Here()


def _note(event: str, **_):
    """JAX's event listener, called in the thread that compiles."""
    if event == _HIT:
        _here.num_hits += 1


# At import, because a module is executed once per process.
jax.monitoring.register_event_listener(_note)
