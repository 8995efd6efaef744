"""Products with large weights on Hopper GPUs, in one order of sums for any number of tokens: the kernel of
``jspec.pallas.matmul.few_tokens_sm90``, which products it serves, and the reference implementation."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import differentiable
from jspec.pallas.matmul.partial_sums import PartialSums, in_splits
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.matmul.sm90_tiling import (
    BLOCK,
    DEPTH_UNIT,
    LINES,
    OUTPUT_UNIT,
    TOKEN_UNIT,
    MosaicTiling,
    few_tokens_tiling,
    parts_of_inputs,
    reads_past,
)
from jspec.pallas.matmul.weight_only import weight_only_matmul_reference
from jspec.quantization.weight import Weight

LOWERS = jax.__version_info__ >= (0, 11)  # Pallas' Mosaic GPU lowering of jax 0.10 lacks what the kernel needs
_MIN_TILES = 64  # with fewer, too few multiprocessors read


def tiling_of(
    x, weight: Weight, dtype, allow_partial_sums: bool = False, one_order: bool = False
) -> MosaicTiling | str:
    """The tiling of the kernel for this product, or in words why it should not multiply it: because it cannot, or because
    another is faster and there need not be ``one_order`` of sums.

    Of more than eight tokens that are no whole eights it pads a copy. That is worth it where groups of inputs share a
    scale, of which XLA would write a dequantised weight."""
    (outputs, inputs), tokens = weight.shape, math.prod(x.shape[:-1])
    depth_unit = BLOCK if weight.in_groups else DEPTH_UNIT
    if not LOWERS:
        return f"jax {jax.__version__} does not lower its kernel"
    whole = OUTPUT_UNIT if one_order and weight.is_plain and reads_past(outputs) else LINES
    if inputs % depth_unit or (outputs % LINES and whole == LINES):
        return f"[{outputs}, {inputs}] is no multiple of [{whole}, {depth_unit}]"
    if not (one_order or weight.in_groups) and tokens > TOKEN_UNIT and tokens % TOKEN_UNIT:
        return f"{tokens} tokens are no multiple of {TOKEN_UNIT}"
    if weight.kind == "int8_groups" and (weight.zeros or (weight.group or inputs) >= DEPTH_UNIT):
        return f"groups of {weight.group} integers have zeros, or {DEPTH_UNIT} or more inputs"
    tiles = outputs // LINES * parts_of_inputs(outputs, inputs, allow_partial_sums, weight.scales_sums)[0]
    if tiles < _MIN_TILES and not one_order:  # whatever the tokens are: they get the same bits among any number
        return f"{tiles} tiles are fewer than {_MIN_TILES}, for half of a GPU"
    bits = weight.form.bits if weight.packed and weight.form else 8 * weight.numbers.dtype.itemsize
    return few_tokens_tiling(
        tokens,
        outputs,
        inputs,
        bits,
        allow_partial_sums=allow_partial_sums,
        result_bytes=jnp.dtype(dtype).itemsize,
        scales_sums=weight.scales_sums,
        in_groups=weight.in_groups,
    )


def few_tokens_matmul(x, weight: Weight, dtype, allow_partial_sums: bool = False) -> jax.Array | PartialSums:
    """The linear map ``[..., in], [out, in] -> [..., out]``, by its reference implementation, and on an NVIDIA GPU by the
    kernel; for x of bfloat16 and a product that has a ``tiling_of`` it.

    With ``allow_partial_sums`` the result of a weight that ``parts_of_inputs`` splits is ``PartialSums`` in float32: one of
    each split, or their sum where an instance has added all of them."""
    tiling = tiling_of(x, weight, dtype, allow_partial_sums, one_order=True)
    assert not isinstance(tiling, str), (x.shape, weight.shape, tiling)
    outputs, inputs = weight.shape
    in_parts = parts_of_inputs(outputs, inputs, allow_partial_sums, weight.scales_sums)[0] > 1
    how: dict[str, Any] = {"dtype": jnp.float32 if in_parts else dtype, "in_parts": in_parts}
    kernel = functools.partial(_kernel, tiling=tiling, **how)
    reference = functools.partial(_reference, split_inputs=tiling.split_inputs(inputs), **how)
    return differentiable(kernel, reference, x, weight)


def _kernel(x, weight: Weight, *, dtype, tiling: MosaicTiling, in_parts: bool) -> jax.Array | PartialSums:
    from jspec.pallas.matmul.few_tokens_sm90 import few_tokens_matmul_kernel

    y = few_tokens_matmul_kernel(x.reshape(-1, x.shape[-1]), weight, dtype, tiling=tiling)
    y = y.reshape(*x.shape[:-1], *y.shape[1:])
    if not in_parts:
        return y
    return PartialSums(y if tiling.num_splits > 1 else y[..., None, :])


def _reference(x, weight: Weight, *, dtype, split_inputs: int | None, in_parts: bool) -> jax.Array | PartialSums:
    def product(x, weight: Weight) -> jax.Array:
        if weight.is_plain:
            return matmul_reference(x, weight.numbers, dtype)
        return weight_only_matmul_reference(x, weight, dtype)

    if split_inputs is not None:
        return in_splits(lambda cut: product(x[..., cut], weight.of_inputs(cut)), x.shape[-1], split_inputs)
    y = product(x, weight)
    return PartialSums(y[..., None, :]) if in_parts else y
