"""Results in parts: those whose sum is left to the norm that follows, and those of shards."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jspec.pallas.matmul.reference import per_feature
from jspec.pallas.sums import add


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """Summands of a result ``[..., D]`` that is added to the residual stream, where the norm that follows adds them up in
    its own launch (``jspec.pallas.norm.rms_norm.add_norm``, or over GPUs ``jspec.pallas.collectives``).

    Attributes:
      summands: ``[..., Y, D]``. Y counts the splits of a product with split-K, or the experts of a token.
      bias: ``[D]``, added to their sum; None for nothing.
      reduce_axis: the mesh axis over which the sums of all shards are to be added up; None if all summands are here.
    """

    summands: jax.Array
    bias: jax.Array | None = None
    reduce_axis: str | None = dataclasses.field(default=None, metadata={"static": True})

    def total(self, dtype) -> jax.Array:
        """Their sum, computed in float32 and rounded to ``dtype``; over shards as ``all_reduce`` has it."""
        own = self.of_shard(dtype)
        total = all_reduce(own, self.reduce_axis)
        return total if self.bias is None else add(total, per_feature(self.bias.astype(dtype), total))

    def of_shard(self, dtype) -> jax.Array:
        """The sum of the summands that are here, without the bias; rounded to ``dtype``."""
        if self.summands.shape[-2] == 1:
            return self.summands[..., 0, :].astype(dtype)
        return functools.reduce(add, jnp.unstack(self.summands.astype(jnp.float32), axis=-2)).astype(dtype)


def in_splits(product: Callable[[slice], jax.Array], inputs: int, split_inputs: int) -> PartialSums:
    """The partial sums of a product with split-K: ``product(cut)`` ``[..., D]`` of each ``split_inputs`` of its inputs; the
    last may have fewer."""
    cuts = (slice(begin, begin + split_inputs) for begin in range(0, inputs, split_inputs))
    return PartialSums(jnp.stack([product(cut) for cut in cuts], axis=-2))


def reduce_partial_sums(y, dtype) -> jax.Array:
    """The ``total`` of ``PartialSums`` in ``dtype``; any other y unchanged."""
    return y.total(dtype) if isinstance(y, PartialSums) else y


def all_reduce(x, reduce_axis: str | None) -> jax.Array:
    """The sum of x over the shards along a mesh axis, the same bits in each; x itself if ``reduce_axis`` is None."""
    return x if reduce_axis is None else jax.lax.psum(x, reduce_axis)
