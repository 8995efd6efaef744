"""A product with a weight of eight bits whose scales come in blocks, as a kernel in Pallas' Triton lowering."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.triton import MMA_SIZE, block_ids, dot, kernel_call, load_tile, tile_indices, tile_mask
from jspec.pallas.weights.unpack import ORDER_INPUTS, SHRINK, input_indices, to_mma_order, unpack_eight_bits

BLOCK = 128  # outputs and inputs that share a scale


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # products share one trace
def block_product(x, weight, scale, *, tiling: MatmulTiling | None = None, interpret: bool = False):
    """The linear map ``[T, in], [out, in] -> [T, out]``, in x's dtype.

    The products of a block are added up in float32, and their sum is multiplied by the block's scale.

    Args:
      x: bfloat16.
      weight: int8 or float8_e4m3fn.
      scale: float32 ``[out / 128, in / 128]``.
      tiling: with 128 inputs, and at most 128 outputs.
    """
    tiling = tiling or block_tiling(len(x))
    assert tiling.inputs == BLOCK, tiling
    assert tiling.outputs <= BLOCK, tiling
    return kernel_call(
        _block_product,
        *(x, weight, scale),
        grid=tiling.grid(len(x), len(weight)),
        out_shape=jax.ShapeDtypeStruct((len(x), len(weight)), x.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
    )


def block_tiling(tokens: int) -> MatmulTiling:
    """As a weight-only matmul has it: of few tokens, more program instances with fewer outputs."""
    tile_tokens = min(max(MMA_SIZE, pl.next_power_of_2(tokens)), 128)
    if tile_tokens <= 32:
        return MatmulTiling(64, tile_tokens, BLOCK, num_warps=4, num_stages=5, ordered=True)
    return MatmulTiling(128, tile_tokens, BLOCK, num_warps=8, num_stages=3)


def _block_product(x_ref, weight_ref, scale_ref, y_ref, *, tiling: MatmulTiling):
    (T, inputs), outputs = x_ref.shape, weight_ref.shape[0]
    token, output = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    row = pl.program_id(1) * tiling.outputs // BLOCK

    def add(i, total):
        weights = unpack_eight_bits(load_tile(weight_ref, output, block_ids(i, BLOCK), BLOCK))
        column = i * BLOCK + input_indices(BLOCK, ORDER_INPUTS, tiling.ordered)
        x = load_tile(x_ref, token, column, BLOCK)
        part = dot(to_mma_order(weights), x if tiling.ordered else to_mma_order(x), trans_b=True)
        return total + part * scale_ref[row, i]

    zeros = jnp.zeros((tiling.outputs, tiling.tokens), jnp.float32)
    total = jax.lax.fori_loop(0, inputs // BLOCK, add, zeros) * SHRINK
    at = y_ref.at[tile_indices(token, output)]
    pltriton.store(at, total.T.astype(y_ref.dtype), mask=tile_mask(token, T, output, outputs))
