"""Exact top-k, top-p and min-p as ONE threshold per row, found by bisection over the bits of the logits: no sort.

A token survives iff its stored logit is at least the threshold, so ties at the threshold are all kept, and drawing and the
accept ratio read the same law. Order: min-p, then top-k over its survivors, then top-p over theirs, renormalised.
"""

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import by_platform


def threshold_reference(logits, scale, top_k, top_p, min_p):
    """Lowest surviving logit of each row.

    Args:
      logits: ``[R, V]``, float32 or bfloat16, as stored.
      scale: float32 ``[R]``, 1 / temperature.
      top_k: int32 ``[R]``, 0 is off.
      top_p: float32 ``[R]`` in (0, 1], 1 is off.
      min_p: float32 ``[R]`` in [0, 1], 0 is off.

    Returns:
      float32 ``[R]``; -inf where nothing is cut.
    """
    z = logits.astype(jnp.float32)
    ordered = to_ordered(logits)
    peak = jnp.max(z, axis=-1)
    floor = jnp.where(min_p > 0, peak + jnp.log(min_p) / scale, -jnp.inf)

    def enough_tokens(candidate):
        return jnp.sum(ordered >= candidate[:, None], axis=-1, dtype=jnp.int32) >= top_k

    kth = from_ordered(_largest(enough_tokens, ordered), logits.dtype)
    floor = jnp.where((top_k > 0) & (top_k < z.shape[1]), jnp.maximum(floor, kth), floor)

    weight = jnp.where(z >= floor[:, None], jnp.exp((z - peak[:, None]) * scale[:, None]), 0.0)
    wanted = top_p * jnp.sum(weight, axis=-1)

    def enough_mass(candidate):
        return jnp.sum(jnp.where(ordered >= candidate[:, None], weight, 0.0), axis=-1) >= wanted

    nucleus = from_ordered(_largest(enough_mass, ordered), logits.dtype)
    return jnp.where(top_p < 1, jnp.maximum(floor, nucleus), floor)


def _largest(predicate, ordered):
    """The largest pattern of each row for which a predicate that holds at 0 and never comes back still holds."""
    dtype = ordered.dtype
    width = 8 * dtype.itemsize

    def decide_bit(i, found):
        candidate = found | jnp.left_shift(jnp.ones((), dtype), (width - 1 - i).astype(dtype))
        return jnp.where(predicate(candidate), candidate, found)

    return jax.lax.fori_loop(0, width, decide_bit, jnp.zeros(ordered.shape[0], dtype))


def to_ordered(x):
    """Floats -> unsigned integers of the same width and the same order (NaN aside)."""
    dtype = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, dtype)
    sign = jnp.asarray(1 << (8 * x.dtype.itemsize - 1), dtype)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def from_ordered(ordered, dtype):
    """Inverse of ``to_ordered``, widened to float32."""
    sign = jnp.asarray(1 << (8 * ordered.dtype.itemsize - 1), ordered.dtype)
    bits = jnp.where(ordered >= sign, ordered ^ sign, ~ordered)
    return jax.lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def threshold(logits, scale, top_k, top_p, min_p):
    """``threshold_reference``, and on an NVIDIA GPU the kernel. Where no row cuts anything, no logit is read."""
    return by_platform(_unless_idle, _unless_idle, logits, scale, top_k, top_p, min_p)


def _unless_idle(logits, scale, top_k, top_p, min_p):
    nothing_cut = lambda *_: jnp.full(logits.shape[0], -jnp.inf, jnp.float32)  # noqa: E731
    some_cut = jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0))
    return jax.lax.cond(some_cut, threshold_reference, nothing_cut, logits, scale, top_k, top_p, min_p)
