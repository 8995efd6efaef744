"""What is minimised, and what is reported: cross-entropy, distillation, and how often a draft would be accepted.

Params are flat dicts of fp32 master weights under dotted names; every pass computes in bf16 and leaves logits in fp32.
Windows are int32 ``[B, T + 1]``: T tokens to read and, one step later, T tokens to predict.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jspec.config import ModelConfig
from jspec.models import build
from jspec.models.cache import CausalView
from jspec.train.loop import Loss, Params
from jspec.train.losses import wide_logits


def logits(config: ModelConfig, params: Params, tokens) -> jax.Array:
    """float32 ``[B, T, V]`` for int32 tokens ``[B, T]``."""
    model = build(config, params, "bfloat16")
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    hidden, _ = model(tokens, positions, (None,) * config.num_layers, CausalView(positions))
    return wide_logits(hidden, None, model)


def language_modelling(config: ModelConfig) -> Loss:
    """``loss(params, None, windows, key)``: mean cross-entropy in nats per token."""

    def loss(params, teacher, windows, key):
        del teacher, key
        predicted = logits(config, params, windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(predicted, windows[:, 1:]).mean()

    return loss


def distillation(target: ModelConfig, draft: ModelConfig) -> Loss:
    """``loss(params, target_params, windows, key)``: mean KL(target || draft) in nats per token (Hinton et al.,
    2015)."""

    def loss(params, teacher, windows, key):
        del key
        p = jax.nn.log_softmax(logits(target, teacher, windows[:, :-1]))
        q = jax.nn.log_softmax(logits(draft, params, windows[:, :-1]))
        return jnp.sum(jnp.exp(p) * (p - q), axis=-1).mean()

    return loss


class Agreement(NamedTuple):
    """Means over held-out tokens, both models reading the true text."""

    acceptance: jax.Array  # sum of min(p, q): chance that a sampled draft passes ``rejection`` at temperature 1
    top1: jax.Array  # share of positions where both prefer the same token: acceptance at temperature 0


def agreement(target: ModelConfig, draft: ModelConfig) -> Loss:
    """``measure(params, target_params, windows, key)`` of a draft against its target."""

    def measure(params, teacher, windows, key):
        del key
        p = logits(target, teacher, windows[:, :-1])
        q = logits(draft, params, windows[:, :-1])
        overlap = jnp.minimum(jax.nn.softmax(p), jax.nn.softmax(q)).sum(axis=-1)
        return Agreement(overlap.mean(), (p.argmax(axis=-1) == q.argmax(axis=-1)).mean())

    return measure
