"""The up-projection of multi-head latent attention as its kernels and references read it (DeepSeek-V2, 2024)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.quantization.weight import dequantize

_MOST_TOKENS = 512


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadMap:
    """A linear map from a latent to n numbers of each of N heads, as it is stored (``jspec.quantization``).

    Attributes:
      rank: Ck, how many numbers a latent has.
      weight: ``[N, n, Ck]``; of codes of four bits uint8 ``[N, n, 64 blocks]``.
      scale: what ``weight`` is multiplied by if it is quantised: float32 ``[N, n]``; or in the dtype of its format ``[N, n,
        groups]``, one for each group of numbers of a latent, or with zeros ``[N, n, groups, 2]``. Else None.
      channel_scale: of NVFP4 float32 ``[N, n, 2]``; else None.
      order: int32 ``[Ck]``, which number of a latent each input of the weight is, where that has them in another order; else
        None.
    """

    rank: int = dataclasses.field(metadata={"static": True})
    weight: Any
    scale: Any = None
    channel_scale: Any = None
    order: Any = None

    @property
    def size(self) -> int:
        """n."""
        return self.weight.shape[1]

    @property
    def in_groups(self) -> bool:
        """Whether groups of numbers of a latent share scales, as in FP8 blocks and in codes."""
        return self.scale is not None and len(self.scale.shape) > 2

    @property
    def numbers(self) -> jax.Array:
        """What it stands for, float32 ``[N, n, Ck]``."""
        numbers = dequantize(self.weight, self.scale, self.rank, self.channel_scale)
        return numbers if self.order is None else numbers.at[..., self.order].set(numbers)

    @property
    def flat(self) -> "HeadMap":
        """The same with one head after another, as kernels read it: arrays ``[N n, ...]``, the bits of scales of eight bits,
        and scales of output channels as those of a single group."""

        def joined(array):
            return None if array is None else array.reshape(-1, *(array.shape[2:] or (1,)))

        scale = self.scale
        if self.channel_scale is not None:
            scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)  # Triton would not fill masked places of fp8
        return HeadMap(self.rank, joined(self.weight), joined(scale), joined(self.channel_scale), self.order)


class HeadMaps(NamedTuple):
    """The up-projection from a latent to the keys and values of each head.

    Attributes:
      keys: to the Hn numbers of keys that are not rotated.
      values: to the Hv numbers of values.
    """

    keys: HeadMap
    values: HeadMap


def has_kernel(tokens: int, of: HeadMap) -> bool:
    """Whether a kernel is to multiply so many tokens by a map of heads.

    Each program instance of these kernels reads the weights of a head again, so XLA multiplies many tokens. If scales are
    those of groups, XLA would write a dequantised copy of the weight."""
    return tokens <= _MOST_TOKENS or of.in_groups


def multiply_latents(equation: str, x, of: HeadMap, latent_scale=None) -> jax.Array:
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
        sums = jnp.einsum(equation, x.astype(jnp.float32), of.numbers, precision=jax.lax.Precision.HIGHEST)
    else:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        operands = x, of.weight.astype(x.dtype)
        sums = jnp.einsum(equation, *operands, precision=precision, preferred_element_type=jnp.float32)
        if of.scale is not None:
            sums *= of.scale.reshape((1,) * (sums.ndim - 2) + of.scale.shape)
    sums = sums if latent_scale is None else sums * latent_scale[..., None, None]
    return sums.astype(x.dtype)
