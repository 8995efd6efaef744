"""Products of a single token that a GPU computes faster than XLA's matrix product, without a kernel of ours."""

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul.reference import matmul_reference, per_feature


def reduction_matmul(x, weight, bias=None):
    """The product with a floating-point weight ``[out, in]``, plus a bias ``[out]`` if there is one, in x's dtype: on an
    NVIDIA GPU as a sum over products in float32, which XLA computes in one pass over the weight."""
    return by_platform(_reduction, _product_and_bias, x, weight, *(() if bias is None else (bias,)))


def _product_and_bias(x, weight, bias=None):
    y = matmul_reference(x, weight, None)
    return y if bias is None else y + per_feature(bias, y)


def _reduction(x, weight, bias=None):
    """A bias is added to the products with the first input feature. Added to the sum, it would be a launch of its own."""
    products = weight.astype(jnp.float32) * x.astype(jnp.float32).reshape(1, -1)
    if bias is not None:
        first = jax.lax.broadcasted_iota(jnp.int32, weight.shape, 1) == 0
        products += jnp.where(first, bias.astype(jnp.float32)[:, None], 0.0)
    return jnp.sum(products, axis=1).astype(x.dtype).reshape(*x.shape[:-1], -1)


def padded_matmul(x, weight, scale, dtype):
    """The product with an int8 or float8_e4m3fn weight ``[out, in]`` and its scales ``[out]``, in ``dtype``: on an NVIDIA
    GPU as the product of two tokens, of which the second is zero. That is a matrix product instead of a reduction, and a
    matrix product converts the weight faster."""
    y = by_platform(_padded, matmul_reference, x, weight.astype(x.dtype))
    return (y * per_feature(scale, y)).astype(dtype)


def _padded(x, weight):
    y = matmul_reference(jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0))), weight)
    return y[:1].reshape(*x.shape[:-1], -1)
