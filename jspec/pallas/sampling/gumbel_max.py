"""The Gumbel-max trick in two steps (Gumbel, 1954): a group of tokens is sampled, and then a token in that group.

The kernel that reads the logits knows the weight of each group, and P(group) P(token | group) is P(token). Noise costs
four times as much as reading a logit. It is computed for the groups and for the tokens of one group only: for 1,150
words in place of 128,256. Token v takes word v of the key, and group g takes word 2^32 - 1 - g."""

import jax.numpy as jnp

from jspec.pallas.sampling.threefry import gumbel_of_bits, threefry_bits, threefry_bits_unrolled
from jspec.pallas.sampling.warped_logits import grouped


def gumbel_max_reference(log_mass, log_weight, key_data):
    """One token of each of R distributions.

    Args:
      log_mass: float32 ``[R, groups]``, the log of each group's weight.
      log_weight: float32 ``[R, V]``, the log of each token's weight. Weights need not add up to 1.
      key_data: uint32 ``[R, 2]``, Threefry keys.

    Returns:
      int32 ``[R]``.
    """
    group = jnp.argmax(group_scores(log_mass, key_data), axis=-1)
    first = group * grouped(log_weight).shape[-1]
    token = first + jnp.argmax(token_scores(log_weight, key_data, group), axis=-1)
    return jnp.minimum(token, log_weight.shape[-1] - 1).astype(jnp.int32)


def group_scores(log_mass, key_data):
    """The scores of groups, float32 ``[R, groups]``; the group with the highest score is sampled.

    The margin of the highest score over the next is how much rounding the decision tolerates."""
    group = jnp.arange(log_mass.shape[-1], dtype=jnp.int32)
    return log_mass + gumbel_noise(key_data, group_words(group)[None])


def token_scores(log_weight, key_data, group):
    """The scores of the tokens of one group, int32 ``[R]``: float32 ``[R, size]``; the token with the highest is
    sampled."""
    by_group = grouped(log_weight)
    size = by_group.shape[-1]
    token = group[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    inside = jnp.take_along_axis(by_group, group[:, None, None], axis=1)[:, 0]
    return inside + gumbel_noise(key_data, token.astype(jnp.uint32))


def group_words(group):
    """The words of a key that are those of the groups, uint32."""
    return ~group.astype(jnp.uint32)


def gumbel_noise(key_data, words):
    """Gumbel noise, float32 ``[R, n]``, from the words ``words``, uint32 ``[R or 1, n]``, of each key."""
    return gumbel_of_bits(threefry_bits(key_data[:, :1], key_data[:, 1:], words))


def gumbel_of(key_0, key_1, words):
    """In a kernel: Gumbel noise, float32, from the words ``words`` (uint32) of a key."""
    return gumbel_of_bits(threefry_bits_unrolled(key_0, key_1, words))


def gumbel_block(key_ref, at, words):
    """In a kernel: Gumbel noise from the words ``words`` of key ``at``."""
    column = jnp.int32(0)  # a literal index does not trace in interpret mode of jax 0.10
    return gumbel_of(key_ref[*at, column], key_ref[*at, column + 1], words)


def best_of(score, ids, width: int):
    """In a kernel: the best score and its id.

    The id is the lowest among equals. It is in 0 .. width - 1 even where scores are NaN."""
    best = jnp.max(score)
    return best, jnp.min(jnp.where(score == best, ids, width - 1))
