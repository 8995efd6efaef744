"""The definition of attention: a softmax over the slots that a causal mask, perhaps with a window, lets a token see."""

import dataclasses
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scores:
    """How products of queries and keys become the scores of a softmax.

    Attributes:
      scale: the factor of a product; None is ``H ** -0.5``.
      softcap: c if the scaled product s becomes ``c tanh(s / c)`` (Gemma 2, 2024), or None.
      sinks: ``[N]``, or None. The sink of an attention head is one more score, neither scaled nor capped, in the softmax
        of each of its queries, like that of a key which every query sees and whose value is 0. The weights of the keys
        therefore add up to less than 1 (gpt-oss, 2025).
    """

    scale: float | None = dataclasses.field(default=None, metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: jax.Array | None = None

    def of(self, products, H: int, unit: float = 1.0):
        """The scores of products in fp32, as multiples of ``1 / unit``; kernels want them in bits, ``unit =
        log2(e)``."""
        scale = H**-0.5 if self.scale is None else self.scale
        if self.softcap is None:
            return products * (scale * unit)
        return jnp.tanh(products * (scale / self.softcap)) * (self.softcap * unit)


PLAIN = Scores()


def grouped_attention(q, k, v, mask, scores: Scores = PLAIN) -> jax.Array:
    """Softmax attention in fp32: q ``[B, T, N, H]``, k ``[G, B, S, H]``, v ``[G, B, S, Hv]``, mask ``[B, T, S]`` ->
    ``[B, T, N, Hv]``. Hv differs from H in multi-head latent attention only."""
    B, T, N, H = q.shape
    G = k.shape[0]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    q = q.reshape(B, T, G, N // G, H)
    products = jnp.einsum("btgrh,gbsh->gbrts", q, k, precision=precision, preferred_element_type=jnp.float32)
    scored = scores.of(products, H)
    scored = jnp.where(mask[None, :, None], scored, -jnp.inf)
    if scores.sinks is None:
        weights = jax.nn.softmax(scored, axis=-1)
    else:
        weights = _softmax_with_sinks(scored, scores.sinks.astype(jnp.float32).reshape(G, 1, N // G, 1, 1))
    weights = weights.astype(v.dtype)
    return jnp.einsum("gbrts,gbsh->btgrh", weights, v, precision=precision).reshape(B, T, N, -1)


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
