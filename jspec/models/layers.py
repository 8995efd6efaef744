"""The parts that decoders share: linear maps, norms, activations and rotary position embeddings.

Weights are stored ``[out, in]``, as in checkpoints. XLA then computes the product of a small weight with a single token
as one fused reduction over the weight."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jspec.config import ModelConfig, Rope
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.collectives.peer_sum import KINDS
from jspec.pallas.collectives.peers import Peers
from jspec.pallas.dispatch import of_platform, wants_one_order
from jspec.pallas.matmul import matmul
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.quantize_activations import quantize_tokens
from jspec.pallas.norm.rms_norm import SumOptions, add_norm, norm, norm_tokens
from jspec.quantization.formats import Format, known_format
from jspec.quantization.weight import Weight, random_weight


class Linear(nnx.Module):
    """``y = W x (+ b)``, where W is ``weight``, dequantised by ``scale`` if the weight is quantised.

    Attributes:
      weight, scale, channel_scale, order, input_scale: the arrays of a ``Weight [out, in]``: ``numbers`` of ``dtype`` if it
        is not quantised, and None for those that its format does not have.
      bias: ``[out]`` of ``dtype``, or None.
      reduce_axis: the mesh axis whose shards have parts of the inputs each, and over which products are therefore added
        up; None if all inputs are here.
      quantize_inputs: ``int8`` or ``fp8`` if x is quantised to that, as the weight is (``jspec.models.w8a8``), None if
        not. x may already be ``QuantizedActivations``.
      scale_axis: the mesh axis over whose shards an x that is quantised has one scale for each token; None for a scale
        of the inputs that are here.
      allow_partial_sums: whether ``y`` may be ``PartialSums``, because it is added to the residual stream.
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
        self.form, self.in_features = None if quantization is None else known_format(quantization), in_features
        params = random_params(rngs, (out_features, in_features), in_features**-0.5, dtype=dtype, form=self.form)
        self.weight, self.scale, self.channel_scale, self.order, self.input_scale = params.arrays
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None
        self.quantize_inputs: str | None = None
        self.scale_axis: str | None = None
        self.reduce_axis, self.allow_partial_sums = reduce_axis, allow_partial_sums

    @property
    def stored(self) -> Weight:
        """The weight as it is stored."""
        arrays = self.weight, self.scale, self.channel_scale, self.order, self.input_scale
        return weight_of(*arrays, form=self.form, inputs=self.in_features)

    def __call__(self, x):
        if self.quantize_inputs is not None:
            x = quantize_tokens(x, self.quantize_inputs, self.scale_axis)
        return matmul(
            x,
            self.stored,
            None if self.bias is None else self.bias[...],
            reduce_axis=self.reduce_axis,
            allow_partial_sums=self.allow_partial_sums,
        )


def random_params(rngs: nnx.Rngs, shape: tuple[int, int], std: float, *, dtype, form: Format | None = None) -> Weight:
    """``random_weight`` with each of its arrays as an ``nnx.Param``."""
    return jax.tree.map(nnx.Param, random_weight(rngs.params(), shape, std, dtype=dtype, form=form))


def weight_of(*params: nnx.Param | None, form: Format | None, inputs: int) -> Weight:
    """The weight whose arrays some params hold, in the order of ``Weight.arrays``."""
    return Weight(*(None if param is None else param[...] for param in params), form=form, inputs=inputs)


def linear_maps(config: ModelConfig, prefix: str, **how) -> Callable[..., Linear]:
    """A function ``(name, in_features, out_features, **more)`` that makes a linear map of a language model, quantised as its
    config says of the map ``prefix + name``. Arguments ``how`` and ``more`` are those of ``Linear``."""

    def make(name: str, in_features: int, out_features: int, **more) -> Linear:
        options: dict[str, Any] = {"quantization": config.quantization_of(prefix + name), **how, **more}
        return Linear(in_features, out_features, **options)

    return make


