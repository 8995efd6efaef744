"""The up-projection of multi-head latent attention as its kernels and references read it (DeepSeek-V2, 2024)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas.matmul.reference import cuts_of
from jspec.quantization.groups import GROUP

_MOST_TOKENS = 512


class HeadMaps(NamedTuple):
    """The up-projection from a latent to the keys and values of each head.

    Attributes:
      keys: ``[N, Hn, Ck]``, to the numbers of keys that are not rotated.
      key_scale: what ``keys`` are multiplied by if they are quantised, float32 ``[N, Hn]``, or ``[N, Hn, groups]`` with one
        for each 128 numbers of a latent; else None.
      values: ``[N, Hv, Ck]``, to the values.
      value_scale: float32 ``[N, Hv]`` or ``[N, Hv, groups]``, or None.
    """

    keys: jax.Array
    key_scale: jax.Array | None
    values: jax.Array
    value_scale: jax.Array | None


def scale_groups(Ck: int, scale: jax.Array | None) -> list[tuple[slice, jax.Array | None]]:
    """The numbers of a latent that share scales, and these scales, float32 ``[N, n]``, or None if there are none.

    Args:
      Ck: how many numbers a latent has; the last group may not be full.
      scale: float32 ``[N, n]`` or ``[N, n, groups]``, or None.
    """
    if scale is None or scale.ndim == 2:
        return [(slice(Ck), scale)]
    return [(numbers, scale[..., group]) for group, numbers in enumerate(cuts_of(Ck, GROUP))]


def has_kernel(tokens: int, scale: jax.Array | None) -> bool:
    """Whether a kernel is to multiply so many tokens by maps of heads with such scales.

    Each program instance of these kernels reads the weights of a head again, so XLA multiplies many tokens. If scales are
    those of groups, XLA would write a product, or scaled queries, for each group, and a dequantised copy of the weight."""
    return tokens <= _MOST_TOKENS or (scale is not None and scale.ndim > 2)


def multiply_latents(equation: str, x, weight, scale, latent_scale=None) -> jax.Array:
    """Products of latents with the map of each head, ``[..., N, n]`` in the dtype of x.

    The sum over numbers that share a scale is in float32, and is multiplied by it before sums are added and rounded.

    Args:
      equation: of an einsum, with ``c`` for the numbers of a latent: ``...c,nhc->...nh`` for the same x for all heads,
        ``...nc,nhc->...nh`` for one for each.
      x: ``[..., Ck]`` or ``[..., N, Ck]``.
      weight: ``[N, n, Ck]``.
      scale: as for ``scale_groups``.
      latent_scale: what products with a latent are multiplied by before they are rounded, float32 ``[...]``; None if they
        are as they should be.
    """
    precision, total = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None, None
    for numbers, of_group in scale_groups(weight.shape[-1], scale):
        operands = x[..., numbers], weight[..., numbers].astype(x.dtype)
        sums = jnp.einsum(equation, *operands, precision=precision, preferred_element_type=jnp.float32)
        if of_group is not None:
            sums *= of_group.reshape((1,) * (sums.ndim - 2) + of_group.shape)
        total = sums if total is None else total + sums
    assert total is not None
    total = total if latent_scale is None else total * latent_scale[..., None, None]
    return total.astype(x.dtype)
