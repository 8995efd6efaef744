"""The definition of attention: a softmax over the slots that a causal mask, perhaps with a window, lets a token see."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas.attention.fp8 import KVScales, decode
from jspec.pallas.attention.spec import AttentionSpec


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
        key_scale, value_scale = (scale.reshape(*(*scale.shape, 1, 1)[:2], 1, 1, -1) for scale in scales)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    q = q.reshape(B, T, G, N // G, H)
    products = jnp.einsum("btgrh,gbsh->gbrts", q, k, precision=precision, preferred_element_type=jnp.float32)
    scored = spec.scores(products, H, key_scale=key_scale)
    scored = jnp.where(mask[None, :, None], scored, -jnp.inf)
    if spec.sinks is None:
        weights = jax.nn.softmax(scored, axis=-1)
    else:
        weights = _softmax_with_sinks(scored, spec.sinks.astype(jnp.float32).reshape(G, 1, N // G, 1, 1))
    if value_scale is None or scales is None:
        return _weighted(weights, v, precision).reshape(B, T, N, -1)
    if scales.of_tokens:
        return _weighted(weights * value_scale, v, precision).reshape(B, T, N, -1)
    sums = _weighted(weights, v, precision, jnp.float32) * scales.v[None, None, :, None, None]
    return sums.astype(v.dtype).reshape(B, T, N, -1)


def _weighted(weights, v, precision, dtype=None) -> jax.Array:
    """Sums of values ``[B, T, G, R, Hv]`` in ``dtype``, that of the values by default; weights ``[G, B, R, T, S]`` are
    rounded to the dtype of the values."""
    weights = weights.astype(v.dtype)
    return jnp.einsum("gbrts,gbsh->btgrh", weights, v, precision=precision, preferred_element_type=dtype)


def _softmax_with_sinks(scored, sinks) -> jax.Array:
    """The softmax over the last axis of ``scored`` and one more score, ``sinks`` ``[..., 1]``, whose weight is left
    out."""
    peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(scored, axis=-1, keepdims=True), sinks))
    weights = jnp.exp(scored - peak)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - peak))


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
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
    return rotated if rest is None else jnp.concatenate([rotated, rest], axis=-1)
