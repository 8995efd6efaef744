"""Absorbed queries: queries multiplied into the space of latents, and their RoPE, in one launch (DeepSeek-V2, 2024)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.reference import Rotation, apply_rope
from jspec.pallas.dispatch import by_platform
from jspec.pallas.mla.head_maps import has_kernel, scale_groups
from jspec.pallas.triton import MMA_SIZE, block_ids, broadcast_columns, dot, kernel_call
from jspec.quantization.groups import GROUP

_TOKENS, _COLUMNS, _DEPTH = 64, 64, 64  # of a tile of the product: tokens, numbers of latents, numbers to be summed
_WARPS = 4


def absorb_queries(q, weight, scale, rotation: Rotation) -> jax.Array:
    """``absorb_queries_reference``, and on an NVIDIA GPU the kernel for the few tokens of a round, or for a weight with
    scales of groups and any number of tokens."""
    args = q, weight, scale, rotation
    if not has_kernel(q.shape[0] * q.shape[1], scale):
        return absorb_queries_reference(*args)
    return by_platform(absorb_queries_kernel, absorb_queries_reference, *args)


def absorb_queries_reference(q, weight, scale, rotation: Rotation) -> jax.Array:
    """Absorbed queries of N heads: those that are multiplied with latents and with rotated keys.

    Args:
      q: ``[B, T, N, Hn + Hr]``, the last Hr numbers to be rotated.
      weight: ``[N, Hn, Ck]``, the up-projection from a latent to the other numbers of the keys of each head.
      scale: of a quantised weight, float32 ``[N, Hn]``, or ``[N, Hn, groups]`` with one for each 128 numbers of a latent;
        else None.
      rotation: the rotary embedding of the tokens' positions, for Hr numbers.

    Returns:
      ``[B, T, N, Ck + Hr]`` in the dtype of q. Sums are in float32.
    """
    unrotated, rotary = jnp.split(q, [weight.shape[1]], axis=-1)
    precision, absorbed = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None, []
    for numbers, of_group in scale_groups(weight.shape[-1], scale):
        # Scales are those of the numbers that are summed over, so they cannot wait for the sum.
        scaled = unrotated if of_group is None else (unrotated * of_group[None, None]).astype(q.dtype)
        # Sums in bfloat16 are those in float32, rounded. A CPU does not compute this product with a float32 result.
        columns = weight[..., numbers].astype(q.dtype)
        absorbed.append(jnp.einsum("btnh,nhc->btnc", scaled, columns, precision=precision))
    return jnp.concatenate([*absorbed, apply_rope(rotary, rotation)], axis=-1)


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share one trace
def absorb_queries_kernel(q, weight, scale, rotation: Rotation, *, interpret=False):
    """``absorb_queries_reference`` as a kernel. A program instance has some numbers of one head of some tokens."""
    (B, T, N, H), (_, Hn, Ck) = q.shape, weight.shape
    M, Hr = B * T, H - Hn
    tokens = min(_TOKENS, max(MMA_SIZE, pl.next_power_of_2(M)))
    columns = min(_COLUMNS, max(MMA_SIZE, pl.next_power_of_2(Ck)))
    scale = None if scale is None else scale.reshape(N, Hn, -1)
    out = kernel_call(
        _absorb_queries,
        *(q.reshape(M, N, H), weight, scale, [angle.reshape(M, -1) for angle in rotation]),
        # The first instance of a head rotates; those after it multiply.
        grid=(1 + pl.cdiv(Ck, columns), N, pl.cdiv(M, tokens)),
        out_shape=jax.ShapeDtypeStruct((M, N, Ck + Hr), q.dtype),
        num_warps=_WARPS,
        interpret=interpret,
        tokens=tokens,
        columns=columns,
    )
    return out.reshape(B, T, N, Ck + Hr)


def _absorb_queries(q_ref, weight_ref, scale_ref, angle_refs, out_ref, *, tokens: int, columns: int):
    part, n = pl.program_id(0), pl.program_id(1)
    token = block_ids(pl.program_id(2), tokens)
    M, Hn, Ck = q_ref.shape[0], weight_ref.shape[1], weight_ref.shape[2]

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
        in_groups = scale_ref is not None and scale_ref.shape[2] > 1
        group = (part - 1) * columns // GROUP if in_groups else 0  # of all columns: they divide a group
        for first in range(0, Hn, depth):
            number = first + jnp.arange(depth, dtype=jnp.int32)
            in_head = number < Hn
            q = pltriton.load(q_ref.at[at(number)], mask=mask_of(number, Hn), other=0.0)
            if scale_ref is not None:
                at_scale = scale_ref.at[jnp.full(depth, n), number, jnp.full(depth, group)]
                scale = pltriton.load(at_scale, mask=in_head, other=0.0)
                q = (q * scale[None]).astype(q_ref.dtype)
            shape = depth, columns
            where = jnp.full(shape, n), broadcast_columns(number, columns), jnp.broadcast_to(column[None], shape)
            mask = broadcast_columns(in_head, columns) & jnp.broadcast_to((column < Ck)[None], shape)
            weight = pltriton.load(weight_ref.at[where], mask=mask)  # Triton has no fp8 literal for ``other``
            total += dot(q, jnp.where(mask, weight.astype(q_ref.dtype), 0.0).astype(q_ref.dtype))
        pltriton.store(out_ref.at[at(column)], total.astype(out_ref.dtype), mask=mask_of(column, Ck))
