"""Values of heads from weighted sums of latents, in one launch (DeepSeek-V2, 2024)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import MMA_SIZE, block_ids, block_size, dot, kernel_call, tile_indices, tile_mask
from jspec.pallas.weights.head_maps import multiply_latents
from jspec.pallas.weights.tiles import flat, has_factors, load_factors, load_numbers, places_of, shrink_of, tile_width
from jspec.quantization.weight import Weight

_TOKENS, _COLUMNS, _DEPTH = 64, 32, 128  # of a tile; of the numbers to be summed, those that share a scale
_WARPS = 4


def project_values(attended, values: Weight) -> jax.Array:
    """``project_values_reference``, and on an NVIDIA GPU the kernel for a map with scales of groups.

    XLA multiplies other maps in one launch. Of one with groups it would write a dequantised copy."""
    supported = values.in_groups
    return by_platform(project_values_kernel, project_values_reference, attended, values, supported=supported)


def project_values_reference(attended, values: Weight) -> jax.Array:
    """The values of N heads.

    Args:
      attended: ``[B, T, N, Ck]``, sums of latents, weighted by the attention of each head.
      values: the up-projection from a latent to the Hv values of each head.

    Returns:
      ``[B, T, N, Hv]`` in the dtype of ``attended``. Sums are in float32, and are multiplied by their scale before they are
      rounded.
    """
    return multiply_latents(attended, values, of_each=True)


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share one trace
def project_values_kernel(attended, values: Weight, *, interpret=False):
    """``project_values_reference`` of a map with scales of groups as a kernel. A program instance has some numbers of one
    head of some tokens."""
    (B, T, N, Ck), Hv = attended.shape, values.shape[1]
    M = B * T
    tokens, columns = (max(MMA_SIZE, block_size(size, most)) for size, most in ((M, _TOKENS), (Hv, _COLUMNS)))
    out = kernel_call(
        _project_values,
        *(attended.reshape(M * N, Ck), flat(values)),
        grid=(pl.cdiv(Hv, columns), N, pl.cdiv(M, tokens)),
        out_shape=jax.ShapeDtypeStruct((M * N, Hv), attended.dtype),
        num_warps=_WARPS,
        interpret=interpret,
        N=N,
        tokens=tokens,
        columns=columns,
    )
    return out.reshape(B, T, N, Hv)


def _project_values(x_ref, values: Weight, out_ref, *, N: int, tokens: int, columns: int):
    head, token, column = pl.program_id(1), block_ids(pl.program_id(2), tokens), block_ids(pl.program_id(0), columns)
    (lines, Ck), Hv, depth = x_ref.shape, out_ref.shape[1], tile_width(values, _DEPTH)
    M = lines // N
    line, output, real = token * N + head, head * Hv + column, column < Hv
    total = jnp.zeros((tokens, columns), jnp.float32)
    for first in range(0, Ck, depth):
        number = first + jnp.arange(depth, dtype=jnp.int32)
        at, mask = tile_indices(line, places_of(values, number)), tile_mask(token, M, number, Ck)
        x = pltriton.load(x_ref.at[at], mask=mask, other=0.0)
        sums = dot(x, load_numbers(values, output, real, first, depth, x.dtype), trans_b=True)
        total += sums * load_factors(values, output, real, first)[None] if has_factors(values) else sums
    total *= shrink_of(values.form)
    at, mask = tile_indices(line, column), tile_mask(token, M, column, Hv)
    pltriton.store(out_ref.at[at], total.astype(out_ref.dtype), mask=mask)
