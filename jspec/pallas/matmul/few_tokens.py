"""Products of few tokens and a weight of eight or four bits on Hopper GPUs: the kernel of
``jspec.pallas.matmul.few_tokens_sm90``, which products it serves, and the reference implementation."""

import functools
import math

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import differentiable
from jspec.pallas.matmul.partial_sums import PartialSums, in_splits
from jspec.pallas.matmul.sm90_tiling import (
    BLOCK,
    DEPTH_UNIT,
    LINES,
    TOKEN_UNIT,
    MosaicTiling,
    few_tokens_tiling,
    four_bit_tiling,
)
from jspec.pallas.matmul.weight_only import weight_only_matmul_reference
from jspec.quantization.weight import Weight

LOWERS = jax.__version_info__ >= (0, 11)  # Pallas' Mosaic GPU lowering of jax 0.10 lacks what the kernel needs
_MIN_TILES = 64  # with fewer, too few multiprocessors read


def tiling_of(x, weight: Weight, dtype, allow_partial_sums: bool = False) -> MosaicTiling | str:
    """The tiling of the kernel for this product, or in words why it should not multiply it.

    Of more than eight tokens that are no whole eights it pads a copy. That is worth it where groups of inputs share a
    scale, of which XLA would write a dequantised weight."""
    (outputs, inputs), tokens = weight.shape, math.prod(x.shape[:-1])
    depth_unit = DEPTH_UNIT if weight.per_channel else BLOCK
    if not LOWERS:
        return f"jax {jax.__version__} does not lower its kernel"
    if outputs % LINES or inputs % depth_unit:
        return f"[{outputs}, {inputs}] is no multiple of [{LINES}, {depth_unit}]"
    if weight.per_channel and tokens > TOKEN_UNIT and tokens % TOKEN_UNIT:
        return f"{tokens} tokens are no multiple of {TOKEN_UNIT}"
    if weight.scales_sums and (weight.group or inputs) < DEPTH_UNIT:
        return f"groups of {weight.group} inputs are fewer than {DEPTH_UNIT}"
    shape = tokens, outputs, inputs, allow_partial_sums, jnp.dtype(dtype).itemsize
    if weight.packed:
        tiling = four_bit_tiling(*shape)
        tiles = outputs // LINES * tiling.num_splits  # whatever the tokens are: they get the same bits among any number
    else:
        tiling = few_tokens_tiling(*shape, scaled_groups=weight.scales_sums, in_groups=weight.in_groups)
        tiles = tiling.tiles(tokens, outputs)
    return tiling if tiles >= _MIN_TILES else f"{tiles} tiles are fewer than {_MIN_TILES}, for half of a GPU"


def few_tokens_matmul(x, weight: Weight, dtype, allow_partial_sums: bool = False) -> jax.Array | PartialSums:
    """``weight_only_matmul_reference``, and on an NVIDIA GPU the kernel; for x of bfloat16 and a product that has a
    ``tiling_of`` it.

    With ``allow_partial_sums`` the result may be partial sums in float32, as many as the kernel's tiling has splits."""
    tiling = tiling_of(x, weight, dtype, allow_partial_sums)
    assert not isinstance(tiling, str), (x.shape, weight.shape, tiling)
    kernel = functools.partial(_kernel, dtype=dtype, tiling=tiling)
    reference = functools.partial(_reference, dtype=dtype, split_inputs=tiling.split_inputs(x.shape[-1]))
    return differentiable(kernel, reference, x, weight)


def _kernel(x, weight: Weight, *, dtype, tiling: MosaicTiling) -> jax.Array | PartialSums:
    from jspec.pallas.matmul.few_tokens_sm90 import few_tokens_matmul_kernel

    y = few_tokens_matmul_kernel(x.reshape(-1, x.shape[-1]), weight, dtype, tiling=tiling)
    y = y.reshape(*x.shape[:-1], *y.shape[1:])
    return y if tiling.num_splits == 1 else PartialSums(y)


def _reference(x, weight: Weight, *, dtype, split_inputs: int | None) -> jax.Array | PartialSums:
    if split_inputs is None:
        return weight_only_matmul_reference(x, weight, dtype)

    def of(cut: slice) -> jax.Array:
        return weight_only_matmul_reference(x[..., cut], weight.of_inputs(cut), jnp.float32)

    return in_splits(of, x.shape[-1], split_inputs)
