"""Absorbed queries: queries multiplied into the space of latents, and their RoPE, in one launch (DeepSeek-V2, 2024)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.reference import Rotation, apply_rope
from jspec.pallas.dispatch import by_platform
from jspec.pallas.sums import rows_product
from jspec.pallas.triton import MMA_SIZE, block_ids, broadcast_columns, dot, kernel_call
from jspec.pallas.weights.tiles import flat, has_factors, load_factors, load_numbers, places_of, shrink_of, tile_width
from jspec.quantization.weight import Weight

_TOKENS, _COLUMNS, _DEPTH = 64, 64, 64  # of a tile of the product: tokens, numbers of latents, numbers to be summed
_WARPS, _MOST_TOKENS = 4, 512


def absorb_queries(q, keys: Weight, rotation: Rotation) -> jax.Array:
    """``absorb_queries_reference``, and on an NVIDIA GPU the kernel for the few tokens of a round, or for a map with scales
    of groups and any number of tokens.

    Each program instance reads the weights of a head again, so XLA multiplies many tokens. Of a map with scales of groups
    it would write a dequantised copy."""
    supported = q.shape[0] * q.shape[1] <= _MOST_TOKENS or keys.in_groups
    return by_platform(absorb_queries_kernel, absorb_queries_reference, q, keys, rotation, supported=supported)


def absorb_queries_reference(q, keys: Weight, rotation: Rotation) -> jax.Array:
    """Absorbed queries of N heads: those that are multiplied with latents and with rotated keys.

    Args:
      q: ``[B, T, N, Hn + Hr]``, the last Hr numbers to be rotated.
      keys: the up-projection from a latent to the other Hn numbers of the keys of each head.
      rotation: the rotary embedding of the tokens' positions, for Hr numbers.

    Returns:
      ``[B, T, N, Ck + Hr]`` in the dtype of q. Sums are in float32.
    """
    unrotated, rotary = jnp.split(q, [keys.shape[1]], axis=-1)
    if keys.in_groups:
        # Float32 holds what codes and numbers of eight bits stand for, so that only sums are rounded.
        unrotated, weight = unrotated.astype(jnp.float32), keys.dequantize(rounded=q.dtype == jnp.bfloat16)
    else:
        # Scales are those of the numbers that are summed over, so they cannot wait for the sum.
        unrotated = unrotated if keys.scale is None else (unrotated * keys.scale[None, None]).astype(q.dtype)
        weight = keys.numbers.astype(q.dtype)
    # Sums in bfloat16 are those in float32, rounded. A CPU does not compute this product with a float32 result.
    of_heads = jnp.moveaxis(unrotated.reshape(-1, *q.shape[2:3], keys.shape[1]), 1, 0)
    absorbed = jnp.moveaxis(rows_product(of_heads, weight, -2), 0, 1).astype(q.dtype).reshape(*q.shape[:3], -1)
    return jnp.concatenate([absorbed, apply_rope(rotary, rotation)], axis=-1)


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share one trace
def absorb_queries_kernel(q, keys: Weight, rotation: Rotation, *, interpret=False):
    """``absorb_queries_reference`` as a kernel. A program instance has some numbers of one head of some tokens."""
    (B, T, N, H), Hn, Ck = q.shape, keys.shape[1], keys.inputs
    M, Hr, keys = B * T, H - Hn, flat(keys)
    tokens, columns = min(_TOKENS, max(MMA_SIZE, pl.next_power_of_2(M))), tile_width(keys, _COLUMNS)
    out = kernel_call(
        _absorb_queries,
        *(q.reshape(M, N, H), keys, [angle.reshape(M, -1) for angle in rotation]),
        # The first instance of a head rotates; those after it multiply.
        grid=(1 + pl.cdiv(Ck, columns), N, pl.cdiv(M, tokens)),
        out_shape=jax.ShapeDtypeStruct((M, N, Ck + Hr), q.dtype),
        num_warps=_WARPS,
        interpret=interpret,
        tokens=tokens,
        columns=columns,
    )
    return out.reshape(B, T, N, Ck + Hr)


def _absorb_queries(q_ref, keys: Weight, angle_refs, out_ref, *, tokens: int, columns: int):
    part, n = pl.program_id(0), pl.program_id(1)
    token = block_ids(pl.program_id(2), tokens)
    (M, N, _), Ck = q_ref.shape, keys.inputs
    Hn = keys.shape[0] // N

    def at(column):
        """Indices ``[tokens, len(column)]`` of numbers of this head."""
        shape = tokens, column.shape[0]
        head = jnp.full(shape, n)
        return broadcast_columns(token, shape[1]), head, jnp.broadcast_to(column[None], shape)

    def mask_of(column, width):
        """Which of these numbers there are, of ``column`` counted from 0 and ``width`` numbers in all."""
        return broadcast_columns(token < M, column.shape[0]) & jnp.broadcast_to(
            (column < width)[None], (tokens, column.shape[0])
        )

    @pl.when(part == 0)
    def _():
        half = angle_refs[0].shape[1]
        pair = block_ids(0, pl.next_power_of_2(half))
        mask = mask_of(pair, half)
        a, b = (
            pltriton.load(q_ref.at[at(Hn + offset + pair)], mask=mask, other=0.0).astype(jnp.float32)
            for offset in (0, half)
        )
        line, _, column = at(pair)
        cos, sin = (pltriton.load(ref.at[line, column], mask=mask, other=0.0) for ref in angle_refs)
        for offset, x in ((0, a * cos - b * sin), (half, b * cos + a * sin)):
            pltriton.store(out_ref.at[at(Ck + offset + pair)], x.astype(out_ref.dtype), mask=mask)

    @pl.when(part > 0)
    def _():
        column, total = block_ids(part - 1, columns), jnp.zeros((tokens, columns), jnp.float32)
        depth = min(_DEPTH, max(MMA_SIZE, pl.next_power_of_2(Hn)))
        for start in range(0, Hn, depth):
            number = start + jnp.arange(depth, dtype=jnp.int32)
            output, in_head, first = n * Hn + number, number < Hn, (part - 1) * columns
            q = pltriton.load(q_ref.at[at(number)], mask=mask_of(number, Hn), other=0.0)
            if has_factors(keys):
                q = (q * load_factors(keys, output, in_head, first)[None]).astype(q_ref.dtype)
            total += dot(q, load_numbers(keys, output, in_head, first, columns, q_ref.dtype))
        total *= shrink_of(keys.form)
        pltriton.store(out_ref.at[at(places_of(keys, column))], total.astype(out_ref.dtype), mask=mask_of(column, Ck))
