"""On-disk cache of measured costs of rounds."""

import contextlib
from collections.abc import Callable, Mapping, Sequence

import jax

from jspec.engine.adaptive.cost_table import CostTable, RoundShape
from jspec.engine.aot_cache.files import file_of, write_atomically

Seconds = Mapping[int, Mapping[RoundShape, float]]  # rows of a decode program -> round shape -> seconds per round


def cached_or_measured(
    key: object, method: str, shapes: Mapping[int, Sequence[RoundShape]], measure: Callable[[], Seconds]
) -> Seconds:
    """Seconds per round from the cache, or else from ``measure()``, which are then cached.

    A file that is damaged or incomplete is replaced.

    Args:
      key: everything that the costs of rounds depend on, for ``file_of``.
      method: the drafting method, for readers of the file.
      shapes: rows of each decode program -> its round shapes.
      measure: takes as long as some calls of each program.
    """
    path = file_of("jspec-costs", key, ".json")
    if path is None:
        return measure()
    with contextlib.suppress(ValueError, OSError):  # it is missing or damaged
        rounds = CostTable.read(path).rounds
        if all(shape in rounds.get(rows, {}) for rows in shapes for shape in shapes[rows]):
            return {rows: {shape: rounds[rows][shape] for shape in shapes[rows]} for rows in shapes}
    seconds = measure()
    with contextlib.suppress(OSError):  # with a full disk the next process measures again
        write_atomically(path, CostTable(jax.devices()[0].device_kind, method, seconds).as_json().encode())
    return seconds
