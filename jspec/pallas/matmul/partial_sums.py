"""Results in parts: those whose sum is left to the norm that follows, and those of shards."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PartialSums:
    """Summands of a result ``[..., D]`` that is added to the residual stream, where the norm that follows adds them up in
    its own launch (``jspec.pallas.norm.rms_norm.add_norm``).

    Attributes:
      summands: ``[..., Y, D]``. Y counts the splits of a product with split-K, or the experts of a token.
    """

    summands: jax.Array

    def total(self, dtype) -> jax.Array:
        """Their sum, computed in float32 and rounded to ``dtype``."""
        return jnp.sum(self.summands.astype(jnp.float32), axis=-2).astype(dtype)


def reduce_partial_sums(y, dtype) -> jax.Array:
    """The ``total`` of ``PartialSums`` in ``dtype``; any other y unchanged."""
    return y.total(dtype) if isinstance(y, PartialSums) else y


def all_reduce(x, reduce_axis: str | None) -> jax.Array:
    """The sum of x over the shards along a mesh axis, the same bits in each; x itself if ``reduce_axis`` is None."""
    return x if reduce_axis is None else jax.lax.psum(x, reduce_axis)
