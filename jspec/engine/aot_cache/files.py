"""Files that a start leaves to the next one, in the folder of JAX's compilation cache.

The name of a file has a digest of all that its contents depend on, so that what is out of date is never found."""

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
_OF_THE_CACHE = "cache"  # settings of JAX with this in their names say where things are kept, and nothing of what


def file_of(kind: str, what: object, suffix: str) -> pathlib.Path | None:
    """The file for something that depends on ``what``, and on everything that ``_surroundings`` lists.

    Args:
      kind: what the file's name begins with.
      what: anything whose ``repr`` says all there is to say.
      suffix: what the file's name ends with.

    Returns:
      its path, whether it is there or not. None if JAX's compilation cache is off, or is not on this machine: then
      nothing is to be kept.
    """
    used, folder = (getattr(jax.config, name) for name in ("jax_enable_compilation_cache", "jax_compilation_cache_dir"))
    if not used or not folder or "://" in folder:
        return None
    digest = hashlib.sha256(repr((_surroundings(), what)).encode()).hexdigest()
    return pathlib.Path(folder) / f"{kind}-{digest[:40]}{suffix}"


def write_whole(path: pathlib.Path, data: bytes):
    """Write a file that is there as a whole or not at all, whatever interrupts this.

    Raises:
      OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=f"{path.stem}-", dir=path.parent) as folder:
        new = pathlib.Path(folder) / path.name
        new.write_bytes(data)
        new.replace(path)


def _surroundings() -> tuple:
    """What everything compiled or measured depends on: jspec's own code, the versions of libraries and of the driver, the
    device, and the settings of JAX and XLA."""
    device = jax.devices()[0]
    values = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    settings = sorted((name, str(value)) for name, value in values.items() if _OF_THE_CACHE not in name)
    libraries = *map(version, ("jax", "jaxlib", "flax")), device.client.platform_version
    machine = device.device_kind, len(jax.devices()), _instructions() if device.platform == "cpu" else ""
    return _code(), libraries, machine, settings, os.environ.get("XLA_FLAGS", "")


@functools.cache
def _instructions() -> str:
    """What the CPU can do: a program that was compiled for one with more instructions would end the process."""
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
