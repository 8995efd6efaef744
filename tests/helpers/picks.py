"""The two Gumbel draws of a token, in float64."""

import jax
import numpy as np

from jspec.pallas.sampling.gumbel_max import group_words
from jspec.pallas.sampling.threefry import threefry_bits, uniform_of_bits
from jspec.pallas.sampling.warped_logits import group_size, num_groups


def shortfall(weight, key_data, noisy, token) -> np.ndarray:
    """How far each token ``[R]``, and its group, were from being the best, given float64 weights ``[R, V]``."""
    V, row = weight.shape[1], np.arange(len(weight))
    groups, size = num_groups(V), group_size(V)
    by_group = np.pad(weight, ((0, 0), (0, groups * size - V))).reshape(-1, groups, size)
    group, inside = np.divmod(np.asarray(token), size)
    ids = group[:, None] * size + np.arange(size)
    noisy = np.asarray(noisy)[:, None]
    with np.errstate(divide="ignore"):
        noise = _gumbel(key_data, group_words(np.arange(groups))[None])
        rank = np.where(noisy, np.log(by_group.sum(-1)) + noise, np.log(by_group.max(-1)))
        score = np.log(by_group[row, group]) + np.where(noisy, _gumbel(key_data, ids.astype(np.uint32)), 0.0)
    return np.maximum(rank.max(-1) - rank[row, group], score.max(-1) - score[row, inside])


def _gumbel(key_data, words):
    return -np.log(-np.log1p(-np.asarray(_uniform(key_data, words), np.float64)))


@jax.jit
def _uniform(key_data, words):
    return uniform_of_bits(threefry_bits(key_data[:, :1], key_data[:, 1:], words))
