"""Queries that attend to latents: the map of keys multiplied into them, and the rotary embedding, in one launch
(DeepSeek-V2, 2024)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import SMALLEST, dot, each
from jspec.pallas.attention.reference import Rotation, rotated
from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import block_ids, kernel_call

_MOST_TOKENS = 512  # that the kernel is for: each of its programs reads the weights of a head again
_ROWS, _COLUMNS, _DEPTH = (
    64,
    64,
    64,
)  # of a product: tokens, numbers of latents, and numbers that are summed over at a time
_WARPS = 4


def latent_queries(q, weight, scale, rotation: Rotation) -> jax.Array:
    """``latent_queries_reference``, and on an NVIDIA GPU the kernel for the few tokens of a round."""
    few = q.shape[0] * q.shape[1] <= _MOST_TOKENS
    args = q, weight, scale, rotation
    return (
        by_platform(latent_queries_kernel, latent_queries_reference, *args) if few else latent_queries_reference(*args)
    )


def latent_queries_reference(q, weight, scale, rotation: Rotation) -> jax.Array:
    """Queries of N heads as they are multiplied with latents and with rotated keys.

    Args:
      q: ``[B, T, N, Hn + Hr]``, the last Hr numbers to be rotated.
      weight: ``[N, Hn, Ck]``, from a latent to the other numbers of the keys of each head.
      scale: float32 ``[N, Hn]``, by which a quantised weight is multiplied, or None.
      rotation: the rotary embedding of the tokens' positions, for Hr numbers.

    Returns:
      ``[B, T, N, Ck + Hr]`` in the dtype of q. Sums are in float32.
    """
    unrotated, turning = jnp.split(q, [weight.shape[1]], axis=-1)
    if scale is not None:  # of the numbers that are summed over, so it cannot wait for the sum
        unrotated = (unrotated * scale[None, None]).astype(q.dtype)
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    # Sums in bfloat16 are those in float32, rounded. A CPU does not compute this product with a float32 result.
    found = jnp.einsum("btnh,nhc->btnc", unrotated, weight.astype(q.dtype), precision=precision)
    return jnp.concatenate([found, rotated(turning, rotation)], axis=-1)


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share one trace
def latent_queries_kernel(q, weight, scale, rotation: Rotation, *, interpret=False):
    """``latent_queries_reference`` as a kernel. Each of its programs has some numbers of one head of some tokens."""
    (B, T, N, H), (_, Hn, Ck) = q.shape, weight.shape
    M, Hr = B * T, H - Hn
    tokens = min(_ROWS, max(SMALLEST, pl.next_power_of_2(M)))
    columns = min(_COLUMNS, max(SMALLEST, pl.next_power_of_2(Ck)))
    out = kernel_call(
        _latent_queries,
        *(q.reshape(M, N, H), weight, scale, [angle.reshape(M, -1) for angle in rotation]),
        # The first programs of a head rotate; those after them multiply.
        grid=(1 + pl.cdiv(Ck, columns), N, pl.cdiv(M, tokens)),
        out_shape=jax.ShapeDtypeStruct((M, N, Ck + Hr), q.dtype),
        num_warps=_WARPS,
        interpret=interpret,
        tokens=tokens,
        columns=columns,
    )
    return out.reshape(B, T, N, Ck + Hr)


def _latent_queries(q_ref, weight_ref, scale_ref, angle_refs, out_ref, *, tokens: int, columns: int):
    part, n = pl.program_id(0), pl.program_id(1)
    token = block_ids(pl.program_id(2), tokens)
    M, Hn, Ck = q_ref.shape[0], weight_ref.shape[1], weight_ref.shape[2]

    def at(column):
        """Indices ``[tokens, len(column)]`` of numbers of this head."""
        shape = tokens, column.shape[0]
        head = jnp.full(shape, n)
        return each(token, shape[1]), head, jnp.broadcast_to(column[None], shape)

    def among(column, width):
        """Which of them there are: ``column`` counts from 0, of ``width``."""
        return each(token < M, column.shape[0]) & jnp.broadcast_to((column < width)[None], (tokens, column.shape[0]))

    @pl.when(part == 0)
    def _():
        half = angle_refs[0].shape[1]
        pair = block_ids(0, pl.next_power_of_2(half))
        mask = among(pair, half)
        a, b = (
            pltriton.load(q_ref.at[at(Hn + offset + pair)], mask=mask, other=0.0).astype(jnp.float32)
            for offset in (0, half)
        )
        row, _, column = at(pair)
        cos, sin = (pltriton.load(ref.at[row, column], mask=mask, other=0.0) for ref in angle_refs)
        for offset, x in ((0, a * cos - b * sin), (half, b * cos + a * sin)):
            pltriton.store(out_ref.at[at(Ck + offset + pair)], x.astype(out_ref.dtype), mask=mask)

    @pl.when(part > 0)
    def _():
        column, found = block_ids(part - 1, columns), jnp.zeros((tokens, columns), jnp.float32)
        depth = min(_DEPTH, max(SMALLEST, pl.next_power_of_2(Hn)))
        for first in range(0, Hn, depth):
            number = first + jnp.arange(depth, dtype=jnp.int32)
            inside = number < Hn
            q = pltriton.load(q_ref.at[at(number)], mask=among(number, Hn), other=0.0)
            if scale_ref is not None:
                scale = pltriton.load(scale_ref.at[jnp.full(depth, n), number], mask=inside, other=0.0)
                q = (q * scale[None]).astype(q_ref.dtype)
            shape = depth, columns
            where = jnp.full(shape, n), each(number, columns), jnp.broadcast_to(column[None], shape)
            there = each(inside, columns) & jnp.broadcast_to((column < Ck)[None], shape)
            weight = pltriton.load(weight_ref.at[where], mask=there)  # Triton has no fp8 literal for ``other``
            found += dot(q, jnp.where(there, weight.astype(q_ref.dtype), 0.0).astype(q_ref.dtype))
        pltriton.store(out_ref.at[at(column)], found.astype(out_ref.dtype), mask=among(column, Ck))
