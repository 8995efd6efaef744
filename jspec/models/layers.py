"""The parts that decoders share: linear maps, norms, activations and rotary position embeddings.

Weights are stored ``[out, in]``, as in checkpoints. XLA then computes the product of a small weight with a single token
as one fused reduction over the weight."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import Rope
from jspec.models.quantization import random_weight
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul.bf16 import bf16_matmul, has_bf16_kernel
from jspec.pallas.matmul.quantize_activations import QuantizedActivations, quantize_tokens
from jspec.pallas.matmul.reference import matmul
from jspec.pallas.matmul.w8a8 import w8a8_matmul
from jspec.pallas.matmul.weight_only import has_weight_only_kernel, weight_only_matmul
from jspec.pallas.norm.rms_norm import add_norm, norm
from jspec.quantization import int4

# On a GPU, a product with a single token is computed as a reduction where the weight has more numbers than this, and no more
# input features. On an H200 a reduction of bfloat16 weights is up to 15% faster than the matrix product that XLA makes
# ([28672, 4096]: 57.9 us and 62.8), but slower with longer sums ([5120, 25600]: 72.6 us and 66.9). Of smaller weights XLA
# makes a reduction by itself. ``benchmarks/log/bf16-products.md`` has the times.
_REDUCED_ABOVE, _LONGEST_SUM = 10_000_000, 16_384


class Linear(nnx.Module):
    """``y = W x (+ b)``, where W is ``weight``, dequantised by ``scale`` if the weight is quantised.

    Attributes:
      weight: ``[out, in]`` of ``dtype``. A quantised one is int8 or float8_e4m3fn, or packed codes of four bits, uint8
        ``[out, 64 groups]``.
      scale: float32 ``[out]``, bfloat16 ``[out, groups]`` of a weight of four bits. None for one that is not quantised.
      bias: ``[out]`` of ``dtype``, or None.
      reduce_axis: the mesh axis whose shards have parts of the inputs each, and over which products are therefore added
        up; None if all inputs are here.
      quantize_inputs: whether x is quantised to int8, as the weight is (``jspec.models.w8a8``). x may already be
        ``QuantizedActivations``.
      allow_partial_sums: whether ``y`` may be partial sums, ``[..., Y, out]``, because it is added to the residual
        stream by ``jspec.pallas.norm.rms_norm.reduce_partial_sums``. Not if a bias is added before that, or shards add
        it up.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        quantization: str | None = None,
        reduce_axis: str | None = None,
        allow_partial_sums: bool = False,
        dtype,
        rngs: nnx.Rngs,
    ):
        shape, std = (out_features, in_features), in_features**-0.5
        self.weight, self.scale = random_weight(rngs.params(), shape, std, dtype, quantization)
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None
        self.reduce_axis, self.quantize_inputs, self.allow_partial_sums = (
            reduce_axis,
            False,
            allow_partial_sums and reduce_axis is None and not bias,
        )

    def __call__(self, x):
        weight = self.weight[...]
        if self.bias is not None and self.scale is None and self.reduce_axis is None and _is_reduced(x, weight):
            return by_platform(_reduction, _matmul_with_bias, x, weight, self.bias[...])
        scale = None if self.scale is None else self.scale[...]
        if self.quantize_inputs:
            y = w8a8_matmul(
                x if isinstance(x, QuantizedActivations) else quantize_tokens(x), weight, scale, self.allow_partial_sums
            )
        elif scale is None and self.bias is None and has_bf16_kernel(x, weight):  # a bias would be a launch more
            y = bf16_matmul(x, weight, self.allow_partial_sums)
        else:
            y = project(x, weight, scale)
        y = all_reduce(y, self.reduce_axis)
        return y if self.bias is None else y + per_feature(self.bias[...], y)


def _matmul_with_bias(x, weight, bias):
    return (y := _matmul_in_dtype(x, weight)) + per_feature(bias, y)


def all_reduce(x, reduce_axis: str | None):
    """The sum of x over the shards along a mesh axis, the same bits in each; x itself if ``reduce_axis`` is None."""
    return x if reduce_axis is None else jax.lax.psum(x, reduce_axis)


def project(x, weight, scale=None):
    """The linear map ``[..., in], [out, in] -> [..., out]`` in x's dtype. fp32 is multiplied in full fp32, never in
    TF32.

    A quantised weight has a ``scale``. Its product is computed as for ``project_float32`` and rounded once."""
    if scale is not None:
        return _quantized_matmul(x, weight, scale, x.dtype)
    if _is_reduced(x, weight):
        return by_platform(_reduction, _matmul_in_dtype, x, weight)
    return _matmul_in_dtype(x, weight)


def project_float32(x, weight, scale=None):
    """The linear map ``[..., in], [out, in] -> [..., out]`` in float32, of operands in x's dtype.

    int8 and fp8 numbers are exact in bfloat16 and float32. They are therefore multiplied as they are, and each sum is
    multiplied by the scale of its output channel. The conversion takes place inside the product, so no converted copy of
    the weight is ever written. Codes of four bits stand for numbers that are rounded to x's dtype."""
    return matmul(x, weight) if scale is None else _quantized_matmul(x, weight, scale, jnp.float32)


def _quantized_matmul(x, weight, scale, dtype):
    if weight.dtype == int4.STORED or has_weight_only_kernel(x, weight):
        return weight_only_matmul(x, weight, scale, dtype)
    weight = weight.astype(x.dtype)
    one_token = x.size == x.shape[-1]
    y = by_platform(_padded_matmul, matmul, x, weight) if one_token else matmul(x, weight)
    return (y * per_feature(scale, y)).astype(dtype)


