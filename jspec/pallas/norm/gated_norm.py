"""The norm of each value head of a gated delta net, times its gate, in one launch (Yang et al., 2024)."""

from jax.experimental import pallas as pl

from jspec.pallas.dispatch import differentiable, wants_one_order
from jspec.pallas.norm.qk_norm import qk_norm_kernel, times_gate
from jspec.pallas.norm.rms_norm import norm


def gated_norm(o, projected, weight, eps: float):
    """``gated_norm_reference``, and on an NVIDIA GPU the kernel where there is to be one order of sums; it is for heads
    whose size is a power of two."""
    args, Dv = (o, projected, weight), o.shape[-1]
    if not wants_one_order() or pl.next_power_of_2(Dv) != Dv:
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
    return times_gate(norm(o, weight, None, eps, "rms"), z)


def gated_norm_kernel(o, projected, weight, *, eps: float, interpret=False):
    """``gated_norm_reference`` as a kernel."""
    of_heads = (weight,) * 2, (None,) * 2, (o.shape[2], 0)
    return qk_norm_kernel(o, *of_heads, eps, "rms", projected, interpret=interpret)
