"""Layers of experts with routed tokens, in every format of weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.tensors.stacked_experts import repacked
from jspec.config import Experts
from jspec.models.quantization import quantize
from jspec.pallas.moe.router_reference import Routed, group_reference, route_reference
from jspec.pallas.moe.tiles import ExpertMap
from jspec.quantization import levels, mxfp4_pairs
from jspec.quantization.formats import Format, known_format
from jspec.quantization.weight import Weight, random_weight


@functools.cache
def layer(
    M: int, D: int, F: int, X: int, Y: int, dtype: str, quantization: str | None = None, bias: bool = False
) -> tuple[jax.Array, Routed, ExpertMap, ExpertMap]:
    """Arguments of ``grouped_mlp``."""
    rng = np.random.default_rng(M + F)

    def normal(*shape: int, scale: float = 1.0, dtype: str = dtype) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(dtype)

    def expert_map(weight: np.ndarray) -> ExpertMap:
        stored = Weight(jax.device_put(weight)) if quantization is None else quantized(weight, quantization)
        return ExpertMap(stored, jax.device_put(normal(*weight.shape[:2])) if bias else None)

    routed = _route(normal(M, X, dtype="float32"), Experts(X, Y, F))
    gate_up, down = normal(X, 2 * F, D, scale=D**-0.5), normal(X, D, F, scale=F**-0.5)
    return jax.device_put(normal(M, D)), routed, expert_map(gate_up), expert_map(down)


@functools.partial(jax.jit, static_argnums=1)
def _route(logits, routing: Experts) -> Routed:
    return route_reference(logits, None, routing)


def regrouped(expert, weight, X: int) -> Routed:
    """``Routed`` with other experts than a router chose."""
    return Routed(expert, weight, *group_reference(expert, X))


def quantized(weight, kind: str) -> Weight:
    """Numbers of eight bits are those of ``weight``; codes are random, with scales and zeros that differ."""
    X, width, inputs = weight.shape
    form, rng = known_format(kind), np.random.default_rng(X)
    if form.kind == "mxfp4_pairs":
        return four_bits(rng.integers(0, 16, (X, width, inputs), np.uint8))
    if form.kind == "fp8_block":
        scale = rng.uniform(0.5, 2, (X, width, -(-inputs // 128))).astype(np.float32) / 64
        numbers = np.asarray(weight, np.float32) / np.repeat(scale, 128, axis=-1)[..., :inputs]
        return Weight(jnp.asarray(numbers, jnp.float8_e4m3fn), jnp.asarray(scale), form=form)
    if form.per_channel:
        arrays = map(jax.device_put, quantize(np.asarray(weight.reshape(X * width, inputs), np.float32), kind))
        return Weight(*arrays, form=form).split(X)
    return _in_codes(form, X, width, inputs, str(weight.dtype))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _in_codes(form: Format, X: int, width: int, inputs: int, dtype: str) -> Weight:
    made = random_weight(jax.random.key(width), (X * width, inputs), inputs**-0.5, dtype=dtype, form=form)
    scale, channel_scale, key = made.scale, made.channel_scale, jax.random.key(inputs)
    if form.scales == "powers":
        scale += jax.random.randint(key, scale.shape, 0, 3).astype(scale.dtype)
    elif form.levels:  # integers of six bits
        half = 1 << (form.bits - 1)
        first = levels.pack_same(inputs**-0.5 / (32 * half), -(inputs**-0.5) / 32, form)[0]
        words = jax.random.bits(key, scale.shape, jnp.uint32) & jnp.uint32(0x3F3F3F3F)
        scale = words.at[..., 0].set(first)
    else:
        factors = jax.random.uniform(key, scale.shape, minval=0.5, maxval=2)
        if form.zeros:
            scale = scale.at[..., 1].set(jax.random.randint(jax.random.key(1), scale.shape[:2], 0, 17))
            factors = factors.at[..., 1].set(1)
        scale = (scale.astype(jnp.float32) * factors).astype(scale.dtype)
    if channel_scale is not None:  # every second one is divided by
        channel_scale = channel_scale.at[1::2].set(jnp.asarray([1, inputs**0.5 * 3], jnp.float32))
    return dataclasses.replace(made, scale=scale, channel_scale=channel_scale).split(X)


def four_bits(codes: np.ndarray) -> Weight:
    """A weight of these codes, with scales that differ between groups."""
    X, out, inputs = codes.shape
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).reshape(X, out, inputs // 32, 16)
    scale = np.zeros((X, out, 2 * mxfp4_pairs.num_pairs(inputs)), np.uint32)
    scale[..., : inputs // 32] = np.random.default_rng(inputs).integers(121, 126, (X, out, inputs // 32))
    factors = mxfp4_pairs.factors(scale[..., 0::2], scale[..., 1::2])
    weight = np.stack([repacked(expert) for expert in blocks]).transpose(2, 0, 1, 3)  # [pairs, X, out, 32]
    arrays = jax.device_put(weight), jax.device_put(factors.transpose(2, 0, 1))
    return Weight(*arrays, form=known_format("mxfp4_pairs"), inputs=inputs)


def one_after_another(a, b, trans_b: bool):
    """A product as tensor cores add it, ``[m, n], [k, n] -> [m, k]``: in the order in which the operands have the inputs.

    Sums are rounded to bfloat16 on the way, so that another order shows."""
    assert trans_b
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)

    def add(total, columns):
        one, other = columns
        return jax.lax.reduce_precision(total + one[:, None] * other[None, :], 8, 7), None

    return jax.lax.scan(add, jnp.zeros((len(a), len(b)), jnp.float32), (a.T, b.T))[0]
