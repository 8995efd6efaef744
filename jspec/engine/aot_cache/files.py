"""On-disk cache shared by successive processes, in the folder of JAX's compilation cache.

The name of a file has a digest of everything that its contents depend on, so outdated files are never found.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import platform
import tempfile
from importlib.metadata import version

import jax

ROOT = pathlib.Path(__file__).parents[2]
_CACHE_SETTING = "cache"  # settings of JAX with this in their names do not change executables


def file_of(kind: str, key: object, suffix: str) -> pathlib.Path | None:
    """The file of a cache key, which also covers everything in ``_environment``.

    Args:
      kind: prefix of the file's name.
      key: an object whose ``repr`` identifies the contents.
      suffix: of the file's name.

    Returns:
      its path, whether it exists or not. None if JAX's compilation cache is off, or is not on this machine: then
      nothing is cached.
    """
    enabled, folder = (
        getattr(jax.config, name) for name in ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
    )
    if not enabled or not folder or "://" in folder:
        return None
    digest = hashlib.sha256(repr((_environment(), key)).encode()).hexdigest()
    return pathlib.Path(folder) / f"{kind}-{digest[:40]}{suffix}"


def write_atomically(path: pathlib.Path, data: bytes):
    """Write a file that exists completely or not at all, even if this is interrupted.

    Raises:
      OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", dir=path.parent) as folder:
        new = pathlib.Path(folder) / path.name
        new.write_bytes(data)
        new.replace(path)


def _environment() -> tuple:
    """Everything that all executables and costs depend on.

    That is jspec's own code, the versions of libraries and of the driver, the device, and the settings of JAX and XLA.
    """
    device = jax.devices()[0]
    values = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    settings = sorted((name, str(value)) for name, value in values.items() if _CACHE_SETTING not in name)
    libraries = *map(version, ("jax", "jaxlib", "flax")), device.client.platform_version
    machine = device.device_kind, len(jax.devices()), _instructions() if device.platform == "cpu" else ""
    return _code(), libraries, machine, settings, os.environ.get("XLA_FLAGS", "")


@functools.cache
def _instructions() -> str:
    """The CPU's instruction sets: an executable with an instruction that the CPU lacks would end the process."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


@functools.cache
def _code() -> str:
    """A digest of the source of jspec."""
    digest = hashlib.sha256()
    for file in sorted(ROOT.rglob("*.py")):
        digest.update(f"{file.relative_to(ROOT)}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
