"""What a head is trained towards: the target's distribution some places ahead, and how far a head's logits are from
it."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.models.cache import CausalView
from jspec.models.contract import Target
from jspec.models.layers import wide_project


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lesson:
    """Windows, and what the target makes of their first n tokens. V' are the tokens that the head knows: V or Vd.

    Attributes:
      tokens: int32 ``[B, n + 1]``.
      hidden: ``[B, n, D]``, after the target's final norm.
      features: ``[B, n, E]``, the joined streams that the head listens to.
      distribution: float32 ``[B, n, V']``, the target's probabilities of the token after each: sums to less than 1
        where the head knows a part of the vocabulary only.
    """

    tokens: jax.Array
    hidden: jax.Array
    features: jax.Array
    distribution: jax.Array

    @property
    def slots(self) -> jax.Array:
        """int32 ``[n]``: ``0 .. n - 1``."""
        return jnp.arange(self.hidden.shape[1], dtype=jnp.int32)

    def tokens_at(self, positions) -> jax.Array:
        """int32 ``[B, m]`` at ``positions`` int32 ``[m]``; past the window's end some token."""
        return self.tokens[:, jnp.minimum(positions, self.tokens.shape[1] - 1)]


def read(target: Target, windows, aux_layers: tuple[int, ...], known=None) -> Lesson:
    """The target reads windows, int32 ``[B, n + 1]``; ``known`` are the tokens of the head's rows, None for all.

    The distribution is that of the stored logits, which is what drafts are judged by.
    """
    tokens = windows[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    cache = (None,) * target.config.num_layers
    hidden, features, _ = target.with_auxiliary(tokens, positions, cache, CausalView(positions), aux_layers)
    distribution = jax.nn.softmax(target.logits(hidden).astype(jnp.float32))
    if known is not None:
        distribution = distribution[..., known]
    return Lesson(windows, hidden, features, distribution)


def wide_logits(hidden, own, target: Target) -> jax.Array:
    """float32 ``[..., V']`` of hidden states ``[..., D]``, by a head's ``own`` output map, or the target's if it is
    None.

    Serving rounds logits to the model's dtype; here that would cost the gradient two digits.
    """
    if own is None:
        return wide_project(hidden, target.output_weight, target.output_scale)
    return wide_project(hidden, own.weight[...])


def soft_cross_entropy(distribution, logits) -> jax.Array:
    """``-sum p log q`` in nats, float32 ``[...]``, of a distribution p and of logits of q, float32 ``[..., V']``.

    Where p sums to less than 1, the rest is on tokens that the head cannot propose, and costs nothing.
    """
    return -jnp.sum(distribution * jax.nn.log_softmax(logits), axis=-1)


class Depth(NamedTuple):
    """What a head drafts so many places ahead: logits float32 ``[B, m, V']`` after ``bases`` int32 ``[m]``."""

    bases: jax.Array
    logits: jax.Array


def draft_loss(lesson: Lesson, depths: Iterable[Depth], decay: float) -> jax.Array:
    """Soft cross-entropy of depth 0, 1, .. against the target's distribution one place further each; float32 ``[]``.

    Depth d counts ``decay ** d``. What a branch drafts past the window has no distribution to compare with and does not
    count."""
    n = lesson.distribution.shape[1]
    total, weights = jnp.float32(0), 0.0
    for d, (bases, logits) in enumerate(depths):
        ahead = bases + 1 + d
        losses = soft_cross_entropy(lesson.distribution[:, jnp.minimum(ahead, n - 1)], logits)
        inside = (ahead < n)[None]
        count = losses.shape[0] * jnp.maximum(inside.sum(), 1)
        total += decay**d * jnp.sum(jnp.where(inside, losses, 0.0)) / count
        weights += decay**d
    return total / weights
