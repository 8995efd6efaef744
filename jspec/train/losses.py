"""The training signal of draft heads: the target's next-token distributions, and a head's cross-entropy against them.

The target reads each window once, with teacher forcing: every token is predicted from the true tokens before it. A
draft head is trained to predict the same distributions from the target's features, several tokens further ahead.
"""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.models.kv_cache import CausalView
from jspec.models.protocols import Target
from jspec.pallas.matmul import matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """A batch of B windows and what the target computed from the first n tokens of each.

    Attributes:
      tokens: int32 ``[B, n + 1]``, the windows.
      hidden: ``[B, n, D]`` in the target's dtype, its hidden states after the final norm.
      features: ``[B, n, E]`` in the target's dtype, what the head takes as input: the auxiliary hidden states of its
        ``aux_layers``, concatenated (E is ``len(aux_layers)`` times D), or ``hidden`` itself if it has no ``aux_layers``.
      distribution: float32 ``[B, n, Vd]``. Entry t is the target's distribution of the token after token t, that is of
        token t + 1. If the head has a reduced draft vocabulary, only the probabilities of its Vd tokens are here, and
        they sum to less than 1; otherwise Vd is V.
      numbers: int32 ``[B]``, which windows of the step these are. Noise of a window follows from its number, so that it is
        the same on whichever device the window is.
      counted: bool ``[B, n + 1]``, which tokens a draft head is to learn to draft.
    """

    tokens: jax.Array
    hidden: jax.Array
    features: jax.Array
    distribution: jax.Array
    numbers: jax.Array
    counted: jax.Array

    @property
    def slots(self) -> jax.Array:
        """int32 ``[n]``: 0, 1, .. n - 1."""
        return jnp.arange(self.hidden.shape[1], dtype=jnp.int32)

    def tokens_at(self, positions) -> jax.Array:
        """The tokens at ``positions`` int32 ``[m]``, as int32 ``[B, m]``. A position past the end gives the last token."""
        return self.tokens[:, jnp.minimum(positions, self.tokens.shape[1] - 1)]


def read_windows(
    target: Target, windows, aux_layers: tuple[int, ...], draft_vocabulary=None, first: int | jax.Array = 0
) -> TrainingBatch:
    """Run the target over windows, and return them with its hidden states, features and distributions.

    The logits are rounded to the target's dtype before the softmax, as they are when drafts are verified.

    Args:
      target: the target's module.
      windows: int32 ``[B, n + 1]``; the last token of each is not read. In the place of a token that does not count, one of
        a prompt or behind the end of a text for example, is its complement, ``~token``.
      aux_layers: layers whose hidden states the head takes as features; () stands for the final hidden state.
      draft_vocabulary: int32 ``[Vd]``, the tokens that the head can propose in the order of its logits, or None if it
        can propose all.
      first: int32 ``[]``, the number of the first window among those of the step.
    """
    counted, windows = windows >= 0, jnp.where(windows < 0, ~windows, windows)
    tokens = windows[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    cache = (None,) * target.config.num_layers
    hidden, features, _ = target.with_auxiliary(tokens, positions, cache, CausalView(positions), aux_layers)
    distribution = jax.nn.softmax(target.logits(hidden).astype(jnp.float32))
    if draft_vocabulary is not None:
        distribution = distribution[..., draft_vocabulary]
    numbers = first + jnp.arange(len(windows), dtype=jnp.int32)
    return TrainingBatch(windows, hidden, features, distribution, numbers, counted)


def float32_logits(hidden, output_head, target: Target) -> jax.Array:
    """Logits in float32 ``[..., Vd]``, not rounded to the dtype of the hidden states ``[..., D]``.

    When serving, logits are rounded to the model's dtype. In training, rounding to bf16 would cost the gradient two
    digits.

    Args:
      hidden: ``[..., D]``.
      output_head: a ``Linear`` of the draft head, or None to use the target's output head (Vd is then V).
      target: the target's module.
    """
    if output_head is None:
        return target.scaled_logits(matmul(target.before_head(hidden), target.output_weight, dtype=jnp.float32))
    return matmul(hidden, output_head.weight[...], dtype=jnp.float32)


def soft_cross_entropy(distribution, logits) -> jax.Array:
    """The cross-entropy ``-sum p log q`` in nats, float32 ``[...]``.

    Args:
      distribution: float32 ``[..., Vd]``, the probabilities p. They may sum to less than 1: the rest is the probability
        of tokens outside the draft vocabulary, which the draft head cannot propose, and adds nothing to the loss.
      logits: float32 ``[..., Vd]``, whose softmax is q.
    """
    return -jnp.sum(distribution * jax.nn.log_softmax(logits), axis=-1)


def masked_mean(values, mask) -> jax.Array:
    """The mean of the values, float32 ``[...]``, where a mask of their shape is True; 0 where it is True nowhere."""
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(mask.sum(), 1)


class DepthLogits(NamedTuple):
    """The draft head's logits for its drafts of one depth: the number of drafts that the same round makes before them.

    Example: at slot 5 a head has the target's features of tokens 0 to 5, and it knows token 6. Its draft of depth 0 is
    for token 7, and its draft of depth 2 is for token 9.

    Attributes:
      bases: int32 ``[m]``, the slot of the text after which each of these m drafts was made.
      logits: float32 ``[B, m, Vd]``.
    """

    bases: jax.Array
    logits: jax.Array


def draft_loss(batch: TrainingBatch, depths: Iterable[DepthLogits], decay: float) -> jax.Array:
    """The mean soft cross-entropy of a head's drafts against the target, float32 ``[]``.

    A draft of depth d after slot b is compared with the target's distribution at slot b + d + 1. Where that slot lies
    past the window, there is nothing to compare with and the draft is left out of the mean of its depth, as one is for a
    token that does not count. The means of the depths are then averaged with weights ``decay ** d``.

    Args:
      batch: the windows and the target's distributions.
      depths: the head's logits at depth 0, 1, and so on.
      decay: weight of a depth relative to the one before it.
    """
    n = batch.distribution.shape[1]
    total, weights = jnp.float32(0), 0.0
    for d, (bases, logits) in enumerate(depths):
        target_slots = bases + 1 + d  # [m]
        losses = soft_cross_entropy(batch.distribution[:, jnp.minimum(target_slots, n - 1)], logits)  # [B, m]
        inside = (target_slots < n)[None] & batch.counted[:, jnp.minimum(target_slots + 1, n)]
        total += decay**d * masked_mean(losses, inside)
        weights += decay**d
    return total / weights
