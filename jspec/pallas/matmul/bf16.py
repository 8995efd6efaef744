"""Small-batch matmul with bfloat16 weights, optionally with split-K.

With few outputs, XLA's product has fewer program instances than a GPU has multiprocessors, unless it splits the sums,
and then adding the partial sums up is a launch of its own. This kernel reads such weights faster. Partial sums that go
into the residual stream are added up by the norm that follows, in its own launch."""

import functools

import jax
import jax.numpy as jnp

from jspec.pallas.matmul.partial_sums import PartialSums, in_splits
from jspec.pallas.matmul.reference import matmul_reference
from jspec.pallas.matmul.small_batch import multiply_tile, run_by_platform, run_matmul, store_products
from jspec.pallas.matmul.tiling import MatmulTiling


def bf16_matmul(x, weight, allow_partial_sums: bool = False) -> jax.Array | PartialSums:
    """``bf16_matmul_reference``, and on an NVIDIA GPU the kernel.

    With ``allow_partial_sums`` the result may be partial sums, as many as the kernel's tiling has splits."""
    return run_by_platform(bf16_matmul_kernel, bf16_matmul_reference, x, weight, allow_partial_sums=allow_partial_sums)


def bf16_matmul_reference(x, weight, split_inputs: int | None = None) -> jax.Array | PartialSums:
    """The linear map ``[..., in], [out, in] -> [..., out]`` of floats in x's dtype, added up in float32.

    With ``split_inputs`` the result is partial sums of so many inputs each in float32, not rounded."""
    if split_inputs is None:
        return matmul_reference(x, weight, None)
    return in_splits(lambda cut: matmul_reference(x[..., cut], weight[:, cut]), x.shape[-1], split_inputs)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def bf16_matmul_kernel(x, weight, *, tiling: MatmulTiling, interpret=False) -> jax.Array | PartialSums:
    """``bf16_matmul_reference`` as a kernel, with partial sums if its tiling has several splits."""
    dtype = x.dtype if tiling.num_splits == 1 else jnp.float32
    return run_matmul(_bf16_matmul, x, weight, tiling=tiling, dtype=dtype, interpret=interpret)


def _bf16_matmul(x_ref, weight_ref, products_ref, *, tiling: MatmulTiling):
    products, token, output = multiply_tile(x_ref, weight_ref, tiling)
    store_products(products_ref, token, output, products)
