"""From the input projections of a gated delta net to its queries, keys, values, decays and betas."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DeltaHeads(NamedTuple):
    """The heads of a gated delta net; letters as ``jspec/pallas/delta_net/__init__.py`` has them.

    Attributes:
      keys, values: Nk and Nv, how many heads there are.
      key_size, value_size: Dk and Dv.
    """

    keys: int
    values: int
    key_size: int
    value_size: int

    @property
    def channels(self) -> int:
        """Cc, the numbers of a token that the convolution reads."""
        return 2 * self.keys * self.key_size + self.values * self.value_size


def split_heads(convolved, heads: DeltaHeads) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys ``[..., Nk, Dk]`` and values ``[..., Nv, Dv]`` of what the convolution made, ``[..., Cc]``."""
    width = heads.keys * heads.key_size
    q, k, v = jnp.split(convolved, [width, 2 * width], axis=-1)
    by_head = lambda x, size: x.reshape(*x.shape[:-1], -1, size)  # noqa: E731
    return by_head(q, heads.key_size), by_head(k, heads.key_size), by_head(v, heads.value_size)


def decay_and_beta(a, b, A_log, dt_bias) -> tuple[jax.Array, jax.Array]:
    """The logarithms g of the decays, at most 0, and the betas, both float32 ``[..., Nv]``.

    Args:
      a, b: ``[..., Nv]``, what decays are made of, and betas before the sigmoid.
      A_log, dt_bias: ``[Nv]``. Rounded to float16, ``A_log`` may be -inf; they are meant to be kept in float32.
    """
    a, b, A_log, dt_bias = (x.astype(jnp.float32) for x in (a, b, A_log, dt_bias))
    per_head = lambda x: x.reshape((1,) * (a.ndim - 1) + x.shape)  # noqa: E731
    return -jnp.exp(per_head(A_log)) * jax.nn.softplus(a + per_head(dt_bias)), jax.nn.sigmoid(b)
