"""Exact top-k, top-p and min-p as ONE cutoff per distribution, found without a sort by bisecting the bits of a logit.

A token survives if and only if its stored logit is at least the cutoff. Ties at the cutoff are therefore all kept, and
sampling and the acceptance ratio read the same distribution. Min-p comes first, then top-k over the tokens that min-p
left, then top-p over the tokens that top-k left, with their probabilities renormalised."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.sums import row_max, row_sum
from jspec.pallas.triton import block_ids, block_size, exp, load_block

DISTRIBUTION_WARPS = 16  # of a program instance that reads all logits of a distribution
_BLOCK = 4096  # tokens of a block
_UNROLL = 4  # blocks that are loaded together
_DEPTH = 4  # logits that a lane keeps
_BITS = 2  # of the cutoff that one pass decides


def cutoff_if_any(logits, scale, top_k, top_p, min_p):
    """``cutoff_reference``, which is skipped if no distribution cuts anything."""
    nothing_cut = lambda *_: jnp.full(logits.shape[0], -jnp.inf, jnp.float32)  # noqa: E731
    any_cut = jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0))
    return jax.lax.cond(any_cut, cutoff_reference, nothing_cut, logits, scale, top_k, top_p, min_p)


def cutoff_reference(logits, scale, top_k, top_p, min_p):
    """The cutoff of each of R distributions, the lowest surviving logit.

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
    peak = row_max(z)[:, 0]
    floor = jnp.where(min_p > 0, peak + jnp.log(min_p) / scale, -jnp.inf)

    def enough_tokens(candidate):
        return jnp.sum(ordered >= candidate[:, None], axis=-1, dtype=jnp.int32) >= top_k

    kth = from_ordered(_largest(enough_tokens, ordered), logits.dtype)
    floor = jnp.where((top_k > 0) & (top_k < z.shape[1]), jnp.maximum(floor, kth), floor)

    weight = jnp.where(z >= floor[:, None], jnp.exp((z - peak[:, None]) * scale[:, None]), 0.0)
    wanted = top_p * row_sum(weight)[:, 0]

    def enough_mass(candidate):
        return row_sum(jnp.where(ordered >= candidate[:, None], weight, 0.0))[:, 0] >= wanted

    nucleus = from_ordered(_largest(enough_mass, ordered), logits.dtype)
    return jnp.where(top_p < 1, jnp.maximum(floor, nucleus), floor)


def _largest(predicate, ordered):
    """The largest bit pattern of each distribution at which ``predicate`` holds, unsigned ``[R]``.

    The predicate holds at 0, and where it does not hold it does not hold at any larger pattern either."""
    dtype = ordered.dtype
    width = 8 * dtype.itemsize

    def decide_bit(i, pattern):
        candidate = pattern | jnp.left_shift(jnp.ones((), dtype), (width - 1 - i).astype(dtype))
        return jnp.where(predicate(candidate), candidate, pattern)

    return jax.lax.fori_loop(0, width, decide_bit, jnp.zeros(ordered.shape[0], dtype))


def to_ordered(x):
    """Floats as unsigned integers of the same width that have the same order; NaN has no place in it."""
    dtype = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, dtype)
    sign = jnp.asarray(1 << (8 * x.dtype.itemsize - 1), dtype)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def from_ordered(ordered, dtype):
    """Inverse of ``to_ordered``, in float32."""
    sign = jnp.asarray(1 << (8 * ordered.dtype.itemsize - 1), ordered.dtype)
    bits = jnp.where(ordered >= sign, ordered ^ sign, ~ordered)
    return jax.lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def fold_over(logits_ref, at):
    """In a kernel: a fold over the logits of distribution ``at = (b, j)``, and the size of the blocks that it reads.

    The fold is ``(add, initial) -> carry``. It calls ``add(carry, z, block)`` with one block of logits after another,
    float32, -inf past the end of the vocabulary."""
    V = logits_ref.shape[-1]
    size = block_size(V, _BLOCK)

    def fold(add, initial):
        def add_blocks(i, carry):
            blocks = [i * _UNROLL + j for j in range(_UNROLL)]
            loads = [load_block(logits_ref, at, block, block_ids(block, size), V) for block in blocks]
            for block, z in zip(blocks, loads, strict=True):  # after all loads, which are then under way together
                carry = add(carry, z.astype(jnp.float32), block)
            return carry

        return jax.lax.fori_loop(0, pl.cdiv(V, size * _UNROLL), add_blocks, initial)

    return fold, size


