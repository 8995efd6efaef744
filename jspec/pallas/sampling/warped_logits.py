"""Distributions stored as logits and three numbers, and the groups of tokens in which a vocabulary is read.

The probability of token v is p(v) = exp(scale * logit[v] - lse) where logit[v] >= cutoff, and 0 elsewhere."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import block_ids, block_size, load_block

GROUP = 1024  # tokens of a group, which is sampled with one word of noise; another size makes a key sample other tokens


class WarpedLogits(NamedTuple):
    """J distributions for each of B rows: one for each query token of the target, or for each draft.

    Attributes:
      logits: ``[B, J, V]``, float32 or bfloat16, as the model stored them.
      scale: float32 ``[B, J]``, 1 / temperature.
      cutoff: float32 ``[B, J]``, the lowest logit that is not cut; -inf where nothing is.
      lse: float32 ``[B, J]``, the log of the sum of exp(scale * logit) over the tokens that are not cut.
    """

    logits: jax.Array
    scale: jax.Array
    cutoff: jax.Array
    lse: jax.Array

    def log_prob(self, width: int, draft_ids=None) -> jax.Array:
        """The log of every probability, float32 ``[B, J, width]``.

        It is -inf for tokens that are cut, and for those past the end of a vocabulary smaller than ``width``. With
        ``draft_ids`` the logits are over a draft vocabulary, as ``over_vocabulary`` has it."""
        z = self.logits.astype(jnp.float32)
        scaled = z * self.scale[..., None] - self.lse[..., None]
        log_prob = jnp.where(z >= self.cutoff[..., None], scaled, -jnp.inf)
        if draft_ids is not None:
            log_prob = over_vocabulary(log_prob, draft_ids)
        return jnp.pad(log_prob, ((0, 0), (0, 0), (0, width - log_prob.shape[2])), constant_values=-jnp.inf)

    def load(self, at, block, ids, when: Any = True, draft_ids: Any = None):
        """In a kernel, of refs: the logits of distribution ``at = (b, j)`` on a block of tokens, float32.

        They are -inf past the end of the vocabulary, outside of the draft vocabulary that ``draft_ids`` may name, and
        everywhere if ``when`` is false.
        """
        if draft_ids is None:
            return load_block(self.logits, at, block, ids, self.logits.shape[2], when=when).astype(jnp.float32)
        index = load_block(draft_ids, (), block, ids, draft_ids.shape[0], when=when, other=-1)
        ref: Any = self.logits
        logits = pltriton.load(ref.at[(*at, jnp.maximum(index, 0))], mask=index >= 0, other=-jnp.inf)
        return logits.astype(jnp.float32)

    def log_prob_block(self, at, block, ids, when: Any = True, draft_ids: Any = None):
        """In a kernel, of refs: ``log_prob`` of distribution ``at = (b, j)`` on a block of tokens.

        It is -inf everywhere if ``when`` is false."""
        z = self.load(at, block, ids, when, draft_ids)
        log_prob = jnp.where(z >= self.cutoff[at], z * self.scale[at] - self.lse[at], -jnp.inf)
        return jnp.where(when, log_prob, -jnp.inf)

    def line(self, at, log_weight: Any = 0.0, when: Any = True):
        """In a kernel, of refs: the numbers (a, b) with which log_weight + log p(v) = a * logit[v] + b.

        They are those of distribution ``at = (b, j)`` for tokens that are not cut. If ``when`` is false they are (1, 0),
        which keeps logits that ``load`` gave as -inf at -inf.
        """
        return jnp.where(when, self.scale[at], 1.0), jnp.where(when, log_weight - self.lse[at], 0.0)


def over_vocabulary(values, draft_ids) -> jax.Array:
    """A drafter's values of Vd tokens, logits or log-probabilities, over all tokens: ``[..., Vd] -> [..., V]``.

    Args:
      values: ``[..., Vd]``.
      draft_ids: int32 ``[V]``, for each token its index in ``values``, or -1, for which -inf stands: probability 0.
    """
    known = (draft_ids >= 0).reshape((1,) * (values.ndim - 1) + draft_ids.shape)
    return jnp.where(known, jnp.take(values, jnp.maximum(draft_ids, 0), axis=-1), -jnp.inf)


def group_size(V: int) -> int:
    """How many tokens a group of a vocabulary of V tokens has."""
    return block_size(V, GROUP)


def num_groups(V: int) -> int:
    """How many groups a vocabulary of V tokens has; the last one is not always full."""
    return pl.cdiv(V, group_size(V))


def grouped(x) -> jax.Array:
    """The vocabulary cut into groups: float32 ``[..., V] -> [..., groups, size]``, padded with -inf."""
    V = x.shape[-1]
    groups, size = num_groups(V), group_size(V)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, groups * size - V)]
    return jnp.pad(x, padding, constant_values=-jnp.inf).reshape(*x.shape[:-1], groups, size)


def store_groups(ref, at, block, x):
    """In a kernel: write x, one number for each of the n groups of a block, to ``ref[*at, block * n : (block + 1) *
    n]``."""
    ids = block_ids(block, x.shape[0])
    pltriton.store(ref.at[(*at, pl.ds(block * x.shape[0], x.shape[0]))], x, mask=ids < ref.shape[-1])


def load_groups(ref, at, *, other):
    """In a kernel: the numbers of all groups, ``ref[*at, :]`` padded to a power of two with ``other``, and their ids."""
    ids = block_ids(0, pl.next_power_of_2(ref.shape[-1]))
    return load_block(ref, at, 0, ids, ref.shape[-1], other=other), ids