class Norm(nnx.Module):
    """A norm over the last axis, of a kind of ``jspec.pallas.norm.rms_norm``.

    Attributes:
      weight: ``[features]`` of ``dtype``.
      bias: ``[features]`` of ``dtype`` for the kind ``layer``, or None.
      reduce_axis: the mesh axis whose shards have a part of the numbers each; None if all are here.
      quantize_outputs: ``int8`` or ``fp8`` if normed numbers are ``QuantizedActivations``, because only maps with that
        ``Linear.quantize_inputs`` read them; else None.
    """

    def __init__(self, features: int, eps: float, kind: str = "rms", *, reduce_axis: str | None = None, dtype):
        start = jnp.zeros if kind == "rms_offset" else jnp.ones
        self.weight = nnx.Param(start(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype)) if kind == "layer" else None
        self.eps, self.kind, self.reduce_axis = eps, kind, reduce_axis
        self.quantize_outputs: str | None = None

    def __call__(self, x) -> Any:
        args = x, self.weight[...], self._bias, self.eps, self.kind
        ordered = wants_one_order() and self.reduce_axis is None
        normed = norm_tokens(*args) if ordered else norm(*args, self.reduce_axis)
        return normed if self.quantize_outputs is None else quantize_tokens(normed, self.quantize_outputs)

    def after_adding(
        self, x, y, out_norm: "Norm | None" = None, scale=None, peers: Peers | None = None
    ) -> tuple[jax.Array, Any]:
        """(x + y, norm of x + y): the residual stream x with the output y of a layer, and the inputs of the next part. y
        may be ``PartialSums``, which ``peers`` add up over GPUs where they serve them; ``out_norm`` is applied to it
        first, and the sum is multiplied by ``scale [1]``."""
        if peers is not None and isinstance(y, PartialSums) and peers.can_sum(y, x.dtype):
            if out_norm is None and scale is None and self._in_sums:
                return peers.add_norm(x, y, self.weight[...], self.eps, self.kind)
            y = peers.total(y, x.dtype)
        options = SumOptions(scale=scale)
        if out_norm is not None:
            options = SumOptions(out_norm.weight[...], out_norm._bias, scale)
        return add_norm(
            x,
            y,
            weight=self.weight[...],
            bias=self._bias,
            eps=self.eps,
            kind=self.kind,
            quantize=self.quantize_outputs,
            options=options,
        )

    @property
    def scale(self) -> jax.Array:
        """The factors of normed numbers, ``[features]``."""
        return 1 + self.weight[...] if self.kind == "rms_offset" else self.weight[...]

    @property
    def _in_sums(self) -> bool:
        """Whether the launch that adds up over GPUs can norm the sum, too."""
        return self.kind in KINDS and self.quantize_outputs is None

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


def looked_up(table: Any, tokens):
    """``table[tokens]`` of an embedding, which is an array or a ``Weight``.

    On a CPU, jax 0.10 reads bfloat16 from a copy of the whole table in float32, which it makes once, before the loop over
    rounds, and keeps. Behind a barrier with the tokens it can only widen what it reads."""

    def of_cpu(table, tokens):
        table, tokens = jax.lax.optimization_barrier((table, tokens))
        return table[tokens]

    return of_platform(table, tokens, cpu=of_cpu, default=lambda table, tokens: table[tokens])


def times(x, number: float):
    """``number * x`` in the dtype of x, multiplied in fp32; x itself if the number is 1."""
    return x if number == 1 else (x.astype(jnp.float32) * number).astype(x.dtype)


def rotary_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Angular frequency of each rotary pair, float32 ``[H / 2]`` or less, in radians for each position."""
    rotated = rope.rotary_dim(head_dim)
    frequency = rope.theta ** (-np.arange(0, rotated, 2, dtype=np.float64) / rotated)
    if rope.kind in ("linear", "proportional"):
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3(rope, frequency)
    elif rope.kind == "yarn":
        frequency = _yarn(rope, frequency, rotated)
    elif rope.kind == "longrope":
        frequency = frequency / np.asarray(rope.long_factors if rope.long_texts else rope.short_factors)
    if rope.kind == "proportional":
        frequency[int(rope.fraction * head_dim // 2) :] = 0
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


def query_scale_at(positions, rope: Rope) -> jax.Array:
    """What queries at int32 positions ``[B, T]`` are multiplied by, float32 ``[B, T]``: see ``Rope.query_growth``."""
    past = jnp.maximum(positions, 0) // rope.original_max_position  # invalid tokens may be anywhere
    return 1 + rope.query_growth * jnp.log(1 + past.astype(jnp.float32))


def rotation_at(positions, rope: Rope | None, head_dim: int) -> Rotation | None:
    """Cosines and sines of the rotary embedding at int32 positions ``[B, T]``, each float32 ``[B, T, H / 2]``.

    They are ``[B, T, r / 2]`` if only the first r numbers of a head are rotated. Without a ``rope`` there are none."""
    if rope is None:
        return None
    frequency = rotary_frequencies(rope, head_dim).reshape(1, 1, -1)
    angles = positions[:, :, None].astype(jnp.float32) * frequency
    return Rotation(jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor)
