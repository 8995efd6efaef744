"""What decoders share: linear maps, RMS norms, rotary positions.

Weights are stored ``[out, in]``, as on disk: a product with one row then reads them as one fused reduction.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import Rope
from jspec.models.quantized import random_weight
from jspec.pallas.attention_reference import Rotation
from jspec.pallas.dispatch import by_platform
from jspec.pallas.norm import add_norm, rms_norm


class Linear(nnx.Module):
    """``y = W x (+ b)``; W is ``weight``, ``[out, in]``, or ``scale[:, None] * weight`` where weights are quantised.

    Attributes:
      weight: ``[out, in]``, of ``dtype``, int8 or float8_e4m3fn.
      scale: float32 ``[out]``, or None for a weight of ``dtype``.
      bias: ``[out]`` of ``dtype``, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        quantization: str | None = None,
        dtype,
        rngs: nnx.Rngs,
    ):
        shape, std = (out_features, in_features), in_features**-0.5
        self.weight, self.scale = random_weight(rngs.params(), shape, std, dtype, quantization)
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None

    def __call__(self, x):
        y = project(x, self.weight[...], None if self.scale is None else self.scale[...])
        return y if self.bias is None else y + per_feature(self.bias[...], y)


def project(x, weight, scale=None):
    """``[..., in], [out, in] -> [..., out]`` in x's dtype; fp32 operands are multiplied in full fp32, never TF32.

    A quantised weight has a ``scale``, float32 ``[out]``: see ``wide_project``, whose result is rounded once.
    """
    if scale is not None:
        return wide_project(x, weight, scale).astype(x.dtype)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision)


def wide_project(x, weight, scale=None):
    """``[..., in], [out, in] -> [..., out]`` in float32, of products in x's dtype.

    Quantised numbers are exact in bfloat16 and float32, so they are multiplied as they are, and each sum is scaled: the
    conversion then takes place inside the product, and no wide copy of the weight is ever made.
    """
    if scale is None:
        return _product(x, weight)
    weight = weight.astype(x.dtype)
    y = by_platform(_two_rows, _product, x, weight) if x.size == x.shape[-1] else _product(x, weight)
    return y * per_feature(scale, y)


def _product(x, weight):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision, preferred_element_type=jnp.float32)


def _two_rows(x, weight):
    """``_product`` of one row, and of one of zeros: a GPU's matrix product converts a weight faster than XLA's
    reduction."""
    y = _product(jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0))), weight)
    return y[:1].reshape(*x.shape[:-1], -1)


class RMSNorm(nnx.Module):
    """``rms_norm`` with a weight."""

    def __init__(self, features: int, eps: float, *, dtype):
        self.weight = nnx.Param(jnp.ones(features, dtype))
        self.eps = eps

    def __call__(self, x):
        return rms_norm(x, self.weight[...], self.eps)

    def after_adding(self, x, y):
        """x + y, and its norm: the residual stream after one part of a layer, and what the next part reads."""
        return add_norm(x, y, self.weight[...], self.eps)


def per_feature(vector, like):
    """``[features]`` with the leading axes that broadcast it against ``like``; ranks are never promoted silently."""
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


def rotary_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angular frequency of each rotary pair, float32 ``[H / 2]``."""
    frequency = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3(rope, frequency)
    elif rope.kind == "yarn":
        frequency = _yarn(rope, frequency, head_dim)
    return frequency.astype(np.float32)


def _llama3(rope: Rope, frequency):
    wavelength = 2 * np.pi / frequency
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = np.where(wavelength > original / low, frequency / rope.factor, blended)
    return np.where(wavelength < original / high, frequency, scaled)


def _yarn(rope: Rope, frequency, head_dim: int):
    def pair_with(rotations):  # index of the pair that makes this many turns over the original length
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return frequency / rope.factor * ramp + frequency * (1 - ramp)


def rotation_at(positions, rope: Rope, head_dim: int) -> Rotation:
    """By positions, int32 ``[B, T]``."""
    frequency = rotary_frequencies(rope, head_dim).reshape(1, 1, -1)
    angles = positions[:, :, None].astype(jnp.float32) * frequency
    return Rotation(jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor)
