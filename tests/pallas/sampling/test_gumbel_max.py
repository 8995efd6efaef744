"""Tokens sampled by the Gumbel-max trick in two steps, a group and a token in it, follow their distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossless.statistics import p_value

from jspec.pallas.sampling.gumbel_max import group_words, gumbel_max_reference
from jspec.pallas.sampling.warped_logits import grouped

V, SAMPLES = 11, 60_000


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr("jspec.pallas.sampling.warped_logits.GROUP", 4)


def tokens(log_weight, key_data):
    log_mass = jax.nn.logsumexp(grouped(log_weight), axis=-1)
    return np.asarray(jax.jit(gumbel_max_reference)(log_mass, log_weight, key_data))


def keys(seed):
    return jax.random.key_data(jax.random.split(jax.random.key(seed), SAMPLES))


def test_tokens_follow_their_distribution_across_groups():
    log_weight = 2 * jax.random.normal(jax.random.key(1), (V,))
    log_weight = log_weight.at[jnp.array([0, 5])].set(-jnp.inf)
    distribution = np.exp(np.asarray(log_weight, np.float64))
    counts = np.bincount(tokens(jnp.broadcast_to(log_weight, (SAMPLES, V)), keys(2)), minlength=V)
    assert counts[[0, 5]].sum() == 0
    assert p_value(counts, distribution / distribution.sum()) > 1e-6


def test_samples_of_another_distribution_are_rejected():
    uniform = np.full(V, 1 / V)
    counts = np.bincount(tokens(jnp.broadcast_to(0.1 * jnp.arange(V), (SAMPLES, V)), keys(3)), minlength=V)
    assert p_value(counts, uniform) < 1e-6


def test_a_vocabulary_that_ends_inside_a_group_is_sampled_alike():
    """A draft's vocabulary may be narrower than the target's: the noise of a token is the same in both."""
    log_weight = jax.random.normal(jax.random.key(4), (SAMPLES, V)).at[:, 9:].set(-jnp.inf)
    np.testing.assert_array_equal(tokens(log_weight, keys(5)), tokens(log_weight[:, :9], keys(5)))


def test_groups_and_tokens_take_different_words():
    words = set(np.asarray(group_words(jnp.arange(1 << 10, dtype=jnp.int32))).tolist())
    assert len(words) == 1 << 10
    assert min(words) > 1 << 30
