"""A toy target, and for each method a toy draft head with its training objective."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.config import ModelConfig
from jspec.models import Decoder, build_head, flat_params, init
from jspec.train.methods import Sizes, initial_params, make_objective

V, Vd = 31, 17
TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=V,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position=64,
    eos_token_ids=(1,),
)
SIZES = {
    "eagle": Sizes(),
    "eagle3": Sizes(num_draft_tokens=3, draft_vocab_size=Vd),
    "parallel": Sizes(num_draft_tokens=4, draft_vocab_size=Vd, layers=2),
    "mlp": Sizes(num_draft_tokens=3, inner_size=8, tie=True),
    "medusa": Sizes(num_draft_tokens=3),
    "mtp": Sizes(num_draft_tokens=3),
}


@functools.cache
def target() -> Decoder:
    return Decoder(TARGET, rngs=nnx.Rngs(0))


@functools.cache
def objective(method: str) -> Any:
    return make_objective(method, TARGET, SIZES[method])


HEADS = {method: objective(method).config for method in SIZES}


def head_params(method: str) -> dict[str, jax.Array]:
    """Random weights of a method's draft head, and its draft vocabulary if that is reduced; dotted names."""
    text = jnp.arange(400) ** 2 % V  # some tokens are more frequent than others
    _, constants = initial_params(objective(method), target(), text.astype(jnp.int32), jax.random.key(0))
    return flat_params(init(HEADS[method], nnx.Rngs(1))) | constants


def module(method: str) -> Any:
    return build_head(HEADS[method], head_params(method))
