"""Sets up JAX's persistent compilation cache, which shares compiled programs between processes, in a folder of jspec's."""

import os
import tempfile
import warnings
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jspec._validation import require

# Names of JAX's settings; in capitals, of the environment variables that JAX reads when it is imported.
_USED = "jax_enable_compilation_cache"
_FOLDER = "jax_compilation_cache_dir"
_LEAST_TIME, _LEAST_TIME_OF_JAX = "jax_persistent_cache_min_compile_time_secs", 1.0  # seconds

_chosen: str | None = None  # the folder that this module has set last


class CompilationCacheWarning(RuntimeWarning):
    """Compiled programs are not cached on disk, because the folder cannot be used."""


def enable_compilation_cache(folder: str | Path | bool = True) -> Path | None:
    """Cache compiled programs on disk for later processes.

    This sets JAX's persistent compilation cache, which is global to the process: programs that are not jspec's are cached
    as well. It takes effect from the next compilation on, also in a process that has compiled something already.

    All programs are cached, however short their compilation was. JAX's own threshold of one second would leave out most
    of the programs of a process start, dozens that take a tenth of a second each. A threshold that the user has set
    is respected. (JAX's threshold for sizes, ``jax_persistent_cache_min_entry_size_bytes``, leaves out nothing.)

    Args:
      folder: True is ``$XDG_CACHE_HOME/jspec/xla``, by default ``~/.cache/jspec/xla``, unless the user has configured
        JAX's cache, by ``JAX_COMPILATION_CACHE_DIR`` or ``jax.config``; that configuration stands. A path overrides
        it. False changes nothing.

    Returns:
      the folder; None if nothing was changed, or, with a ``CompilationCacheWarning``, if the folder cannot be used.

    Raises:
      ValueError: folder is a remote address, or nothing that names a folder.
    """
    global _chosen
    named = isinstance(folder, bool) or (isinstance(folder, str | os.PathLike) and str(folder) != "")
    require(named and "\0" not in str(folder), "compilation_cache", folder, "True, False or the path of a local folder")
    if folder is False or not getattr(jax.config, _USED) or (folder is True and _configured()):
        return None
    try:
        path = _default_folder() if folder is True else _local(folder)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: write access there is code execution here
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        warnings.warn(
            f"compilation_cache={folder!r}: {error}. Compiled programs are not cached, and every process compiles them "
            "again; pass a folder that can be written, set XDG_CACHE_HOME, or pass False",
            CompilationCacheWarning,
            stacklevel=2,
        )
        return None
    if getattr(jax.config, _LEAST_TIME) == _LEAST_TIME_OF_JAX and _LEAST_TIME.upper() not in os.environ:
        jax.config.update(_LEAST_TIME, 0.0)
    if getattr(jax.config, _FOLDER) != str(path):
        jax.config.update(_FOLDER, str(path))
        compilation_cache.reset_cache()  # JAX would go on using the folder that it has opened
    _chosen = str(path)
    return path


def _configured() -> bool:
    """Whether the user has configured JAX's cache folder, or switched it off by an empty name."""
    configured = getattr(jax.config, _FOLDER)
    if configured is None:
        return _FOLDER.upper() in os.environ  # set after JAX was imported, so that JAX does not know
    return configured != _chosen


def _default_folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():  # unset, or to be ignored by the XDG Base Directory Specification
        base = Path.home() / ".cache"
    return base / "jspec" / "xla"


def _local(folder: str | Path) -> Path:
    if "://" in str(folder):
        raise ValueError(
            f"compilation_cache={folder!r}: expected a local folder; for another one set {_FOLDER.upper()} before "
            "Python starts, and leave compilation_cache=True"
        )
    return Path(folder).expanduser().absolute()
