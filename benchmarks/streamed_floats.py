"""The kernel of ``jspec.pallas.streamed_product`` for floats, to be timed beside the products that XLA makes of them.

No model uses it; ``benchmarks.narrow_products`` does."""

import functools

import jax
import jax.numpy as jnp

from jspec.pallas.narrow_product import product
from jspec.pallas.streamed_product import Tiling, launch, store_products, sums_of


def streamed_product_reference(x, weight, step: int | None = None) -> jax.Array:
    """The linear map ``[M, in], [out, in] -> [M, out]`` of floats in x's dtype, added up in float32.

    With ``step``, so many inputs make a part of the results, ``[M, Y, out]`` in float32: sums that are not rounded yet."""
    if step is None:
        return product(x, weight, None)
    cuts = [slice(begin, begin + step) for begin in range(0, x.shape[-1], step)]
    return jnp.stack([product(x[:, cut], weight[:, cut]) for cut in cuts], axis=1)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def streamed_product_kernel(x, weight, *, tiling: Tiling, interpret=False) -> jax.Array:
    """``streamed_product_reference`` as a kernel, in parts if its tiling has several."""
    dtype = x.dtype if tiling.parts == 1 else jnp.float32
    return launch(_streamed_product, x, weight, tiling=tiling, dtype=dtype, interpret=interpret)


def _streamed_product(x_ref, weight_ref, products_ref, *, tiling: Tiling):
    products, token, output = sums_of(x_ref, weight_ref, tiling)
    store_products(products_ref, token, output, products)
