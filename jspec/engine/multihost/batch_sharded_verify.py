"""Batch-sharded verification under tensor parallelism: each of n devices verifies B / n rows.

The output head of a shard computes its part of the vocabulary for every row. Then either every device gathers the logits of
all rows and verifies all of them, or it gathers those of B / n rows, verifies these, and shares the results. In both
cases a row is verified where all of its logits are, by the same functions of them.

With n devices the second way moves 1 / n of the logits, and reads 1 / n of them, but has to exchange the results.
Rounds with few logits gather (``Shards.batch_sharded_from``).

Cutoffs and masses could be found from parts of the vocabulary, too, with hardly a logit moved. But a row with top-k or
top-p searches its cutoff in tens of steps, each of which would be an exchange.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jspec.config import Shards
from jspec.pallas.collectives.peers import Peers
from jspec.sampling.verify import VerifyResult

Tree = TypeVar("Tree")


@dataclasses.dataclass(frozen=True)
class BatchSharding:
    """B rows in n blocks: device i has the B / n rows from i B / n on. For the inside of a ``jax.shard_map``.

    Attributes:
      shards: of the target.
      rows: B / n, how many each device has.
      peers: the target's other GPUs; None leaves exchanges to XLA.
    """

    shards: Shards
    rows: int
    peers: Peers | None = None

    @staticmethod
    def of(target: Any, hidden) -> "BatchSharding | None":
        """For a round with hidden states ``[B, T, D]`` of the target; None if every device verifies all rows."""
        shards: Shards | None = getattr(target, "shards", None)
        B, T, _ = hidden.shape
        if shards is None or B % shards.count:
            return None
        logits = B * T * target.config.vocab_size * hidden.dtype.itemsize
        if logits < shards.batch_sharded_from:
            return None
        return BatchSharding(shards, B // shards.count, getattr(target, "peers", None))

    def local_rows(self, tree: Tree) -> Tree:
        """This device's rows of arrays ``[B, ...]``."""
        first = jax.lax.axis_index(self.shards.axis) * self.rows
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, self.rows), tree)

    def all_rows(self, x) -> jax.Array:
        """The rows of all devices, ``[B / n, ...] -> [B, ...]``."""
        if self.peers is not None and self.peers.serve_parts(x.shape, x.dtype):
            return self.peers.all_gather(x).reshape(-1, *x.shape[1:])
        return jax.lax.all_gather(x, self.shards.axis, tiled=True)

    def gather_results(self, result: VerifyResult) -> VerifyResult:
        """The verification results of all devices, in one exchange."""
        accepted, token, ok = jnp.moveaxis(self.all_rows(jnp.stack(result, axis=-1)), -1, 0)
        return VerifyResult(accepted, token, ok > 0)
