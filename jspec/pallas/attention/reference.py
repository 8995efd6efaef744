"""The definition of attention: a softmax over the slots that a causal mask, perhaps with a window, lets a token see."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas.attention.fp8 import KVScales, decode
from jspec.pallas.attention.spec import AttentionSpec, TreeMask, sees_in_tree
from jspec.pallas.sums import add, row_max, row_sum, rows_product


def causal_mask(positions, slots, window: int | None, tree: TreeMask | None = None) -> jax.Array:
    """Which slots each query token sees, bool ``[B, T, S]``.

    Args:
      positions: int32 ``[B, T]``, of query tokens.
      slots: int32 ``[S]``, positions of the keys.
      window: None, or W: a query token sees W slots, its own included.
      tree: None if the query tokens are a chain.
    """
    query, key = positions[:, :, None], slots[None, None, :]
    seen = key <= query
    if tree is not None:
        words = jnp.moveaxis(tree.ancestors, -1, 0)[..., None]
        seen &= sees_in_tree(key - tree.root[:, None, None], words)
        query = tree.positions[:, :, None]
    return seen if window is None else seen & (key > query - window)


def grouped_attention(q, k, v, mask, spec: AttentionSpec, scales: KVScales | None = None) -> jax.Array:
    """Softmax attention in fp32: q ``[B, T, N, H]``, k ``[G, B, S, H]``, v ``[G, B, S, Hv]``, mask ``[B, T, S]`` ->
    ``[B, T, N, Hv]``. The mask has the window. Hv differs from H in multi-head latent attention only.

    With ``scales``, keys and values are bytes (``jspec.pallas.attention.fp8``), and the scales are ``[G]`` or ``[G, B,
    S]``. Scales of values in tokens multiply the weights before these are rounded."""
    B, T, N, H = q.shape
    G = k.shape[0]
    key_scale = value_scale = None
    if scales is not None:
        k, v = decode(k, q.dtype), decode(v, q.dtype)
        key_scale, value_scale = (scale.reshape(*(*scale.shape, 1)[:2], 1, -1) for scale in scales)
    R = N // G
    q = jnp.transpose(q.reshape(B, T, G, R, H), (2, 0, 1, 3, 4)).reshape(G, B, T * R, H)
    scored = spec.scores(rows_product(q, k, -1), H, key_scale=key_scale).reshape(G, B, T, R, -1)
    scored = jnp.where(mask[None, :, :, None], scored, -jnp.inf)
    peak = row_max(scored)
    sinks = None if spec.sinks is None else spec.sinks.astype(jnp.float32).reshape(G, 1, 1, R, 1)
    peak = peak if sinks is None else jax.lax.stop_gradient(jnp.maximum(peak, sinks))
    weights = jnp.exp(scored - peak).reshape(G, B, T * R, -1)
    total = row_sum(weights)
    total = total if sinks is None else total + jnp.exp(sinks - peak).reshape(total.shape)
    if value_scale is not None and scales is not None and scales.of_tokens:
        weights = weights * value_scale
    sums = rows_product(weights.astype(v.dtype), v, -2) / total
    if scales is not None and not scales.of_tokens:
        sums = sums * scales.v[:, None, None, None]
    sums = jnp.transpose(sums.astype(v.dtype).reshape(G, B, T, R, -1), (1, 2, 0, 3, 4))
    return sums.reshape(B, T, N, -1)


class Rotation(NamedTuple):
    """Cosine and sine of the angles by which a position rotates the pairs of a head, float32 ``[B, T, r / 2]`` each.

    The first r numbers of a head are rotated, in pairs of one from their first half and one from their second. r is H,
    or less for a partial rotary embedding."""

    cos: jax.Array
    sin: jax.Array


def apply_rope(x, rotation: Rotation | None) -> jax.Array:
    """Heads ``[B, T, heads, H]``, each rotated by the angles of its token, computed in fp32; unchanged if ``rotation``
    is None."""
    if rotation is None:
        return x
    half, H = rotation.cos.shape[-1], x.shape[-1]
    cos, sin = (angle[:, :, None] for angle in rotation)
    rotary, rest = (x, None) if 2 * half == H else jnp.split(x, [2 * half], axis=-1)
    x1, x2 = jnp.split(rotary.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([add(x1 * cos, -(x2 * sin)), add(x2 * cos, x1 * sin)], axis=-1).astype(x.dtype)
    return rotated if rest is None else jnp.concatenate([rotated, rest], axis=-1)
