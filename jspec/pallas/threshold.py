"""Exact top-k, top-p and min-p as ONE threshold per row, found by bisection over the bits of the logits: no sort.

A token survives iff its stored logit is at least the threshold, so ties at the threshold are all kept, and drawing and the
accept ratio read the same law. Order: min-p, then top-k over its survivors, then top-p over theirs, renormalised.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import block_ids, block_size, kernel_call, load_block

_BLOCK = 4096
_BITS = 2  # of the threshold decided in one pass over the row


def threshold(logits, scale, top_k, top_p, min_p):
    """``threshold_reference``, and on an NVIDIA GPU the kernel. A row that cuts nothing is not read by the kernel; the
    twin is skipped where no row cuts anything."""
    return by_platform(threshold_kernel, _threshold_if_any, logits, scale, top_k, top_p, min_p)


def _threshold_if_any(logits, scale, top_k, top_p, min_p):
    nothing_cut = lambda *_: jnp.full(logits.shape[0], -jnp.inf, jnp.float32)  # noqa: E731
    some_cut = jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0))
    return jax.lax.cond(some_cut, threshold_reference, nothing_cut, logits, scale, top_k, top_p, min_p)


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


def threshold_kernel(logits, scale, top_k, top_p, min_p, *, interpret=False):
    """``threshold_reference`` as a kernel over rows, which reads its row once per two bits and stage (from L2)."""
    R, V = logits.shape
    return kernel_call(
        _threshold_row,
        *(logits, scale, top_k, top_p, min_p),
        grid=(R,),
        out_shape=jax.ShapeDtypeStruct((R,), jnp.float32),
        num_warps=16,
        interpret=interpret,
        size=block_size(V, _BLOCK),
    )


def _threshold_row(logits_ref, scale_ref, top_k_ref, top_p_ref, min_p_ref, out_ref, *, size):
    row, V = pl.program_id(0), logits_ref.shape[1]
    scale, top_k, top_p, min_p = scale_ref[row], top_k_ref[row], top_p_ref[row], min_p_ref[row]
    use_top_k = (top_k > 0) & (top_k < V)

    def total(of_block, initial, combine=jnp.add):
        """Combine ``of_block(z)``, a tuple of arrays [size], over all blocks of the row; the arrays stay apart."""

        def add_block(block, carry):
            z = load_block(logits_ref, (row,), block, block_ids(block, size), V).astype(jnp.float32)
            return tuple(combine(x, y) for x, y in zip(carry, of_block(z), strict=True))

        return jax.lax.fori_loop(0, pl.cdiv(V, size), add_block, initial)

    def search(count_from, wanted, dtype):
        """The largest pattern whose tokens, weighed by ``count_from(z)``, still amount to ``wanted``."""
        zeros = (jnp.zeros(size, dtype),) * (2**_BITS - 1)

        def decide_bits(i, found):
            shift = (32 - _BITS * (i + 1)).astype(jnp.uint32)
            pivots = [found | jnp.left_shift(jnp.uint32(digit), shift) for digit in range(1, 2**_BITS)]

            def masses(z):
                ordered, weight = to_ordered(z), count_from(z)
                return tuple(jnp.where(ordered >= pivot, weight, jnp.zeros((), dtype)) for pivot in pivots)

            digit = sum((jnp.sum(mass) >= wanted).astype(jnp.uint32) for mass in total(masses, zeros))
            return found | jnp.left_shift(digit, shift)

        bits = 8 * logits_ref.dtype.itemsize  # the upper ones: a stored logit is ordered as its float32
        found = jax.lax.fori_loop(0, bits // _BITS, decide_bits, jnp.uint32(0))
        stored = jax.lax.shift_right_logical(found, jnp.uint32(32 - bits)).astype(f"uint{bits}")
        return from_ordered(stored, logits_ref.dtype)

    def cut():
        lowest = (jnp.full(size, -jnp.inf),)
        (peak,) = total(lambda z: (z,), lowest, jnp.maximum)
        peak = jnp.max(peak)
        floor = jnp.where(min_p > 0, peak + jnp.log(min_p) / scale, -jnp.inf)
        kth = jax.lax.cond(
            use_top_k, lambda: search(lambda z: jnp.ones(size, jnp.int32), top_k, jnp.int32), lambda: floor
        )
        floor = jnp.maximum(floor, kth)
        weight = lambda z: jnp.where(z >= floor, jnp.exp((z - peak) * scale), 0.0)  # noqa: E731

        def nucleus():
            (mass,) = total(lambda z: (weight(z),), (jnp.zeros(size),))
            return jnp.maximum(floor, search(weight, top_p * jnp.sum(mass), jnp.float32))

        return jax.lax.cond(top_p < 1, nucleus, lambda: floor)

    cuts = use_top_k | (top_p < 1) | (min_p > 0)
    found = jax.lax.cond(cuts, cut, lambda: scale)  # anything: a branch that returns a literal does not lower
    out_ref[row] = jnp.where(cuts, found, -jnp.inf)
