"""Modules of a shape with random weights, or with shapes in place of arrays."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jspec.config import ModelConfig, Shards
from jspec.config.heads import HeadConfig
from jspec.models import Decoder, init
from jspec.models.sharding import abstract_shards, with_leaves
from jspec.quantization import mxfp4, mxfp4_pairs, nvfp4
from jspec.quantization.formats import Format
from jspec.quantization.weight import random_weight

_LARGE = 500  # times the standard deviation of an embedding, 0.02


def abstract_module(config: ModelConfig | HeadConfig, seed: int = 0, dtype: str = "bfloat16", *, drafts: bool = False):
    """A module of ``config``, ready to serve, with shapes in place of arrays; ``drafts`` as for ``random_module``."""
    return nnx.eval_shape(lambda: _made(config, seed, dtype, drafts))


def random_module(config: ModelConfig | HeadConfig, seed: int = 0, dtype: str = "bfloat16", *, drafts: bool = False):
    """A module of ``config``, ready to serve, its weights made on the device. A language model is a target, or with
    ``drafts`` a draft model.

    The arrays are made one after another, because a program that makes all of them takes minutes to compile.

    The embeddings of a mixture of experts are large. What the layers add is then little beside them, and routers spread
    different tokens evenly in every layer. Otherwise the tokens of a text that random weights write become alike from layer
    to layer, and share experts.
    """
    module = _made(config, seed, dtype, drafts)
    if isinstance(config, ModelConfig) and config.experts is not None and not config.tie_embeddings:
        module.embedding[...] = module.embedding[...] * _LARGE
    return module


def _made(config, seed: int, dtype: str, drafts: bool):
    module = init(config, nnx.Rngs(seed), dtype)
    return module.prepare() if drafts or not isinstance(config, ModelConfig) else module


def random_shards(config: ModelConfig, shards: Shards, mesh: Mesh, dtype: str = "bfloat16", seed: int = 0) -> Decoder:
    """A language model in shards on the devices of ``mesh``, whose weights each device makes for itself; embeddings of
    mixtures are large, as those of ``random_module`` are."""
    keys = map(functools.partial(jax.random.fold_in, jax.random.key(seed)), itertools.count())
    large = config.experts is not None and not config.tie_embeddings
    parts = {
        name: (part, stored.form) for stored in config.stored_params().values() for part, name in stored.names.items()
    }

    def made(name: str, leaf) -> jax.Array:
        if name in parts:
            return _random_part(*parts[name], leaf.shape, leaf.sharding, config.hidden_size**-0.5)(next(keys))
        times = _LARGE if large and name == "embedding" else 1
        return _random_weight(leaf.shape, leaf.dtype, leaf.sharding, times)(next(keys))

    return with_leaves(abstract_shards(config, shards, mesh, dtype), made)


@functools.cache
def _random_part(part: str, form: Format, shape: tuple[int, ...], sharding: NamedSharding, std: float):
    """Makes an array of a quantised weight of about normal numbers: the name of the array in ``Format.arrays``, and its
    shape."""

    def make(key):
        inputs = shape[1] * (2 if form.packed else 1) if part == "weight" else form.group or 1
        sample = random_weight(key, (shape[0] if part == "weight" else 1, inputs), std, dtype=jnp.float32, form=form)
        if part == "weight":
            return sample.numbers
        array = sample.scale if part == "scale" else sample.channel_scale
        return jnp.broadcast_to(array, shape)

    return jax.jit(make, out_shardings=sharding)


@functools.cache  # layers share one program
def _random_weight(shape: tuple[int, ...], dtype, sharding: NamedSharding, times: int):
    def make(key):
        if len(shape) == 1:  # of norms
            return jnp.ones(shape, dtype)
        if dtype == jnp.uint8:  # codes of four bits
            return jax.random.bits(key, shape, dtype)
        if dtype == jnp.uint32:  # their scales, an axis of pairs of groups and one of output features
            # Equally likely codes then have a standard deviation near that of the other weights.
            std = (shape[-2] * mxfp4_pairs.PAIR) ** -0.5
            power = mxfp4.ONE + round(math.log2(std / nvfp4.STD_OF_RANDOM_CODES))
            return jnp.full(shape, mxfp4_pairs.factors(power, power), dtype)
        return jax.random.normal(key, shape, dtype) * jnp.asarray(times * shape[-1] ** -0.5, dtype)

    return jax.jit(make, out_shardings=sharding)
