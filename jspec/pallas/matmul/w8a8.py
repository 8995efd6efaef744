"""Products of rounded tokens with weights of int8: integers all the way, which no conversion holds up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import each
from jspec.pallas.dispatch import by_platform, on_hopper
from jspec.pallas.matmul.quantize_activations import Rounded
from jspec.pallas.matmul.small_batch import Tiling, launch, store_products, sums_of

MOST_TOKENS = 512  # that the kernel is for; XLA's product of more tokens is as fast


def rounded_product(x: Rounded, weight, scale, in_parts: bool = False) -> jax.Array:
    """``rounded_product_reference``, and on an NVIDIA GPU of the Hopper generation the kernel, if it is for so many tokens.

    With ``in_parts`` results may be in parts, as many as the kernel's tiling has: ``[..., Y, out]``."""
    tokens = x.numbers.size // x.shape[-1]
    if tokens > MOST_TOKENS or not on_hopper():
        return rounded_product_reference(x, weight, scale)
    tiling = Tiling.of(tokens, weight.shape[0], weight.shape[1], in_parts)
    kernel = functools.partial(rounded_product_kernel, tiling=tiling)
    step = tiling.step(x.shape[-1]) if tiling.parts > 1 else None
    return by_platform(kernel, functools.partial(rounded_product_reference, step=step), x, weight, scale)


def rounded_product_reference(x: Rounded, weight, scale, step: int | None = None) -> jax.Array:
    """The linear map ``[..., in], [out, in] -> [..., out]`` of rounded tokens, in the dtype that they had.

    Integers are added up in int32, which is exact for up to 132,104 inputs. Each sum is multiplied by the scales of its
    token and of its output channel in float32, and rounded once.

    Args:
      x: the tokens.
      weight: int8 ``[out, in]``.
      scale: float32 ``[out]``.
      step: how many inputs make a part of the results, ``[..., Y, out]``. Their sum is the result, but each part is rounded.
    """
    if step is not None:
        cuts = [slice(begin, begin + step) for begin in range(0, x.shape[-1], step)]
        some = (dataclasses.replace(x, numbers=x.numbers[..., cut]) for cut in cuts)
        parts = [rounded_product_reference(one, weight[:, cut], scale) for one, cut in zip(some, cuts, strict=True)]
        return jnp.stack(parts, axis=-2)
    sums = _integer_product(x.numbers.reshape(-1, x.shape[-1]), weight).astype(jnp.float32)
    scaled = sums * x.scale.reshape(-1, 1) * scale[None]
    return scaled.astype(x.dtype).reshape(*x.shape[:-1], len(weight))


def _integer_product(a, b):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def rounded_product_kernel(x: Rounded, weight, scale, *, tiling: Tiling | None = None, interpret=False) -> jax.Array:
    """``rounded_product_reference`` as a kernel, in parts if its tiling has several."""
    numbers, outputs = x.numbers.reshape(-1, x.shape[-1]), weight.shape[0]
    tiling = tiling or Tiling.of(len(numbers), outputs, x.shape[-1])
    scales = x.scale.reshape(-1), scale
    products = launch(_rounded_product, numbers, weight, *scales, tiling=tiling, dtype=x.dtype, interpret=interpret)
    return products.reshape(*x.shape[:-1], *products.shape[1:])


def _rounded_product(numbers_ref, weight_ref, x_scale_ref, scale_ref, products_ref, *, tiling: Tiling):
    sums, token, output = sums_of(numbers_ref, weight_ref, tiling)
    M, outputs = numbers_ref.shape[0], weight_ref.shape[0]
    sums *= each(pltriton.load(x_scale_ref.at[token], mask=token < M, other=0.0), tiling.outputs)
    of_output = pltriton.load(scale_ref.at[output], mask=output < outputs, other=0.0)
    store_products(products_ref, token, output, sums * jnp.broadcast_to(of_output[None], sums.shape))
