"""Products of few tokens and a weight of eight bits on Hopper GPUs: the kernel of ``jspec.pallas.matmul.few_tokens_sm90``,
which products it serves, and the reference implementation."""

import functools
import math

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import differentiable
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.reference import cuts_of
from jspec.pallas.matmul.sm90_tiling import BLOCK, DEPTH_UNIT, LINES, TOKEN_UNIT, MosaicTiling, few_tokens_tiling
from jspec.pallas.matmul.weight_only import weight_only_matmul_reference

LOWERS = jax.__version_info__ >= (0, 11)  # Pallas' Mosaic GPU lowering of jax 0.10 lacks what the kernel needs
_MIN_TILES = 64  # with fewer, too few multiprocessors read


def suits_few_tokens(tokens: int, outputs: int, inputs: int, allow_partial_sums: bool, in_blocks: bool = False) -> bool:
    """Whether the kernel should multiply a weight ``[outputs, inputs]`` here, and has tiles for half of a GPU.

    Of more than eight tokens that are no whole eights it pads a copy. That is worth it for blocks, of which XLA would
    write a dequantised weight."""
    depth, eights = BLOCK if in_blocks else DEPTH_UNIT, tokens <= TOKEN_UNIT or tokens % TOKEN_UNIT == 0
    whole = outputs % LINES == inputs % depth == 0 and (eights or in_blocks)
    if not (LOWERS and whole):
        return False
    tiling = few_tokens_tiling(tokens, outputs, inputs, allow_partial_sums, in_blocks=in_blocks)
    return tiling.tiles(tokens, outputs) >= _MIN_TILES


def few_tokens_matmul(x, weight, scale, dtype, allow_partial_sums: bool = False) -> jax.Array | PartialSums:
    """``weight_only_matmul_reference``, and on an NVIDIA GPU the kernel; for x of bfloat16 and a weight of eight bits.

    With ``allow_partial_sums`` the result may be partial sums in float32, as many as the kernel's tiling has splits."""
    (outputs, inputs), tokens = weight.shape, math.prod(x.shape[:-1])
    in_blocks = scale.ndim == 2
    tiling = few_tokens_tiling(tokens, outputs, inputs, allow_partial_sums, jnp.dtype(dtype).itemsize, in_blocks)
    kernel = functools.partial(_kernel, dtype=dtype, tiling=tiling)
    reference = functools.partial(_reference, dtype=dtype, split_inputs=tiling.split_inputs(inputs))
    return differentiable(kernel, reference, x, weight, scale)


def _kernel(x, weight, scale, dtype, tiling: MosaicTiling) -> jax.Array | PartialSums:
    from jspec.pallas.matmul.few_tokens_sm90 import few_tokens_matmul_kernel

    tokens = x.reshape(-1, x.shape[-1])
    y = few_tokens_matmul_kernel(tokens, weight, scale, dtype, tiling=tiling)
    y = y.reshape(*x.shape[:-1], *y.shape[1:])
    return y if tiling.num_splits == 1 else PartialSums(y)


def _reference(x, weight, scale, dtype, split_inputs: int | None) -> jax.Array | PartialSums:
    if split_inputs is None:
        return weight_only_matmul_reference(x, weight, scale, dtype)
    cuts = cuts_of(x.shape[-1], split_inputs)
    of_cut = lambda cut: scale if scale.ndim == 1 else scale[:, cut.start // BLOCK : -(-cut.stop // BLOCK)]  # noqa: E731
    parts = [weight_only_matmul_reference(x[..., cut], weight[:, cut], of_cut(cut)) for cut in cuts]
    return PartialSums(jnp.stack(parts, axis=-2))
