"""The definition of attention: a softmax over the slots that a causal mask, perhaps with a window, lets a token see."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def causal_mask(positions, slots, window: int | None) -> jax.Array:
    """Which slots each query token sees, bool ``[B, T, S]``.

    Args:
      positions: int32 ``[B, T]``, of query tokens.
      slots: int32 ``[S]``, positions of the keys.
      window: None, or W: a query token sees W slots, its own included.
    """
    query, key = positions[:, :, None], slots[None, None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def grouped_attention(q, k, v, mask) -> jax.Array:
    """Softmax attention in fp32: q ``[B, T, N, H]``, k and v ``[G, B, S, H]``, mask ``[B, T, S]`` -> ``[B, T, N,
    H]``."""
    B, T, N, H = q.shape
    G = k.shape[0]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    q = q.reshape(B, T, G, N // G, H)
    scores = jnp.einsum("btgrh,gbsh->gbrts", q, k, precision=precision, preferred_element_type=jnp.float32) * H**-0.5
    scores = jnp.where(mask[None, :, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("gbrts,gbsh->btgrh", weights, v, precision=precision).reshape(B, T, N, H)


class Rotation(NamedTuple):
    """Cosine and sine of the angles by which a position turns the pairs of a head, float32 ``[B, T, H / 2]`` each."""

    cos: jax.Array
    sin: jax.Array


def rotated(x, rotation: Rotation) -> jax.Array:
    """Heads ``[B, T, heads, H]``, each turned by the angles of its token, computed in fp32."""
    cos, sin = (angle[:, :, None] for angle in rotation)
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
