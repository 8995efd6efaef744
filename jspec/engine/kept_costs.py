"""Costs of rounds that an engine has measured, kept on disk beside its compiled programs for the next start."""

import contextlib
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence

import jax

from jspec.engine.costs import CostTable

Seconds = Mapping[int, Mapping[int, float]]  # rows of a decode program -> K -> seconds per round


def kept_or_measured(
    what: str, method: str, buckets: Sequence[int], lengths: Sequence[int], measure: Callable[[], Seconds]
) -> Seconds:
    """The seconds that an earlier start has kept, or else those that ``measure`` returns, which are then kept.

    They are kept in the folder of JAX's compilation cache, and not at all where that is off or remote. A file that is
    damaged, or lacks something, is measured again and replaced.

    Args:
      what: all that rounds and their costs depend on, but for the device and the versions of jax and its flags.
      method: how drafts are made, for whoever reads the file.
      buckets: the rows of each decode program.
      lengths: every K.
      measure: takes as long as some calls of each program.
    """
    path = _path(what)
    if path is None:
        return measure()
    with contextlib.suppress(ValueError, OSError):  # there is none, or none that can be used
        rounds = CostTable.read(path).rounds
        if all(K in rounds.get(bucket, {}) for bucket in buckets for K in lengths):
            return {bucket: {K: rounds[bucket][K] for K in lengths} for bucket in buckets}
    seconds = measure()
    with contextlib.suppress(OSError):  # a full disk costs the next start some seconds
        _replace(path, CostTable(jax.devices()[0].device_kind, method, seconds))
    return seconds


def _path(what: str) -> pathlib.Path | None:
    """The file for such rounds on this device; None if nothing is to be kept."""
    used, folder = (getattr(jax.config, name) for name in ("jax_enable_compilation_cache", "jax_compilation_cache_dir"))
    if not used or not folder or "://" in folder:
        return None
    device = jax.devices()[0]
    where = device.device_kind, device.client.platform_version, jax.__version__, os.environ.get("XLA_FLAGS", "")
    digest = hashlib.sha256(repr((where, what)).encode()).hexdigest()
    return pathlib.Path(folder) / f"jspec-costs-{digest[:32]}.json"


def _replace(path: pathlib.Path, table: CostTable):
    """Write a file that is there as a whole or not at all, whatever interrupts this."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        new = pathlib.Path(folder) / path.name
        table.write(new)
        new.replace(path)
