"""A residual sum and the RMS norm that reads it, in one launch."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import block_ids, kernel_call, load_block, store_block

_NUMBERS = 512  # numbers of a token that one warp has


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def add_norm(x, y, weight, eps: float):
    """``add_norm_reference``, and on an NVIDIA GPU the kernel."""
    return by_platform(
        functools.partial(add_norm_kernel, eps=eps), functools.partial(add_norm_reference, eps=eps), x, y, weight
    )


@add_norm.defjvp
def _(eps: float, primals, tangents):
    return jax.jvp(functools.partial(add_norm_reference, eps=eps), primals, tangents)


def add_norm_reference(x, y, weight, eps: float):
    """x + y ``[..., D]`` in their dtype, and ``rms_norm`` of it."""
    x = x + y
    return x, rms_norm(x, weight, eps)


def rms_norm(x, weight, eps: float):
    """Root-mean-square norm of ``[..., D]`` (Zhang and Sennrich, 2019) in fp32, then times ``weight`` in the dtype of
    x."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))  # layers share one trace
def add_norm_kernel(x, y, weight, eps: float, *, interpret=False):
    """``add_norm_reference`` as a kernel; each of its programs has one token."""
    D = x.shape[-1]
    size = pl.next_power_of_2(D)
    tokens = x.size // D
    shape = jax.ShapeDtypeStruct((tokens, D), x.dtype)
    added, normed = kernel_call(
        _add_norm,
        *(x.reshape(tokens, D), y.reshape(tokens, D), weight),
        grid=(tokens,),
        out_shape=[shape, shape],
        num_warps=min(max(size // _NUMBERS, 1), 16),
        interpret=interpret,
        size=size,
        eps=eps,
    )
    return added.reshape(x.shape), normed.reshape(x.shape)


def _add_norm(x_ref, y_ref, weight_ref, added_ref, normed_ref, *, size: int, eps: float):
    token, D, ids = (pl.program_id(0),), x_ref.shape[1], block_ids(0, size)
    x, y = (load_block(ref, token, 0, ids, D, other=0.0) for ref in (x_ref, y_ref))
    weight = load_block(weight_ref, (), 0, ids, D, other=0.0)
    x = x + y
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.sum(x32 * x32) / D + eps)
    store_block(added_ref, token, 0, ids, D, x)
    store_block(normed_ref, token, 0, ids, D, normed.astype(x.dtype) * weight)
