"""Where a target is in shards: each device judges some of the rows alone, so that no device has the logits of all rows.

The output head of a shard makes its part of the vocabulary for every row. Every device then either gathers the parts of all
rows, and judges all of them, or it gets the parts of some rows, judges those, and tells the others what it decided. In both
ways a row is judged where all of its logits are, by the same functions of them.

With n devices the second way moves 1 / n of the logits, and looks at 1 / n of them, but it has to exchange the verdicts.
Rounds with few logits gather (``Shards.deal_from``).

Thresholds and masses could be found from parts of the vocabulary, too, and then hardly a logit would be moved. But a row
whose tokens are cut searches its cutoff in tens of steps, each of which would be an exchange."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jspec.config import Shards
from jspec.sampling.verify import Verdict

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class Dealing:
    """How B rows are dealt: device i of n has rows i B / n and those that follow. For the inside of a ``jax.shard_map``.

    Attributes:
      shards: of the target.
      rows: B / n, how many each device has.
    """

    shards: Shards
    rows: int

    @staticmethod
    def of(target: Any, hidden) -> "Dealing | None":
        """That of a round in which the target reads hidden states ``[B, T, D]``; None if every device judges all rows."""
        shards: Shards | None = getattr(target, "shards", None)
        B, T, _ = hidden.shape
        if shards is None or B % shards.count:
            return None
        logits = B * T * target.config.vocab_size * hidden.dtype.itemsize
        return Dealing(shards, B // shards.count) if logits >= shards.deal_from else None

    def logits(self, target: Any, hidden) -> jax.Array:
        """The logits of this device's rows, ``[B, T, D] -> [B / n, T, V]``."""
        return target.batch_sharded_logits(hidden)

    def mine(self, tree: Tree) -> Tree:
        """The rows that this device has, of arrays ``[B, ...]``."""
        first = jax.lax.axis_index(self.shards.axis) * self.rows
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, self.rows), tree)

    def everyone(self, x) -> jax.Array:
        """The rows of all devices, ``[B / n, ...] -> [B, ...]``."""
        return jax.lax.all_gather(x, self.shards.axis, tiled=True)

    def verdicts(self, verdict: Verdict) -> Verdict:
        """Those of all devices, in one exchange."""
        accepted, token, ok = jnp.moveaxis(self.everyone(jnp.stack(verdict, axis=-1)), -1, 0)
        return Verdict(accepted, token, ok > 0)
