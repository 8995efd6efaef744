"""Products of few tokens and a weight of eight or four bits on Hopper GPUs: the kernel of
``jspec.pallas.matmul.few_tokens_sm90``, which products it serves, and the reference implementation."""

import functools
import math

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import differentiable
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.reference import cuts_of
from jspec.pallas.matmul.sm90_tiling import BLOCK, DEPTH_UNIT, LINES, TOKEN_UNIT, MosaicTiling, few_tokens_tiling
from jspec.pallas.matmul.weight_only import weight_only_matmul_reference
from jspec.quantization import nvfp4
from jspec.quantization.codes import HALF
from jspec.quantization.formats import group_of

LOWERS = jax.__version_info__ >= (0, 11)  # Pallas' Mosaic GPU lowering of jax 0.10 lacks what the kernel needs
_MIN_TILES = 64  # with fewer, too few multiprocessors read


def tiling_of(x, weight, scale, dtype, allow_partial_sums: bool = False, channel_scale=None) -> MosaicTiling | None:
    """The tiling of the kernel for this product, None if it should not multiply it or has tiles for less than half of a GPU.

    Of more than eight tokens that are no whole eights it pads a copy. That is worth it where groups of inputs share a
    scale, of which XLA would write a dequantised weight."""
    tokens, inputs, outputs, in_groups = math.prod(x.shape[:-1]), x.shape[-1], weight.shape[0], scale.ndim > 1
    bits = 4 if weight.dtype == jnp.uint8 else 8
    eights = tokens <= TOKEN_UNIT or tokens % TOKEN_UNIT == 0
    whole = outputs % LINES == inputs % (BLOCK if in_groups else DEPTH_UNIT) == 0 and (eights or in_groups)
    is_nvfp4 = channel_scale is not None  # whose sums need no scales until they are whole
    if not (LOWERS and whole) or (bits == 4 and not is_nvfp4 and group_of(inputs, scale.shape[1]) < DEPTH_UNIT):
        return None
    tiling = few_tokens_tiling(
        tokens,
        outputs,
        inputs,
        allow_partial_sums,
        jnp.dtype(dtype).itemsize,
        in_groups=in_groups and not is_nvfp4,
        bits=bits,
    )
    return tiling if tiling.tiles(tokens, outputs) >= _MIN_TILES else None


def few_tokens_matmul(
    x, weight, scale, dtype, allow_partial_sums: bool = False, channel_scale=None
) -> jax.Array | PartialSums:
    """``weight_only_matmul_reference``, and on an NVIDIA GPU the kernel; for x of bfloat16 and a product that has a
    ``tiling_of`` it.

    With ``allow_partial_sums`` the result may be partial sums in float32, as many as the kernel's tiling has splits."""
    tiling = tiling_of(x, weight, scale, dtype, allow_partial_sums, channel_scale)
    assert tiling is not None, (x.shape, weight.shape, scale.shape)
    kernel = functools.partial(_kernel, dtype=dtype, tiling=tiling)
    reference = functools.partial(_reference, dtype=dtype, split_inputs=tiling.split_inputs(x.shape[-1]))
    arrays = (x, weight, scale) if channel_scale is None else (x, weight, scale, channel_scale)
    return differentiable(kernel, reference, *arrays)


def _kernel(x, weight, scale, channel_scale=None, *, dtype, tiling: MosaicTiling) -> jax.Array | PartialSums:
    from jspec.pallas.matmul.few_tokens_sm90 import few_tokens_matmul_kernel

    tokens = x.reshape(-1, x.shape[-1])
    y = few_tokens_matmul_kernel(tokens, weight, scale, dtype, channel_scale, tiling=tiling)
    y = y.reshape(*x.shape[:-1], *y.shape[1:])
    return y if tiling.num_splits == 1 else PartialSums(y)


def _reference(x, weight, scale, channel_scale=None, *, dtype, split_inputs: int | None) -> jax.Array | PartialSums:
    if split_inputs is None:
        return weight_only_matmul_reference(x, weight, scale, dtype, channel_scale)
    inputs, of_codes = x.shape[-1], weight.dtype == jnp.uint8
    group = BLOCK
    if of_codes:
        group = nvfp4.GROUP if channel_scale is not None else group_of(inputs, scale.shape[1])

    def part(cut: slice):
        of_weight = slice(cut.start // BLOCK * HALF, cut.stop // BLOCK * HALF) if of_codes else cut
        whole = scale.ndim == 1 or group == inputs
        of_scale = scale if whole else scale[:, cut.start // group : -(-cut.stop // group)]
        return weight_only_matmul_reference(x[..., cut], weight[:, of_weight], of_scale, channel_scale=channel_scale)

    return PartialSums(jnp.stack([part(cut) for cut in cuts_of(inputs, split_inputs)], axis=-2))
