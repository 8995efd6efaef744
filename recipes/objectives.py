"""Losses for the target and its draft model, and a measure of how often the target would accept a draft.

Each function takes model configs and returns a loss, or a measure, as ``jspec.train.loop`` expects it. Params are flat
dicts from dotted names to fp32 master weights; every pass computes in bf16 and gives logits in fp32. Windows are int32
``[B, T + 1]``: tokens 0 to T - 1 are the input, and tokens 1 to T are the next tokens to predict. In all functions with
a ``target``, the frozen argument of the loss is the target's params.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspec.config import ModelConfig
from jspec.models import build
from jspec.models.kv_cache import CausalView
from jspec.train.loop import Loss, Params
from jspec.train.losses import float32_logits


def logits(config: ModelConfig, params: Params, tokens) -> jax.Array:
    """The logits after each token, float32 ``[B, T, V]``, for int32 tokens ``[B, T]``."""
    model = build(config, params, "bfloat16")
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    hidden, _ = model(tokens, positions, (None,) * config.num_layers, CausalView(positions))
    return float32_logits(hidden, None, model)


def language_modelling(config: ModelConfig) -> Loss:
    """The loss ``loss(params, None, windows, key)``: the mean cross-entropy of the next token, in nats per token."""

    def loss(params, frozen, windows, key):
        del frozen, key
        predicted = logits(config, params, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(predicted, windows[:, 1:]).mean()

    return loss


def distillation(target: ModelConfig, draft: ModelConfig) -> Loss:
    """The distillation loss of a draft model (Hinton et al., 2015), ``loss(params, target_params, windows, key)``.

    It is the mean of KL(target || draft) over the tokens, in nats per token.
    """

    def loss(params, target_params, windows, key):
        del key
        p = jax.nn.log_softmax(logits(target, target_params, windows[:, :-1]))
        q = jax.nn.log_softmax(logits(draft, params, windows[:, :-1]))
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1).mean()

    return loss


class Agreement(NamedTuple):
    """How often the target would accept the draft model's tokens, estimated under teacher forcing.

    Each value is a mean over the positions of held-out text, float32 ``[]``.

    Attributes:
      acceptance: mean of the sum of min(p, q) over the vocabulary, where p is the target's distribution and q the
        draft's. This is the probability that ``rejection`` accepts a sampled draft at temperature 1.
      top1: share of positions where both models have the same most probable token, that is the acceptance rate at
        temperature 0.
    """

    acceptance: jax.Array
    top1: jax.Array


def agreement(target: ModelConfig, draft: ModelConfig) -> Loss:
    """The measure ``measure(params, target_params, windows, key)``, which returns an ``Agreement``."""

    def measure(params, target_params, windows, key):
        del key
        p = logits(target, target_params, windows[:, :-1])
        q = logits(draft, params, windows[:, :-1])
        overlap = jnp.minimum(jax.nn.softmax(p), jax.nn.softmax(q)).sum(axis=-1)
        return Agreement(overlap.mean(), (p.argmax(axis=-1) == q.argmax(axis=-1)).mean())

    return measure
