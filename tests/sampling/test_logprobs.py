"""Log-probabilities of tokens and the likeliest tokens beside them, against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.sampling.logprobs import PACKED, TokenLogprobs, token_logprobs
from jspec.sampling.params import MAX_LOGPROBS


def expected(logits, token):
    """(log-probability, rank) of the token, and (token, log-probability) of the likeliest, the lower first among equals."""
    logits = logits.astype(np.float64)
    log_p = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    order = np.lexsort((np.arange(len(logits)), -logits))[:MAX_LOGPROBS]
    return log_p[token], 1 + (logits > logits[token]).sum(), order, log_p[order]


@pytest.mark.parametrize("V", [4, 20, 255, 256, 257, 5_000, 12_801])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_equal_numpy(V, ties):
    rng = np.random.default_rng(V)
    logits = rng.normal(size=(2, 3, V)).astype(np.float32) * 4
    if ties:
        logits = np.round(logits) + 0.0  # no negative zeros
    tokens = rng.integers(V, size=(2, 3)).astype(np.int32)
    packed = jax.jit(lambda *args: token_logprobs(*args).packed())(logits, tokens)
    assert packed.shape == (2, 3, PACKED)
    found = TokenLogprobs.unpacked(np.asarray(packed))
    n = min(V, MAX_LOGPROBS)
    for place in np.ndindex(2, 3):
        chosen, rank, likeliest, values = expected(logits[place], tokens[place])
        np.testing.assert_allclose(found.chosen[place], chosen, atol=2e-5)
        assert found.rank[place] == rank
        np.testing.assert_array_equal(found.tokens[place][:n], likeliest)
        np.testing.assert_allclose(found.values[place][:n], values, atol=2e-5)
        assert (found.tokens[place][n:] == -1).all()


def test_the_likeliest_tokens_of_one_group_are_found():
    logits = np.zeros((1, 1, 4_096), np.float32)
    logits[0, 0, 1_000:1_020] = np.arange(20, 0, -1)
    found = token_logprobs(jnp.asarray(logits), jnp.zeros((1, 1), jnp.int32))
    np.testing.assert_array_equal(found.tokens[0, 0], np.arange(1_000, 1_020))
    assert int(found.rank[0, 0]) == 21


def test_impossible_tokens_have_minus_infinity():
    logits = jnp.array([[[0.0, -jnp.inf, 1.0]]])
    found = token_logprobs(logits, jnp.array([[1]]))
    assert float(found.chosen[0, 0]) == -np.inf
    assert int(found.rank[0, 0]) == 3
    np.testing.assert_array_equal(found.tokens[0, 0, :3], [2, 0, 1])
