"""Costs of rounds that an engine has measured, kept for the next start."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import jax

from jspec.engine.adaptive.cost_table import CostTable, Way
from jspec.engine.aot_cache.files import file_of, write_whole

Seconds = Mapping[int, Mapping[Way, float]]  # rows of a decode program -> way of making rounds -> seconds per round


def kept_or_measured(
    what: object, method: str, ways: Mapping[int, Sequence[Way]], measure: Callable[[], Seconds]
) -> Seconds:
    """The seconds that an earlier start has kept, or else those that ``measure`` returns, which are then kept.

    A file that is damaged, or lacks something, is measured again and replaced.

    Args:
      what: what rounds depend on, for ``file_of``.
      method: how drafts are made, for whoever reads the file.
      ways: for the rows of each decode program, how rounds may be made.
      measure: takes as long as some calls of each program.
    """
    path = file_of("jspec-costs", what, ".json")
    if path is None:
        return measure()
    with contextlib.suppress(ValueError, OSError):  # there is none, or none that can be used
        rounds = CostTable.read(path).rounds
        if all(way in rounds.get(bucket, {}) for bucket, some in ways.items() for way in some):
            return {bucket: {way: rounds[bucket][way] for way in some} for bucket, some in ways.items()}
    seconds = measure()
    with contextlib.suppress(OSError):  # a full disk costs the next start some seconds
        write_whole(path, CostTable(jax.devices()[0].device_kind, method, seconds).as_json().encode())
    return seconds
