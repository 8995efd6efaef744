"""Costs of rounds: a table of seconds by batch size, number of drafts, and tokens that the target reads.

The engine measures it, or ``benchmarks/rounds/efficiency.py`` does.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from jspec._validation import is_int, is_number, require
from jspec.config import TreeShape

# K: rounds of chains of K drafts, all of them verified. (K, R): the target reads R tokens of all rows together. Or rounds
# of trees of a shape.
RoundShape = int | tuple[int, int] | TreeShape


def drafts_of(shape: RoundShape) -> int:
    """K of a round shape: the most drafts that a row may accept."""
    if isinstance(shape, TreeShape):
        return shape.depth
    return shape[0] if isinstance(shape, tuple) else shape


def budget_of(shape: RoundShape) -> int | None:
    """R of a round shape; None if every draft is verified."""
    return shape[1] if isinstance(shape, tuple) else None


def round_shapes(
    draft_lengths: Iterable[int], budgets: Callable[[int, int], Iterable[int | None]], rows: int
) -> list[RoundShape]:
    """Every round shape of chains of so many rows, in ascending order of K.

    Args:
      draft_lengths: every K.
      budgets: (rows, K) -> verification budgets, in tokens that the target reads in a round; None among them is all.
      rows: B.
    """
    return [K if R is None else (K, R) for K in sorted(draft_lengths) for R in budgets(rows, K)]


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds per decode round of one target with one drafter on one device.

    As JSON it is ``{"device": str, "method": str, "rounds": {"<batch>": {"<K>": seconds, "<K>/<R>": seconds}}}``, with
    ``"<nodes>,<depth>,<branch>"`` in the place of K for trees; other keys are ignored.

    Args:
      device: the ``device_kind`` that JAX gives the device.
      method: how drafts are made, the name of an entry in ``jspec.registry``.
      rounds: batch size -> K, the drafts of a round, 0 for plain decoding -> seconds per round. Where the target reads R
        tokens of all rows together, and not every draft, (K, R) takes the place of K, and for trees their ``TreeShape``.

    Example::

        costs = jspec.CostTable("NVIDIA H200", "eagle3", {1: {0: 0.0040, 4: 0.0052}})  # one row, K = 0 and K = 4
        llm = jspec.load("path/to/target", draft="path/to/eagle3", num_draft_tokens="auto", costs=costs)
    """

    device: str
    method: str
    rounds: Mapping[int, Mapping[RoundShape, float]]

    def __post_init__(self):
        require(isinstance(self.device, str), "device", self.device, "the name of a device")
        require(isinstance(self.method, str), "method", self.method, "the name of a drafting method")
        ok = isinstance(self.rounds, Mapping) and len(self.rounds) > 0
        require(ok, "rounds", self.rounds, "seconds by batch, then by K")
        for batch, by_drafts in self.rounds.items():
            require(is_int(batch) and batch >= 1, "rounds", batch, "batch sizes of at least 1")
            ok = isinstance(by_drafts, Mapping) and len(by_drafts) > 0
            require(ok, f"rounds[{batch}]", by_drafts, "seconds by K")
            for shape, seconds in by_drafts.items():
                ok = not isinstance(shape, tuple) or len(shape) == 2
                require(ok, f"rounds[{batch}]", shape, "K, (K, R), or a TreeShape")
                K, R = drafts_of(shape), budget_of(shape)
                require(is_int(K) and K >= 0, f"rounds[{batch}]", shape, "numbers of drafts, 0 or more")
                ok = R is None or (is_int(R) and K > 0 and batch <= R < batch * (K + 1))
                require(ok, f"rounds[{batch}]", shape, "R of (K, R) between the batch and batch x (K + 1), for K > 0")
                ok = is_number(seconds) and seconds > 0
                require(ok, f"rounds[{batch}][{shape}]", seconds, "seconds, a positive number")
            ok = any(is_int(shape) for shape in by_drafts)
            require(ok, f"rounds[{batch}]", by_drafts, "seconds of some K without an R")

    @staticmethod
    def read(path: str | pathlib.Path) -> "CostTable":
        """Read the table that a JSON file holds.

        Raises:
          ValueError: the file is no such table.
        """
        file = pathlib.Path(path)
        require(file.is_file(), "costs", str(path), "the path of a JSON file of round times, or a CostTable")
        try:
            table = json.loads(file.read_text())
            rounds = {
                int(batch): {_shape(key): s for key, s in shapes.items()} for batch, shapes in table["rounds"].items()
            }
            return CostTable(table["device"], table["method"], rounds)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            shape = '{"device": str, "method": str, "rounds": {"<batch>": {"<K>": seconds}}}'
            raise ValueError(f"costs={str(path)!r}: expected {shape}; {type(error).__name__}: {error}") from error

    def write(self, path: str | pathlib.Path):
        """Write the table as the JSON that ``read`` reads."""
        pathlib.Path(path).write_text(self.as_json())

    def as_json(self) -> str:
        """The table as JSON text."""
        rounds = {batch: {_key(shape): s for shape, s in shapes.items()} for batch, shapes in self.rounds.items()}
        return json.dumps({"device": self.device, "method": self.method, "rounds": rounds}, indent=2) + "\n"

    def seconds(self, batch: int, shapes: Iterable[RoundShape]) -> dict[RoundShape, float]:
        """Round shape -> seconds per round of ``batch`` rows, interpolated linearly between measurements.

        Args:
          batch: rows.
          shapes: the round shapes.

        Raises:
          ValueError: ``batch``, a K or an R lies outside of the measurements, or they have no such trees.
        """
        sizes = sorted(self.rounds)
        if not sizes[0] <= batch <= sizes[-1]:
            raise ValueError(
                f"costs has batches {sizes[0]}..{sizes[-1]}: expected max_batch={batch} among them; measure that batch, or "
                "leave costs out to let the engine measure"
            )

        def at(size: int, shape: RoundShape) -> float:
            if isinstance(shape, TreeShape):
                return self._of_trees(size, shape)
            return self._at(size, shape) if isinstance(shape, int) else self._under(size, shape[0], shape[1] / batch)

        near = [size for size in sizes if size == batch] or [
            max(size for size in sizes if size < batch),
            min(size for size in sizes if size > batch),
        ]
        return {shape: float(np.interp(batch, near, [at(size, shape) for size in near])) for shape in shapes}

    def _at(self, batch: int, K: int) -> float:
        by_drafts = {shape: seconds for shape, seconds in self.rounds[batch].items() if isinstance(shape, int)}
        measured = sorted(by_drafts)
        if not measured[0] <= K <= measured[-1]:
            raise ValueError(
                f"costs has {measured[0]}..{measured[-1]} drafts for batch {batch}: expected {K} among them; measure it, "
                "lower max_draft_tokens, or leave costs out to let the engine measure"
            )
        return float(np.interp(K, measured, [by_drafts[k] for k in measured]))

    def _of_trees(self, batch: int, tree: TreeShape) -> float:
        if tree not in self.rounds[batch]:
            raise ValueError(
                f"costs has no rounds of batch {batch} with {tree}: measure them, leave tree='auto' out, or leave costs out "
                "to let the engine measure"
            )
        return self.rounds[batch][tree]

    def _under(self, batch: int, K: int, tokens: float) -> float:
        """Seconds of rounds of K drafts in which the target reads so many tokens for each row on average."""
        shapes = self.rounds[batch].items()
        by_tokens = {
            shape[1] / batch: seconds for shape, seconds in shapes if isinstance(shape, tuple) and shape[0] == K
        }
        if not by_tokens or min(by_tokens) > tokens:
            raise ValueError(
                f"costs has no rounds of batch {batch} and {K} drafts of which the target reads {tokens:g} tokens for each "
                "request or fewer: measure them, leave verify_budget out, or leave costs out to let the engine measure"
            )
        by_tokens[K + 1] = self._at(batch, K)
        measured = sorted(by_tokens)
        return float(np.interp(tokens, measured, [by_tokens[count] for count in measured]))


def _key(shape: RoundShape) -> str | int:
    """A round shape as a key of JSON."""
    if isinstance(shape, TreeShape):
        return ",".join(map(str, dataclasses.astuple(shape)))
    return "/".join(map(str, shape)) if isinstance(shape, tuple) else shape


def _shape(key: str) -> RoundShape:
    if "," in key:
        return TreeShape(*map(int, key.split(",")))
    K, _, R = key.partition("/")
    return (int(K), int(R)) if R else int(K)
