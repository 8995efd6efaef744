"""Products of a few tokens with weights of bfloat16, which stream from memory to the tensor cores as they are stored.

XLA's product of a weight with few outputs has fewer programs than a GPU has multiprocessors, unless it splits the sums, and
then adding the parts up is a launch of its own. This kernel reads such weights faster. What it computes for the residual
stream may come in parts, which the norm that follows adds up in its own launch."""

import functools

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import by_platform, on_hopper
from jspec.pallas.matmul.small_batch import Tiling, launch, store_products, sums_of
from jspec.pallas.matmul.weight_only import product

# Figures are in benchmarks/log/bf16-products.md.
# XLA's products of larger weights are as fast, and rounds in which the target reads 80 tokens are no
# slower with XLA's. Not compared: smaller weights, and a single token, whose product XLA computes as a reduction.
_TOKENS, _NUMBERS = range(2, 65), range(2**24, 2**26)


def streams(x, weight) -> bool:
    """Whether the product of x ``[..., in]`` and a weight ``[out, in]`` has the kernel in a program for this GPU."""
    served = x.size // x.shape[-1] in _TOKENS and weight.size in _NUMBERS
    return served and x.dtype == weight.dtype == jnp.bfloat16 and on_hopper()


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def streamed_product(x, weight, in_parts: bool = False):
    """``streamed_product_reference``, and on an NVIDIA GPU the kernel.

    With ``in_parts`` results may be in parts, as many as the kernel's tiling has: ``[..., Y, out]`` in float32."""
    tiling = tiling_of(x, weight, in_parts)
    return by_platform(functools.partial(streamed_product_kernel, tiling=tiling), _as_defined(x, tiling), x, weight)


@streamed_product.defjvp
def _(in_parts: bool, primals, tangents):
    x, weight = primals
    return jax.jvp(_as_defined(x, tiling_of(x, weight, in_parts)), primals, tangents)


def streamed_product_reference(x, weight, step: int | None = None) -> jax.Array:
    """The linear map ``[..., in], [out, in] -> [..., out]`` of floats in x's dtype, added up in float32.

    With ``step``, so many inputs make a part of the results, ``[..., Y, out]`` in float32: sums that are not rounded yet."""
    if step is None:
        return product(x, weight, None)
    cuts = [slice(begin, begin + step) for begin in range(0, x.shape[-1], step)]
    return jnp.stack([product(x[..., cut], weight[:, cut]) for cut in cuts], axis=-2)


def tiling_of(x, weight, in_parts: bool = False) -> Tiling:
    """The tiling of a product, in several parts only with ``in_parts``."""
    return Tiling.of(x.size // x.shape[-1], weight.shape[0], weight.shape[1], in_parts, weight.dtype.itemsize)


def _as_defined(x, tiling: Tiling):
    """The reference implementation, in the parts of the tiling."""
    return functools.partial(streamed_product_reference, step=tiling.step(x.shape[-1]) if tiling.parts > 1 else None)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def streamed_product_kernel(x, weight, *, tiling: Tiling, interpret=False) -> jax.Array:
    """``streamed_product_reference`` as a kernel, in parts if its tiling has several."""
    tokens, dtype = x.reshape(-1, x.shape[-1]), x.dtype if tiling.parts == 1 else jnp.float32
    products = launch(_streamed_product, tokens, weight, tiling=tiling, dtype=dtype, interpret=interpret)
    return products.reshape(*x.shape[:-1], *products.shape[1:])


def _streamed_product(x_ref, weight_ref, products_ref, *, tiling: Tiling):
    products, token, output = sums_of(x_ref, weight_ref, tiling)
    store_products(products_ref, token, output, products)
