"""Shapes of published checkpoints, with random weights: speed does not depend on what the weights are."""

import dataclasses
from typing import NamedTuple

from flax import nnx

from jspec.config import ModelConfig, Rope
from jspec.heads import Eagle3Config, EagleConfig, HeadConfig, MedusaConfig, MLPConfig
from jspec.models import init
from jspec.models.eagle3 import Eagle3Head

DRAFT_VOCABULARY = 32_000  # of published EAGLE-3 heads

LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position=131072,
    rope=Rope(theta=5e5, kind="llama3", factor=8.0, original_max_position=8192),
)
LLAMA_1B = dataclasses.replace(
    LLAMA_8B, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64, tie_embeddings=True, windows=()
)
TINY = dataclasses.replace(
    LLAMA_8B,
    vocab_size=211,
    hidden_size=32,
    intermediate_size=48,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    windows=(),
)


TINY_DRAFT = dataclasses.replace(TINY, num_layers=2, tie_embeddings=True, windows=())


class Pair(NamedTuple):
    """A target and the smaller model that drafts for it."""

    target: ModelConfig
    draft: ModelConfig


SHAPES = {"llama-3.1-8b": Pair(LLAMA_8B, LLAMA_1B), "tiny": Pair(TINY, TINY_DRAFT)}


def head_for(target: ModelConfig, method: str) -> HeadConfig:
    """The configuration of a draft head for ``target``, of the proportions of published ones."""
    D, V = target.hidden_size, target.vocab_size
    Vd = min(DRAFT_VOCABULARY, V // 2)
    one, four = (dataclasses.replace(target, num_layers=n, windows=(), quantization=None) for n in (1, 4))
    return {
        "eagle": EagleConfig(one),
        "eagle3": Eagle3Config(one, draft_vocab_size=Vd, target_hidden_size=D),
        "parallel": Eagle3Config(four, draft_vocab_size=Vd, target_hidden_size=D, mask_token_id=0),
        "mlp": MLPConfig(V, D, inner_size=3 * D // 4, num_stages=4, tied=True, scale_input=True),
        "medusa": MedusaConfig(V, D, num_heads=8),
    }[method]


def abstract_module(config: ModelConfig | HeadConfig, seed: int = 0, dtype: str = "bfloat16"):
    """A module of ``config``, ready to serve, with shapes in place of arrays."""
    return nnx.eval_shape(lambda: _made(config, seed, dtype))


def random_module(config: ModelConfig | HeadConfig, seed: int = 0, dtype: str = "bfloat16"):
    """A module of ``config``, ready to serve, its weights made on the device.

    The arrays are made one after another, because a program that makes all of them takes minutes to compile.
    """
    return _made(config, seed, dtype)


def _made(config, seed: int, dtype: str):
    module = init(config, nnx.Rngs(seed), dtype)
    return module.prepare() if isinstance(module, Eagle3Head) else module
