"""What rounds cost: a table of seconds by batch size and number of drafts.

The engine measures it, or ``benchmarks/efficiency.py`` does.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping

import numpy as np

from jspec._arguments import is_int, is_number, require


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds per decode round of one target with one drafter on one device.

    As JSON it is ``{"device": str, "method": str, "rounds": {"<batch>": {"<K>": seconds}}}``; other keys are ignored.

    Args:
      device: the ``device_kind`` that JAX gives the device.
      method: how drafts are made, the name of an entry in ``jspec.registry``.
      rounds: batch size -> K, the drafts of a round, 0 for plain decoding -> seconds per round.
    """

    device: str
    method: str
    rounds: Mapping[int, Mapping[int, float]]

    def __post_init__(self):
        require(isinstance(self.device, str), "device", self.device, "the name of a device")
        require(isinstance(self.method, str), "method", self.method, "the name of a drafting method")
        require(
            isinstance(self.rounds, Mapping) and len(self.rounds) > 0,
            "rounds",
            self.rounds,
            "seconds by batch, then by K",
        )
        for batch, by_drafts in self.rounds.items():
            require(is_int(batch) and batch >= 1, "rounds", batch, "batch sizes of at least 1")
            ok = isinstance(by_drafts, Mapping) and len(by_drafts) > 0
            require(ok, f"rounds[{batch}]", by_drafts, "seconds by K")
            for K, seconds in by_drafts.items():
                require(is_int(K) and K >= 0, f"rounds[{batch}]", K, "numbers of drafts, 0 or more")
                ok = is_number(seconds) and seconds > 0
                require(ok, f"rounds[{batch}][{K}]", seconds, "seconds, a positive number")

    @staticmethod
    def read(path: str | pathlib.Path) -> "CostTable":
        """Read the table that a JSON file holds.

        Raises:
          ValueError: the file is no such table.
        """
        file = pathlib.Path(path)
        require(file.is_file(), "costs", str(path), "the path of a JSON file of round times, or a CostTable")
        try:
            found = json.loads(file.read_text())
            rounds = {
                int(batch): {int(K): s for K, s in by_drafts.items()} for batch, by_drafts in found["rounds"].items()
            }
            return CostTable(found["device"], found["method"], rounds)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            shape = '{"device": str, "method": str, "rounds": {"<batch>": {"<K>": seconds}}}'
            raise ValueError(f"costs={str(path)!r}: expected {shape}; {type(error).__name__}: {error}") from error

    def write(self, path: str | pathlib.Path):
        """Write the table as the JSON that ``read`` reads."""
        pathlib.Path(path).write_text(self.as_json())

    def as_json(self) -> str:
        """What ``write`` writes."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    def seconds(self, batch: int, drafts: Iterable[int]) -> dict[int, float]:
        """K -> seconds per round of ``batch`` rows, interpolated linearly between what was measured.

        Raises:
          ValueError: ``batch`` or a K lies outside of what was measured.
        """
        sizes = sorted(self.rounds)
        if not sizes[0] <= batch <= sizes[-1]:
            raise ValueError(
                f"costs has batches {sizes[0]}..{sizes[-1]}: expected max_batch={batch} among them; measure that batch, or "
                "leave costs out to let the engine measure"
            )
        return {K: float(np.interp(batch, sizes, [self._at(size, K) for size in sizes])) for K in drafts}

    def _at(self, batch: int, K: int) -> float:
        by_drafts = self.rounds[batch]
        measured = sorted(by_drafts)
        if not measured[0] <= K <= measured[-1]:
            raise ValueError(
                f"costs has {measured[0]}..{measured[-1]} drafts for batch {batch}: expected {K} among them; measure it, "
                "lower max_draft_tokens, or leave costs out to let the engine measure"
            )
        return float(np.interp(K, measured, [by_drafts[k] for k in measured]))
