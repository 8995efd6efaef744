"""W8A8 matmul: int8 activations times int8 weights, accumulated in int32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform, on_hopper
from jspec.pallas.matmul.quantize_activations import QuantizedActivations
from jspec.pallas.matmul.small_batch import SmallBatchTiling, multiply_tile, run_matmul, store_products
from jspec.pallas.triton import broadcast_columns

MOST_TOKENS = 512  # that the kernel is for; XLA's product of more tokens is as fast


def w8a8_matmul(x: QuantizedActivations, weight, scale, allow_partial_sums: bool = False) -> jax.Array:
    """``w8a8_matmul_reference``, and on a Hopper GPU the kernel, for at most ``MOST_TOKENS`` tokens.

    With ``allow_partial_sums`` the result may be partial sums, as many as the kernel's tiling has splits: ``[..., Y,
    out]``."""
    tokens = x.numbers.size // x.shape[-1]
    if tokens > MOST_TOKENS or not on_hopper():
        return w8a8_matmul_reference(x, weight, scale)
    tiling = SmallBatchTiling.of(tokens, weight.shape[0], weight.shape[1], allow_partial_sums)
    kernel = functools.partial(w8a8_matmul_kernel, tiling=tiling)
    split_inputs = tiling.split_inputs(x.shape[-1]) if tiling.num_splits > 1 else None
    return by_platform(kernel, functools.partial(w8a8_matmul_reference, split_inputs=split_inputs), x, weight, scale)


def w8a8_matmul_reference(x: QuantizedActivations, weight, scale, split_inputs: int | None = None) -> jax.Array:
    """The linear map ``[..., in], [out, in] -> [..., out]`` of quantised activations, in the dtype that they had.

    Integers are added up in int32, which is exact for up to 132,104 inputs. Each sum is multiplied by the scales of its
    token and of its output channel in float32, and rounded once.

    Args:
      x: the activations.
      weight: int8 ``[out, in]``.
      scale: float32 ``[out]``.
      split_inputs: None, or the number of inputs of each partial sum, ``[..., Y, out]``. Each partial sum is rounded.
    """
    if split_inputs is not None:
        cuts = [slice(begin, begin + split_inputs) for begin in range(0, x.shape[-1], split_inputs)]
        pieces = (dataclasses.replace(x, numbers=x.numbers[..., cut]) for cut in cuts)
        sums = [w8a8_matmul_reference(piece, weight[:, cut], scale) for piece, cut in zip(pieces, cuts, strict=True)]
        return jnp.stack(sums, axis=-2)
    sums = _integer_product(x.numbers.reshape(-1, x.shape[-1]), weight).astype(jnp.float32)
    scaled = sums * x.scale.reshape(-1, 1) * scale[None]
    return scaled.astype(x.dtype).reshape(*x.shape[:-1], len(weight))


def _integer_product(a, b):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def w8a8_matmul_kernel(
    x: QuantizedActivations, weight, scale, *, tiling: SmallBatchTiling | None = None, interpret=False
) -> jax.Array:
    """``w8a8_matmul_reference`` as a kernel, with partial sums if its tiling has several splits."""
    numbers, outputs = x.numbers.reshape(-1, x.shape[-1]), weight.shape[0]
    tiling = tiling or SmallBatchTiling.of(len(numbers), outputs, x.shape[-1])
    scales = x.scale.reshape(-1), scale
    products = run_matmul(_w8a8_matmul, numbers, weight, *scales, tiling=tiling, dtype=x.dtype, interpret=interpret)
    return products.reshape(*x.shape[:-1], *products.shape[1:])


def _w8a8_matmul(numbers_ref, weight_ref, x_scale_ref, scale_ref, products_ref, *, tiling: SmallBatchTiling):
    sums, token, output = multiply_tile(numbers_ref, weight_ref, tiling)
    M, outputs = numbers_ref.shape[0], weight_ref.shape[0]
    sums *= broadcast_columns(pltriton.load(x_scale_ref.at[token], mask=token < M, other=0.0), tiling.outputs)
    output_scale = pltriton.load(scale_ref.at[output], mask=output < outputs, other=0.0)
    store_products(products_ref, token, output, sums * jnp.broadcast_to(output_scale[None], sums.shape))
