"""Layers of experts with routed tokens, in every format of weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.tensors.stacked_experts import repacked
from jspec.config import Experts
from jspec.models.quantization import quantize
from jspec.pallas.moe.router_reference import Routed, group_reference, route_reference
from jspec.pallas.moe.tiles import ExpertWeights
from jspec.quantization import codes, mxfp4, mxfp4_pairs, nvfp4
from jspec.quantization.formats import grouped


@functools.cache
def layer(
    M: int, D: int, F: int, X: int, Y: int, dtype: str, quantization: str | None = None, bias: bool = False
) -> tuple[jax.Array, Routed, ExpertWeights, ExpertWeights]:
    """Arguments of ``grouped_mlp``."""
    rng = np.random.default_rng(M + F)

    def normal(*shape: int, scale: float = 1.0, dtype: str = dtype) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(dtype)

    routed = _route(normal(M, X, dtype="float32"), Experts(X, Y, F))
    stacked = [
        ExpertWeights(jnp.asarray(weight)) if quantization is None else quantized(weight, quantization)
        for weight in (normal(X, 2 * F, D, scale=D**-0.5), normal(X, D, F, scale=F**-0.5))
    ]
    if bias:
        stacked = [weights._replace(bias=jnp.asarray(normal(X, weights.num_outputs))) for weights in stacked]
    return jnp.asarray(normal(M, D)), routed, *stacked


@functools.partial(jax.jit, static_argnums=1)
def _route(logits, routing: Experts) -> Routed:
    return route_reference(logits, None, routing)


def regrouped(expert, weight, X: int) -> Routed:
    """``Routed`` with other experts than a router chose."""
    return Routed(expert, weight, *group_reference(expert, X))


def quantized(weight, kind: str) -> ExpertWeights:
    X, width, inputs = weight.shape
    if kind == "mxfp4":
        return four_bits(np.random.default_rng(X).integers(0, 16, (X, width, inputs), np.uint8))
    if kind == "fp8_block":
        scale = np.random.default_rng(X).uniform(0.5, 2, (X, width, -(-inputs // 128))).astype(np.float32) / 64
        numbers = np.asarray(weight, np.float32) / np.repeat(scale, 128, axis=-1)[..., :inputs]
        return ExpertWeights(jnp.asarray(numbers, jnp.float8_e4m3fn), jnp.asarray(scale))
    if kind == "nvfp4":
        keys = jax.random.split(jax.random.key(width), 2)
        packed, scale, numbers = nvfp4.random_codes(keys[0], (X * width, inputs), inputs**-0.5)
        scale = jax.random.uniform(keys[1], scale.shape, minval=0.25, maxval=4).astype(scale.dtype)
        numbers = numbers.at[1::2].set(jnp.asarray([1, inputs**0.5 * 3], jnp.float32))  # every second one is divided by
        packed, scale, numbers = (array.reshape(X, width, -1) for array in (packed, scale, numbers))
        return ExpertWeights(packed, scale, channel_scale=numbers)
    if kind == "linear mxfp4":
        packed, scale = mxfp4.random_codes(jax.random.key(width), (X * width, inputs), inputs**-0.5)
        scale += jax.random.randint(jax.random.key(inputs), scale.shape, 0, 3).astype(scale.dtype)
        return ExpertWeights(packed.reshape(X, width, -1), scale.reshape(X, width, -1))
    if (form := grouped(kind)) is not None:
        packed, scale = codes.random_codes(jax.random.key(width), (X * width, inputs), inputs**-0.5, form)
        factors = jax.random.uniform(jax.random.key(inputs), scale.shape, minval=0.5, maxval=2)
        if form.zeros:
            scale = scale.at[..., 1].set(jax.random.randint(jax.random.key(1), scale.shape[:2], 0, 17))
            factors = factors.at[..., 1].set(1)
        scale = (scale * factors).astype(scale.dtype)
        return ExpertWeights(packed.reshape(X, width, -1), scale.reshape(X, width, *scale.shape[1:]))
    stored, scale = quantize(np.asarray(weight.reshape(X * width, inputs), np.float32), kind)
    return ExpertWeights(jnp.asarray(stored).reshape(weight.shape), jnp.asarray(scale).reshape(X, width))


def four_bits(codes: np.ndarray) -> ExpertWeights:
    """A weight of these codes, with scales that differ between groups."""
    X, out, inputs = codes.shape
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(X, out, inputs // 32, 16)
    scale = np.zeros((X, out, 2 * mxfp4_pairs.num_pairs(inputs)), np.uint32)
    scale[..., : inputs // 32] = np.random.default_rng(inputs).integers(121, 126, (X, out, inputs // 32))
    factors = mxfp4_pairs.factors(scale[..., 0::2], scale[..., 1::2])
    weight = np.stack([repacked(expert) for expert in blocks])  # [X, out, pairs, 32]
    return ExpertWeights(jnp.asarray(weight.transpose(2, 0, 1, 3)), jnp.asarray(factors.transpose(2, 0, 1)))
