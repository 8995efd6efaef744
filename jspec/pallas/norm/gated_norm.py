"""The norm of each value head of a gated delta net, times its gate, in one launch (Yang et al., 2024)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import differentiable
from jspec.pallas.norm.rms_norm import norm
from jspec.pallas.triton import broadcast_columns, kernel_call, line_indices

_WARP_NUMBERS, _LINE = 1024, 512  # for a warp; bytes of a head that a warp has by itself among several
_FEW = 4096  # heads of tokens, up to which instances have one warp


def gated_norm(o, projected, weight, eps: float):
    """``gated_norm_reference``, and on an NVIDIA GPU the kernel, which is for heads whose size is a power of two."""
    args, Dv = (o, projected, weight), o.shape[-1]
    if pl.next_power_of_2(Dv) != Dv or Dv > _WARP_NUMBERS:
        return gated_norm_reference(*args, eps)
    return differentiable(gated_norm_kernel, gated_norm_reference, *args, eps=eps)


def gated_norm_reference(o, projected, weight, eps: float):
    """RMSNorm of each value head's output, times ``silu(z)``, ``[B, T, Nv, Dv]`` in the dtype of ``o``.

    The norm is of the kind ``rms`` of ``jspec.pallas.norm.rms_norm``; the weight is not added to 1, though that of all
    other norms of these models is. The gate comes after the norm and is computed in float32.

    Args:
      o: ``[B, T, Nv, Dv]``, outputs of the recurrence.
      projected: ``[B, T, Nv Dv or more]``, of which the last Nv Dv are the gate z.
      weight: ``[Dv]``.
      eps: added to the mean square.
    """
    z = projected[:, :, projected.shape[2] - o.shape[2] * o.shape[3] :].reshape(o.shape)
    return _gated(o, z, weight, eps)


def _gated(o, z, weight, eps: float):
    z = z.astype(jnp.float32)
    return (norm(o, weight, None, eps, "rms").astype(jnp.float32) * (z * jax.nn.sigmoid(z))).astype(o.dtype)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))  # layers share one trace
def gated_norm_kernel(o, projected, weight, *, eps: float, interpret=False) -> jax.Array:
    """``gated_norm_reference`` as a kernel; a program instance has some heads of tokens. A warp has equally many whatever
    their number is, because the order of a sum follows from that."""
    B, T, Nv, Dv = o.shape
    heads = B * T * Nv
    num_warps = 1 if heads <= _FEW or Dv * o.dtype.itemsize > _LINE else 4
    block = num_warps * _WARP_NUMBERS // Dv
    out = kernel_call(
        _gated_norm,
        *(o.reshape(heads, Dv), projected.reshape(B * T, -1), weight),
        grid=(pl.cdiv(heads, block),),
        out_shape=jax.ShapeDtypeStruct((heads, Dv), o.dtype),
        num_warps=num_warps,
        interpret=interpret,
        block=block,
        eps=eps,
    )
    return out.reshape(o.shape)


def _gated_norm(o_ref, projected_ref, weight_ref, out_ref, *, block: int, eps: float):
    (heads, Dv), (M, width) = o_ref.shape, projected_ref.shape
    at = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    real, Nv = at < heads, jnp.int32(heads // M)
    # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
    line, column = line_indices(jnp.where(real, at, heads), Dv)
    mask, first = broadcast_columns(real, Dv), width - heads // M * Dv
    token, start = (broadcast_columns(x, Dv) for x in (jax.lax.div(at, Nv), first + jax.lax.rem(at, Nv) * Dv))
    o = pltriton.load(o_ref.at[line, column], mask=mask, other=0.0)
    z = pltriton.load(projected_ref.at[token, start + column], mask=mask, other=0.0)
    pltriton.store(out_ref.at[line, column], _gated(o, z, weight_ref[...], eps), mask=mask)
