"""Small-batch matmul with bfloat16 weights, optionally with split-K.

With few outputs, XLA's product has fewer program instances than a GPU has multiprocessors, unless it splits the sums,
and then adding the partial sums up is a launch of its own. This kernel reads such weights faster. Partial sums that go
into the residual stream are added up by the norm that follows, in its own launch."""

import functools

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import by_platform, on_hopper
from jspec.pallas.matmul.reference import matmul
from jspec.pallas.matmul.small_batch import SmallBatchTiling, multiply_tile, run_matmul, store_products

# Figures are in benchmarks/log/bf16-products.md.
# XLA's products of larger weights are as fast, and rounds in which the target reads 80 tokens are no
# slower with XLA's. Not compared: smaller weights, and a single token, whose product XLA computes as a reduction.
_TOKENS, _NUMBERS = range(2, 65), range(2**24, 2**26)


def has_bf16_kernel(x, weight) -> bool:
    """Whether the product of x ``[..., in]`` and a weight ``[out, in]`` has the kernel in a program for this GPU."""
    supported = x.size // x.shape[-1] in _TOKENS and weight.size in _NUMBERS
    return supported and x.dtype == weight.dtype == jnp.bfloat16 and on_hopper()


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def bf16_matmul(x, weight, allow_partial_sums: bool = False):
    """``bf16_matmul_reference``, and on an NVIDIA GPU the kernel.

    With ``allow_partial_sums`` the result may be partial sums, as many as the kernel's tiling has splits: ``[..., Y,
    out]`` in float32."""
    tiling = tiling_of(x, weight, allow_partial_sums)
    return by_platform(functools.partial(bf16_matmul_kernel, tiling=tiling), _reference_with(x, tiling), x, weight)


@bf16_matmul.defjvp
def _(allow_partial_sums: bool, primals, tangents):
    x, weight = primals
    return jax.jvp(_reference_with(x, tiling_of(x, weight, allow_partial_sums)), primals, tangents)


def bf16_matmul_reference(x, weight, split_inputs: int | None = None) -> jax.Array:
    """The linear map ``[..., in], [out, in] -> [..., out]`` of floats in x's dtype, added up in float32.

    With ``split_inputs`` the result is partial sums of so many inputs each, ``[..., Y, out]`` in float32, not
    rounded."""
    if split_inputs is None:
        return matmul(x, weight, None)
    cuts = [slice(begin, begin + split_inputs) for begin in range(0, x.shape[-1], split_inputs)]
    return jnp.stack([matmul(x[..., cut], weight[:, cut]) for cut in cuts], axis=-2)


def tiling_of(x, weight, allow_partial_sums: bool = False) -> SmallBatchTiling:
    """The tiling of a product, with split-K only if ``allow_partial_sums``."""
    return SmallBatchTiling.of(
        x.size // x.shape[-1], weight.shape[0], weight.shape[1], allow_partial_sums, weight.dtype.itemsize
    )


def _reference_with(x, tiling: SmallBatchTiling):
    """The reference implementation with the splits of the tiling."""
    return functools.partial(
        bf16_matmul_reference, split_inputs=tiling.split_inputs(x.shape[-1]) if tiling.num_splits > 1 else None
    )


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def bf16_matmul_kernel(x, weight, *, tiling: SmallBatchTiling, interpret=False) -> jax.Array:
    """``bf16_matmul_reference`` as a kernel, with partial sums if its tiling has several splits."""
    tokens, dtype = x.reshape(-1, x.shape[-1]), x.dtype if tiling.num_splits == 1 else jnp.float32
    products = run_matmul(_bf16_matmul, tokens, weight, tiling=tiling, dtype=dtype, interpret=interpret)
    return products.reshape(*x.shape[:-1], *products.shape[1:])


def _bf16_matmul(x_ref, weight_ref, products_ref, *, tiling: SmallBatchTiling):
    products, token, output = multiply_tile(x_ref, weight_ref, tiling)
    store_products(products_ref, token, output, products)
