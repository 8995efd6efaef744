"""The product of two floating-point operands, by which the matmul kernels are defined."""

import functools
import math

import jax
import jax.numpy as jnp

# On a CPU, where XLA has other orders of sums for fewer.
FEWEST_OUTPUTS = 8


def matmul_reference(x, weight, dtype=jnp.float32):
    """The linear map ``[..., in], [out, in] -> [..., out]`` of operands of one dtype, in ``dtype``, or in theirs if that
    is None. fp32 is multiplied in full fp32, never in TF32."""
    product = functools.partial(
        jnp.einsum, "...i,oi->...o", precision=full_precision(x.dtype), preferred_element_type=dtype
    )
    tokens = math.prod(x.shape[:-1])
    if tokens == 0 or (tokens > 1 and len(weight) >= FEWEST_OUTPUTS):
        return product(x, weight)
    return jax.lax.platform_dependent(x, weight, cpu=functools.partial(_padded, product), default=product)


def rows_product(x, y, axis: int) -> jax.Array:
    """Products of matrices in float32, ``[..., M, n]``: ``x [..., M, K]`` with ``y [..., n, K]`` if ``axis`` is -1, or with
    ``[..., K, n]`` if it is -2.

    A row of x has the same bits among any number of others on a CPU, where XLA chooses its kernel by the columns of the
    right operand: so rows have to be those of the left one."""
    batch = tuple(range(x.ndim - 2))

    def product(x, y, axis=axis):
        dims = ((x.ndim - 1,), (y.ndim + axis,)), (batch, batch)
        precision = full_precision(x.dtype)
        return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    def padded(x, y):
        (M, _), outputs = x.shape[-2:], y.shape[-3 - axis]
        if axis == -2:  # behind a barrier, so that XLA multiplies what is written there
            y = jax.lax.optimization_barrier(jnp.swapaxes(y, -1, -2))
        by_row = [(0, 0)] * len(batch), [(0, 0)]
        x = jnp.pad(x, [*by_row[0], (0, max(2 - M, 0)), *by_row[1]])
        y = jnp.pad(y, [*by_row[0], (0, max(FEWEST_OUTPUTS - outputs, 0)), *by_row[1]])
        return product(x, y, -1)[..., :M, :outputs]

    return jax.lax.platform_dependent(x, y, cpu=padded, default=product)


def full_precision(dtype) -> jax.lax.Precision | None:
    """That of products of operands of a dtype: fp32 is multiplied in full fp32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _padded(product, x, weight):
    """A product with a second token and further outputs, of zeros, that are discarded: XLA has another order of sums on a
    CPU for one token and for very few outputs."""
    tokens, outputs = math.prod(x.shape[:-1]), len(weight)
    lines = jnp.pad(x.reshape(tokens, -1), ((0, max(2 - tokens, 0)), (0, 0)))
    wide = jnp.pad(weight, ((0, max(FEWEST_OUTPUTS - outputs, 0)), (0, 0)))
    return product(lines, wide)[:tokens, :outputs].reshape(*x.shape[:-1], outputs)


def per_feature(vector, like):
    """``vector [features]`` reshaped to ``[1, ..., 1, features]``, which broadcasts against ``like [..., features]``.

    Tests run with JAX's implicit rank promotion forbidden.
    """
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)
