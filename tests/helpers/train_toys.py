"""A toy target, and for each method a toy draft head with its training objective."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file
from tiny import LLAMA, tiny_checkpoint, write_weights

from jspec.models import Decoder, build_head, flat_params, init
from jspec.train.methods import Sizes, initial_params, make_objective

V, Vd = 31, 17
TARGET = dataclasses.replace(LLAMA, vocab_size=V, eos_token_ids=(1,))
SIZES = {
    "eagle": Sizes(),
    "eagle3": Sizes(num_draft_tokens=3, draft_vocab_size=Vd),
    "parallel": Sizes(num_draft_tokens=4, draft_vocab_size=Vd, layers=2),
    "mlp": Sizes(num_draft_tokens=3, inner_size=8, tie=True),
    "medusa": Sizes(num_draft_tokens=3),
    "mtp": Sizes(num_draft_tokens=3),
    "dspark": Sizes(num_draft_tokens=3, draft_vocab_size=Vd, layers=2, markov="rnn", markov_rank=6),
    "dflash": Sizes(num_draft_tokens=3, layers=2),
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


def learnable(root: Path) -> Path:
    """Write the checkpoint of a toy target to ``root/target`` and token ids to ``root/tokens.npz``; returns ``root``.

    The target's next token is almost a function of the newest token, so that a small head can learn to predict it.
    """
    V, D = 64, 24
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": 32, "head_dim": 6, "num_hidden_layers": 1}
    target = tiny_checkpoint(root / "target", bos_token_id=0, eos_token_id=1, max_position_embeddings=128, **sizes)
    tensors = load_file(target / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    follows = 1 + np.random.default_rng(1).permutation(V - 1)
    tensors["lm_head.weight"][follows] = 3 * (embedding / np.linalg.norm(embedding, axis=1, keepdims=True))[1:]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"] *= 0.1
    write_weights(target, tensors)

    text = [5]
    for noise in np.random.default_rng(2).random(4000):
        text.append(int(follows[text[-1] - 1]) if noise > 0.05 else 1 + int(noise * 20 * (V - 1)))
    np.savez(root / "tokens.npz", train=text[:3600], held_out=text[3600:])
    return root