def _matmul_in_dtype(x, weight):
    return matmul(x, weight, None)


def _is_reduced(x, weight) -> bool:
    return x.size == x.shape[-1] and weight.size > _REDUCED_ABOVE and weight.shape[1] <= _LONGEST_SUM


def _reduction(x, weight, bias=None):
    """``project`` of a single token as a sum over products in float32, which XLA computes in one pass over the weight.

    A bias is added to the products with the first input feature. Added to the sum, it would be a launch of its own."""
    products = weight.astype(jnp.float32) * x.astype(jnp.float32).reshape(1, -1)
    if bias is not None:
        first = jax.lax.broadcasted_iota(jnp.int32, weight.shape, 1) == 0
        products += jnp.where(first, bias.astype(jnp.float32)[:, None], 0.0)
    return jnp.sum(products, axis=1).astype(x.dtype).reshape(*x.shape[:-1], -1)


def _padded_matmul(x, weight):
    """``matmul`` of a single token, computed as the product of two tokens, of which the second is zero.

    On a GPU that becomes a matrix product instead of a reduction, and a matrix product converts the weight faster."""
    y = matmul(jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0))), weight)
    return y[:1].reshape(*x.shape[:-1], -1)


class Norm(nnx.Module):
    """A norm over the last axis, of a kind of ``jspec.pallas.norm.rms_norm``.

    Attributes:
      weight: ``[features]`` of ``dtype``.
      bias: ``[features]`` of ``dtype`` for the kind ``layer``, or None.
      reduce_axis: the mesh axis whose shards have a part of the numbers each; None if all are here.
      quantize_outputs: whether normed numbers are ``QuantizedActivations``, because only maps with
        ``Linear.quantize_inputs`` read them.
    """

    def __init__(self, features: int, eps: float, kind: str = "rms", *, reduce_axis: str | None = None, dtype):
        start = jnp.zeros if kind == "rms_offset" else jnp.ones
        self.weight = nnx.Param(start(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype)) if kind == "layer" else None
        self.eps, self.kind, self.reduce_axis, self.quantize_outputs = eps, kind, reduce_axis, False

    def __call__(self, x) -> Any:
        normed = norm(x, self.weight[...], self._bias, self.eps, self.kind, self.reduce_axis)
        return quantize_tokens(normed) if self.quantize_outputs else normed

    def after_adding(self, x, y) -> tuple[jax.Array, Any]:
        """(x + y, norm of x + y): the residual stream x with the output y of a layer, and the inputs of the next part. y
        may be partial sums, as for ``jspec.pallas.norm.rms_norm.reduce_partial_sums``."""
        return add_norm(x, y, self.weight[...], self._bias, self.eps, self.kind, self.quantize_outputs)

    @property
    def scale(self) -> jax.Array:
        """The factors of normed numbers, ``[features]``."""
        return 1 + self.weight[...] if self.kind == "rms_offset" else self.weight[...]

    @property
    def _bias(self):
        return None if self.bias is None else self.bias[...]


# The activations that a config may name, by that name.
ACTIVATE = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": lambda x: jnp.where(x <= 0, jnp.zeros((), x.dtype), x),  # NaN stays, unlike in a maximum of a kernel
}
ACTIVATED_IN_KERNELS = ("silu", "gelu_tanh", "relu")  # Pallas' Triton lowering has no ``erfc``, which ``gelu`` needs


def times(x, number: float):
    """``number * x`` in the dtype of x, multiplied in fp32; x itself if the number is 1."""
    return x if number == 1 else (x.astype(jnp.float32) * number).astype(x.dtype)


def per_feature(vector, like):
    """``vector [features]`` reshaped to ``[1, ..., 1, features]``, which broadcasts against ``like [..., features]``.

    Tests run with JAX's implicit rank promotion forbidden.
    """
    return vector.reshape((1,) * (like.ndim - 1) + vector.shape)


def rotary_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angular frequency of each rotary pair, float32 ``[H / 2]`` or less, in radians for each position."""
    rotated = rope.rotary_dim(head_dim)
    frequency = rope.theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3(rope, frequency)
    elif rope.kind == "yarn":
        frequency = _yarn(rope, frequency, rotated)
    elif rope.kind == "longrope":
        frequency = frequency / np.asarray(rope.long_factors if rope.long_texts else rope.short_factors)
    return frequency.astype(np.float32)


def _llama3(rope: Rope, frequency):
    wavelength = 2 * np.pi / frequency
    low, high, original = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequency / rope.factor + smooth * frequency
    scaled = np.where(wavelength > original / low, frequency / rope.factor, blended)
    return np.where(wavelength < original / high, frequency, scaled)


def _yarn(rope: Rope, frequency, head_dim: int):
    def pair_with(rotations):  # index of the rotary pair that makes this many turns over the original length
        return head_dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return frequency / rope.factor * ramp + frequency * (1 - ramp)


def rotation_at(positions, rope: Rope | None, head_dim: int) -> Rotation | None:
    """Cosines and sines of the rotary embedding at int32 positions ``[B, T]``, each float32 ``[B, T, H / 2]``.

    They are ``[B, T, r / 2]`` if only the first r numbers of a head are rotated. Without a ``rope`` there are none."""
    if rope is None:
        return None
    frequency = rotary_frequencies(rope, head_dim).reshape(1, 1, -1)
    angles = positions[:, :, None].astype(jnp.float32) * frequency
    return Rotation(jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor)
