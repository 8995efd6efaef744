"""The distribution of a row is that of its stored logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.matmul import matmul
from jspec.sampling.distribution import Distribution, Warp, make_distribution

MAKE, LOG_PROB = jax.jit(make_distribution), jax.jit(Distribution.log_prob)


def warp_of(*settings: tuple) -> Warp:
    """Temperature, top-k, top-p and min-p of each row."""
    temperature, top_k, *least = zip(*settings, strict=True)
    return Warp(jnp.float32(temperature), jnp.int32(top_k), *map(jnp.float32, least))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_reader_sees_the_stored_logits(dtype):
    """XLA may keep the product that makes bfloat16 logits in float32 for the readers that it fuses with it."""
    B, V = 16, 300
    hidden, weight = (
        jax.random.normal(key, (n, 64)).astype(dtype)
        for key, n in zip(jax.random.split(jax.random.key(0)), (B, V), strict=True)
    )
    warp = warp_of(*[(0.7, 20, 1, 0)] * B)

    def from_hidden(hidden, weight):
        return make_distribution(matmul(hidden, weight)[:, None], warp)[0]

    together = jax.jit(from_hidden)(hidden, weight)
    alone = jax.jit(lambda logits: make_distribution(logits, warp)[0])(together.warped.logits)
    assert together.warped.logits.dtype == dtype
    tokens = jnp.argmax(together.warped.logits, axis=-1)
    np.testing.assert_array_equal(together.warped.cutoff, alone.warped.cutoff)
    np.testing.assert_allclose(together.warped.lse, alone.warped.lse, rtol=1e-6)
    log_prob = jax.jit(lambda h, w: from_hidden(h, w).log_prob(tokens))(hidden, weight)
    np.testing.assert_allclose(log_prob, LOG_PROB(alone, tokens), rtol=1e-5, atol=1e-5)


def test_ties_at_the_cutoff_all_remain():
    distribution, _ = MAKE(np.array([[[2.0, 1.0, 1.0, 0.0]]], np.float32), warp_of((1, 2, 1, 0)))
    log_p = np.array([np.asarray(LOG_PROB(distribution, np.full((1, 1), v)))[0, 0] for v in range(4)])
    expected = np.exp([2.0, 1.0, 1.0]) / np.exp([2.0, 1.0, 1.0]).sum()
    np.testing.assert_allclose(np.exp(log_p), [*expected, 0.0], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_with_non_finite_logits_is_no_distribution(bad):
    logits = np.zeros((2, 1, 5), np.float32)
    logits[1, 0, 3] = bad
    distribution, _ = MAKE(logits, warp_of(*[(1, 0, 1, 0)] * 2))
    np.testing.assert_array_equal(distribution.finite, [[True], [False]])
