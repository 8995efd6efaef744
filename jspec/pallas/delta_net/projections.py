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


class Projected(NamedTuple):
    """What the input projections make of each token.

    Attributes:
      qkv: ``[..., Cc]``, queries of all key heads, then keys, then values, not convolved.
      z: ``[..., Nv, Dv]``, the gate of the outputs.
      b: ``[..., Nv]``, betas before the sigmoid.
      a: ``[..., Nv]``, what decays are made of.
    """

    qkv: jax.Array
    z: jax.Array
    b: jax.Array
    a: jax.Array


def split_separate(qkv, z, b, a, heads: DeltaHeads) -> Projected:
    """``Projected`` of Qwen3.5, which has a projection for each of the four.

    Args:
      qkv: ``[..., Cc]``.
      z: ``[..., Nv Dv]``.
      b, a: ``[..., Nv]``.
    """
    return Projected(qkv, z.reshape(*z.shape[:-1], heads.values, heads.value_size), b, a)


def split_interleaved(qkvz, ba, heads: DeltaHeads) -> Projected:
    """``Projected`` of Qwen3-Next, whose two projections have the numbers of one key head after those of another.

    The output features of the weights are in this order, too: what this function does to activations it does as well
    to transposed weights ``[D, features]``, so that a loader may sort them once.

    Args:
      qkvz: ``[..., Nk (2 Dk + 2 Dv Nv/Nk)]``; of each key head its query, its key, and the values and then the gates of
        the value heads that read it.
      ba: ``[..., 2 Nv]``; of each key head the b and then the a of those value heads.
    """
    shared = heads.values // heads.keys
    Dk, width = heads.key_size, shared * heads.value_size
    by_head = lambda x: x.reshape(*x.shape[:-1], heads.keys, -1)  # noqa: E731
    q, k, v, z = jnp.split(by_head(qkvz), [Dk, 2 * Dk, 2 * Dk + width], axis=-1)
    b, a = jnp.split(by_head(ba), 2, axis=-1)
    flat = lambda x: x.reshape(*x.shape[:-2], -1)  # noqa: E731
    qkv = jnp.concatenate([flat(q), flat(k), flat(v)], axis=-1)
    return split_separate(qkv, flat(z), flat(b), flat(a), heads)


def split_heads(convolved, heads: DeltaHeads) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys ``[..., Nk, Dk]`` and values ``[..., Nv, Dv]`` of what the convolution made, ``[..., Cc]``."""
    width = heads.keys * heads.key_size
    q, k, v = jnp.split(convolved, [width, 2 * width], axis=-1)
    by_head = lambda x, size: x.reshape(*x.shape[:-1], -1, size)  # noqa: E731
    return by_head(q, heads.key_size), by_head(k, heads.key_size), by_head(v, heads.value_size)


def decay_and_beta(a, b, A_log, dt_bias) -> tuple[jax.Array, jax.Array]:
    """The logarithms g of the decays, at most 0, and the betas, both float32 ``[..., Nv]``.

    Args:
      a, b: ``[..., Nv]``, of ``Projected``.
      A_log, dt_bias: ``[Nv]``. Rounded to float16, ``A_log`` may be -inf; they are meant to be kept in float32.
    """
    a, b, A_log, dt_bias = (x.astype(jnp.float32) for x in (a, b, A_log, dt_bias))
    per_head = lambda x: x.reshape((1,) * (a.ndim - 1) + x.shape)  # noqa: E731
    return -jnp.exp(per_head(A_log)) * jax.nn.softplus(a + per_head(dt_bias)), jax.nn.sigmoid(b)
