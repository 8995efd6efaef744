"""A token of a row by two Gumbel draws (Gumbel, 1954): of a group of tokens by its mass, then of a token in it.

The pass that reads the logits knows what each group weighs, and P(group) P(token | group) is P(token). So noise, which
costs four times what reading a logit does, is computed for the groups and for the tokens of one of them: of 128,256
tokens for 1,150. Token v takes the v-th word of the row's key, group g the g-th from the end of all 2^32."""

import jax.numpy as jnp

from jspec.pallas.noise import gumbel_of_bits, threefry_bits
from jspec.pallas.warped_logits import in_groups


def pick_reference(log_mass, log_weight, key_data):
    """One token of each row.

    Args:
      log_mass: float32 ``[R, groups]``, log of each group's weight, and
      log_weight: float32 ``[R, V]``, of each token's, both up to a factor of the row.
      key_data: uint32 ``[R, 2]``, Threefry keys.

    Returns:
      int32 ``[R]``.
    """
    group = jnp.argmax(group_scores(log_mass, key_data), axis=-1)
    first = group * in_groups(log_weight).shape[-1]
    token = first + jnp.argmax(token_scores(log_weight, key_data, group), axis=-1)
    return jnp.minimum(token, log_weight.shape[-1] - 1).astype(jnp.int32)


def group_scores(log_mass, key_data):
    """What a group is chosen by, float32 ``[R, groups]``; the lead of the best is how firmly it was decided."""
    group = jnp.arange(log_mass.shape[-1], dtype=jnp.int32)
    return log_mass + gumbel_of(key_data[:, :1], key_data[:, 1:], group_words(group)[None])


def token_scores(log_weight, key_data, group):
    """What a token of a group, int32 ``[R]``, is chosen by: float32 ``[R, size]``."""
    by_group = in_groups(log_weight)
    size = by_group.shape[-1]
    token = group[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    inside = jnp.take_along_axis(by_group, group[:, None, None], axis=1)[:, 0]
    return inside + gumbel_of(key_data[:, :1], key_data[:, 1:], token.astype(jnp.uint32))


def group_words(group):
    """Which words of a key are the groups', uint32."""
    return ~group.astype(jnp.uint32)


def gumbel_of(key_0, key_1, words):
    """Gumbel noise from some words of a key."""
    return gumbel_of_bits(threefry_bits(key_0, key_1, words))


def gumbel_block(key_ref, at, words):
    """In a kernel: noise from some words of the key ``at``."""
    column = jnp.int32(0)  # a literal index does not trace in interpret mode of jax 0.10
    return gumbel_of(key_ref[*at, column], key_ref[*at, column + 1], words)


def best_of(score, ids, width: int):
    """In a kernel: the best score and its id, the lowest among equals and in 0..width-1 whatever the scores are."""
    best = jnp.max(score)
    return best, jnp.min(jnp.where(score == best, ids, width - 1))
