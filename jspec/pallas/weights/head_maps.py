"""The up-projection of multi-head latent attention as its kernels and references read it (DeepSeek-V2, 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas.sums import linear, rows_product
from jspec.quantization.weight import Weight


class HeadMaps(NamedTuple):
    """The up-projection from a latent of Ck numbers to the keys and values of each of N heads, as it is stored.

    Attributes:
      keys: ``[N, Hn, Ck]``, to the numbers of keys that are not rotated.
      values: ``[N, Hv, Ck]``, to the numbers of values.
    """

    keys: Weight
    values: Weight


def multiply_latents(x, of: Weight, of_each: bool, latent_scale=None) -> jax.Array:
    """Products of latents with the map of each head, ``[..., N, n]`` in the dtype of x. Sums are in float32.

    Args:
      x: ``[..., Ck]``, or ``[..., N, Ck]`` if ``of_each``.
      of: the map. If it has a scale for each output channel, this multiplies the sums.
      of_each: whether each head has an x of its own.
      latent_scale: what products with a latent are multiplied by before they are rounded, float32 ``[...]``; None if they
        are as they should be.
    """
    if of.in_groups:
        # Float32 holds what codes and numbers of eight bits stand for, so that only sums are rounded.
        wide = of.dequantize(rounded=x.dtype == jnp.bfloat16)
        sums = _products(x.astype(jnp.float32), wide, of_each)
    else:
        sums = _products(x, of.numbers.astype(x.dtype), of_each)
        if of.scale is not None:
            sums *= of.scale.reshape((1,) * (sums.ndim - 2) + of.scale.shape)
    sums = sums if latent_scale is None else sums * latent_scale[..., None, None]
    return sums.astype(x.dtype)


def _products(x, weight, of_each: bool) -> jax.Array:
    """Float32 ``[..., N, n]`` of the map ``weight [N, n, Ck]``."""
    N, _, Ck = weight.shape
    if not of_each:
        return linear(x, weight.reshape(-1, Ck), jnp.float32).reshape(*x.shape[:-1], N, -1)
    by_head = rows_product(jnp.moveaxis(x.reshape(-1, N, Ck), 1, 0), weight, -1)
    return jnp.moveaxis(by_head, 0, 1).reshape(*x.shape[:-1], -1)
