"""The up-projection of multi-head latent attention as its kernels and references read it (DeepSeek-V2, 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.quantization.weight import Weight


class HeadMaps(NamedTuple):
    """The up-projection from a latent of Ck numbers to the keys and values of each of N heads, as it is stored.

    Attributes:
      keys: ``[N, Hn, Ck]``, to the numbers of keys that are not rotated.
      values: ``[N, Hv, Ck]``, to the numbers of values.
    """

    keys: Weight
    values: Weight


def multiply_latents(equation: str, x, of: Weight, latent_scale=None) -> jax.Array:
    """Products of latents with the map of each head, ``[..., N, n]`` in the dtype of x. Sums are in float32.

    Args:
      equation: of an einsum, with ``c`` for the numbers of a latent: ``...c,nhc->...nh`` for the same x for all heads,
        ``...nc,nhc->...nh`` for one for each.
      x: ``[..., Ck]`` or ``[..., N, Ck]``.
      of: the map. If it has a scale for each output channel, this multiplies the sums.
      latent_scale: what products with a latent are multiplied by before they are rounded, float32 ``[...]``; None if they
        are as they should be.
    """
    if of.in_groups:
        # Float32 holds what codes and numbers of eight bits stand for, so that only sums are rounded.
        wide = of.dequantize(rounded=x.dtype == jnp.bfloat16)
        sums = jnp.einsum(equation, x.astype(jnp.float32), wide, precision=jax.lax.Precision.HIGHEST)
    else:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        operands = x, of.numbers.astype(x.dtype)
        sums = jnp.einsum(equation, *operands, precision=precision, preferred_element_type=jnp.float32)
        if of.scale is not None:
            sums *= of.scale.reshape((1,) * (sums.ndim - 2) + of.scale.shape)
    sums = sums if latent_scale is None else sums * latent_scale[..., None, None]
    return sums.astype(x.dtype)
