"""W8A8 matmul: int8 activations times int8 weights, accumulated in int32, and FP8 activations times FP8 weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul.partial_sums import PartialSums, in_splits
from jspec.pallas.matmul.quantize_activations import QuantizedActivations
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.matmul.small_batch import (
    multiply_tile,
    run_by_platform,
    run_matmul,
    small_batch_tiling,
    store_products,
)
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.triton import broadcast_columns


def w8a8_matmul(x: QuantizedActivations, weight, scale, allow_partial_sums: bool = False) -> jax.Array | PartialSums:
    """``w8a8_matmul_reference`` of int8, and on an NVIDIA GPU the kernel.

    With ``allow_partial_sums`` the result may be partial sums, as many as the kernel's tiling has splits."""
    return run_by_platform(
        w8a8_matmul_kernel, w8a8_matmul_reference, x, weight, scale, allow_partial_sums=allow_partial_sums
    )


def w8a8_matmul_reference(
    x: QuantizedActivations, weight, scale, split_inputs: int | None = None
) -> jax.Array | PartialSums:
    """The linear map ``[..., in], [out, in] -> [..., out]`` of quantised activations, in the dtype that they had.

    Integers are added up in int32, which is exact for up to 132,104 inputs. Products of FP8 are exact in float32 and added
    up in it; on an NVIDIA GPU XLA gives them to the tensor cores as they are stored, which may add up fewer digits than
    float32 has. Each sum is multiplied by the scales of its token and of its output channel in float32, and rounded once.

    Args:
      x: the activations.
      weight: ``[out, in]``, int8 or float8_e4m3fn as the activations are.
      scale: float32 ``[out]``.
      split_inputs: None, or the number of inputs of each of the partial sums, which are rounded each.
    """
    if split_inputs is None:
        return _scaled_product(x, weight, scale)

    def of(cut: slice) -> jax.Array:
        return _scaled_product(dataclasses.replace(x, numbers=x.numbers[..., cut]), weight[:, cut], scale)

    return in_splits(of, x.shape[-1], split_inputs)


def _scaled_product(x: QuantizedActivations, weight, scale) -> jax.Array:
    numbers = x.numbers.reshape(-1, x.shape[-1])
    if weight.dtype == jnp.int8:
        sums = _product(numbers, weight, jnp.int32).astype(jnp.float32)
    else:  # not every platform multiplies FP8
        sums = by_platform(_product_of_fp8, _product_of_widened, numbers, weight)
    scaled = sums * x.scale.reshape(-1, 1) * scale[None]
    return scaled.astype(x.dtype).reshape(*x.shape[:-1], len(weight))


def _product(a, b, dtype=jnp.float32):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _product_of_fp8(a, b):
    """A single token has another one of zeros beside it: XLA would widen the weight for a product with a vector."""
    if len(a) > 1:
        return _product(a, b)
    return _product(jnp.concatenate([a, jnp.zeros_like(a)]), b)[:1]


def _product_of_widened(a, b):
    return matmul_reference(a.astype(jnp.float32), b.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def w8a8_matmul_kernel(
    x: QuantizedActivations, weight, scale, *, tiling: MatmulTiling | None = None, interpret=False
) -> jax.Array | PartialSums:
    """``w8a8_matmul_reference`` of int8 as a kernel, with partial sums if its tiling has several splits."""
    tiling = tiling or small_batch_tiling(x.scale.size, *weight.shape)
    operands = x.numbers, weight, x.scale, scale
    return run_matmul(_w8a8_matmul, *operands, tiling=tiling, dtype=x.dtype, interpret=interpret)


def _w8a8_matmul(numbers_ref, weight_ref, x_scale_ref, scale_ref, products_ref, *, tiling: MatmulTiling):
    sums, token, output = multiply_tile(numbers_ref, weight_ref, tiling)
    M, outputs = numbers_ref.shape[0], weight_ref.shape[0]
    sums *= broadcast_columns(pltriton.load(x_scale_ref.at[token], mask=token < M, other=0.0), tiling.outputs)
    output_scale = pltriton.load(scale_ref.at[output], mask=output < outputs, other=0.0)
    store_products(products_ref, token, output, sums * jnp.broadcast_to(output_scale[None], sums.shape))
