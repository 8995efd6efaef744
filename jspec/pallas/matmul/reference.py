"""The product of two floating-point operands, by which the matmul kernels are defined."""

import jax.numpy as jnp

from jspec.pallas.sums import linear


def matmul_reference(x, weight, dtype=jnp.float32):
    """The linear map ``[..., in], [out, in] -> [..., out]`` of operands of one dtype, in ``dtype``, or in theirs if that
    is None. fp32 is multiplied in full fp32, never in TF32."""
    return linear(x, weight, dtype)


def per_feature(vector, like):
    """``vector [features]`` reshaped to ``[1, ..., 1, features]``, which broadcasts against ``like [..., features]``.

    Tests run with JAX's implicit rank promotion forbidden.
    """
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)
