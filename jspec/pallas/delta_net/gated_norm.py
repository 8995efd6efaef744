"""The norm of a gated delta net's outputs, multiplied by their gate."""

import jax
import jax.numpy as jnp

from jspec.pallas.norm.rms_norm import norm


def gated_norm(o, z, weight, eps: float):
    """RMSNorm of each value head's output, times ``silu(z)``, ``[..., Nv, Dv]`` in the dtype of ``o``.

    The norm is of the kind ``rms`` of ``jspec.pallas.norm.rms_norm``; the weight is not added to 1, though that of all
    other norms of these models is. The gate comes after the norm and is computed in float32.

    Args:
      o: ``[..., Nv, Dv]``, outputs of the recurrence.
      z: ``[..., Nv, Dv]``, the gate.
      weight: ``[Dv]``.
      eps: added to the mean square.
    """
    normed = norm(o, weight, None, eps, "rms")
    return (normed.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))).astype(o.dtype)