def cutoff_in_kernel(logits_ref, at, scale, top_k, top_p, min_p):
    """In a kernel: ``cutoff_reference`` of distribution ``at = (b, j)``.

    Each of ``_BLOCK`` lanes reads some of the logits and keeps its ``_DEPTH`` largest ones in registers. A lane drops no
    logit above the smallest one that it kept, so a cutoff above the smallest kept logit of every lane is exact. Then the
    logits are read once, or twice. Another cutoff (of a flat distribution, of a large top-k) is searched again over all
    logits, in passes that read them from the L2 cache."""
    V, dtype = logits_ref.shape[-1], logits_ref.dtype
    fold, size = fold_over(logits_ref, at)
    largest = fold(_keep_largest, (jnp.full(size, -jnp.inf),) * _DEPTH)
    peak, dropped = jnp.max(largest[0]), jnp.max(largest[-1])

    def sums_of_all(weight_of, floors):
        """The weight of all tokens at or above each of the floors."""

        def add(sums, z, _):
            return tuple(x + jnp.where(z >= floor, weight_of(z), 0.0) for x, floor in zip(sums, floors, strict=True))

        return [jnp.sum(x) for x in fold(add, (jnp.zeros(size),) * len(floors))]

    def sums_of_largest(weight_of, floors):
        return [jnp.sum(sum(jnp.where(z >= floor, weight_of(z), 0.0) for z in largest)) for floor in floors]

    def search(weight_of, wanted):
        cutoff = _search(lambda floors: sums_of_largest(weight_of, floors), wanted, dtype)
        again = lambda: _search(lambda floors: sums_of_all(weight_of, floors), wanted, dtype)  # noqa: E731
        return jax.lax.cond(cutoff > dropped, lambda: cutoff, again)

    def nucleus(floor):
        weight_of = lambda z: jnp.where(z >= floor, exp((z - peak) * scale), 0.0)  # noqa: E731
        in_kept, in_row = lambda: sums_of_largest(weight_of, [floor])[0], lambda: sums_of_all(weight_of, [floor])[0]
        mass = jax.lax.cond(floor > dropped, in_kept, in_row)
        return jnp.maximum(floor, search(weight_of, top_p * mass))

    floor = jnp.where(min_p > 0, peak + jnp.log(min_p) / scale, -jnp.inf)
    count = lambda: search(jnp.ones_like, top_k.astype(jnp.float32))  # noqa: E731
    floor = jnp.maximum(floor, jax.lax.cond((top_k > 0) & (top_k < V), count, lambda: floor))
    return jax.lax.cond(top_p < 1, lambda: nucleus(floor), lambda: floor)


def _keep_largest(largest, z, _):
    """Insert z into lanes whose kept logits are sorted from the largest to the smallest; the smallest drops out."""
    after = []
    for value in largest:
        after.append(jnp.maximum(value, z))
        z = jnp.minimum(value, z)
    return tuple(after)


def _search(sums, wanted, dtype):
    """The largest value, float32, at which the tokens at or above it still weigh ``wanted`` or more.

    ``sums(floors)`` are the weights of the tokens at or above each of some floors; only values of ``dtype`` are
    tried."""
    bits, lowest = jnp.finfo(dtype).bits, jnp.uint32(2 ** jnp.finfo(dtype).nmant - 1)  # the pattern of -inf

    def value(pattern):
        return from_ordered(jnp.maximum(pattern, lowest).astype(f"uint{bits}"), dtype)

    def decide_bits(i, pattern):
        shift = (bits - _BITS * (i + 1)).astype(jnp.uint32)
        pivots = [value(pattern | jnp.left_shift(jnp.uint32(digit), shift)) for digit in range(1, 2**_BITS)]
        digit = sum((amount >= wanted).astype(jnp.uint32) for amount in sums(pivots))
        return pattern | jnp.left_shift(digit, shift)

    return value(jax.lax.fori_loop(0, bits // _BITS, decide_bits, jnp.uint32(0)))
