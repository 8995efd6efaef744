"""Values of heads from weighted sums of latents, in one launch (DeepSeek-V2, 2024)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.mla.head_maps import multiply_latents
from jspec.pallas.triton import MMA_SIZE, block_ids, block_size, dot, kernel_call, tile_indices, tile_mask
from jspec.quantization.groups import GROUP

_TOKENS, _COLUMNS = 64, 32  # of a tile of the product; the numbers to be summed are those that share a scale
_WARPS = 4


def project_values(attended, weight, scale) -> jax.Array:
    """``project_values_reference``, and on an NVIDIA GPU the kernel for a weight with scales of groups.

    XLA multiplies other weights in one launch. Of one with groups it would write a dequantised copy."""
    if scale is None or scale.ndim == 2:
        return project_values_reference(attended, weight, scale)
    return by_platform(project_values_kernel, project_values_reference, attended, weight, scale)


def project_values_reference(attended, weight, scale) -> jax.Array:
    """The values of N heads.

    Args:
      attended: ``[B, T, N, Ck]``, sums of latents, weighted by the attention of each head.
      weight: ``[N, Hv, Ck]``, the up-projection from a latent to the values of each head.
      scale: of a quantised weight, float32 ``[N, Hv]``, or ``[N, Hv, groups]`` with one for each 128 numbers of a latent;
        else None.

    Returns:
      ``[B, T, N, Hv]`` in the dtype of ``attended``. Sums are in float32, and are multiplied by their scale before they are
      rounded.
    """
    return multiply_latents("...nc,nhc->...nh", attended, weight, scale)


@functools.partial(jax.jit, static_argnames=("interpret",))  # layers share one trace
def project_values_kernel(attended, weight, scale, *, interpret=False):
    """``project_values_reference`` of a weight with scales of groups as a kernel. A program instance has some numbers of
    one head of some tokens."""
    (B, T, N, Ck), Hv = attended.shape, weight.shape[1]
    M = B * T
    tokens, columns, depth = (
        max(MMA_SIZE, block_size(size, most)) for size, most in ((M, _TOKENS), (Hv, _COLUMNS), (Ck, GROUP))
    )
    out = kernel_call(
        _project_values,
        *(attended.reshape(M * N, Ck), weight.reshape(N * Hv, Ck), scale.reshape(N * Hv, -1)),
        grid=(pl.cdiv(Hv, columns), N, pl.cdiv(M, tokens)),
        out_shape=jax.ShapeDtypeStruct((M * N, Hv), attended.dtype),
        num_warps=_WARPS,
        interpret=interpret,
        N=N,
        tokens=tokens,
        columns=columns,
        depth=depth,
    )
    return out.reshape(B, T, N, Hv)


def _project_values(x_ref, weight_ref, scale_ref, out_ref, *, N: int, tokens: int, columns: int, depth: int):
    head, token, column = pl.program_id(1), block_ids(pl.program_id(2), tokens), block_ids(pl.program_id(0), columns)
    (lines, Ck), Hv = x_ref.shape, out_ref.shape[1]
    M = lines // N
    line, output = token * N + head, head * Hv + column

    def scales(group: int):
        """Those of the columns, ``[1, columns]``."""
        at = scale_ref.at[output, jnp.full(columns, group, jnp.int32)]
        return pltriton.load(at, mask=column < Hv, other=0.0)[None]

    total = jnp.zeros((tokens, columns), jnp.float32)
    for first in range(0, Ck, depth):
        number = first + jnp.arange(depth, dtype=jnp.int32)
        x = pltriton.load(x_ref.at[tile_indices(line, number)], mask=tile_mask(token, M, number, Ck), other=0.0)
        mask = tile_mask(column, Hv, number, Ck)
        weight = pltriton.load(weight_ref.at[tile_indices(output, number)], mask=mask)
        # Triton has no fp8 literal for ``other``.
        sums = dot(x, jnp.where(mask, weight.astype(x.dtype), 0.0).astype(x.dtype), trans_b=True)
        total += sums * scales(first // GROUP)
    at, mask = tile_indices(line, column), tile_mask(token, M, column, Hv)
    pltriton.store(out_ref.at[at], total.astype(out_ref.dtype), mask=mask)
