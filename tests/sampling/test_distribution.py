"""The distribution of a row is that of its stored logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.matmul import matmul
from jspec.sampling.distribution import Warp, make_distribution


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_reader_sees_the_stored_logits(dtype):
    """XLA may keep the product that makes bfloat16 logits in float32 for the readers that it fuses with it."""
    B, V = 16, 300
    hidden, weight = (
        jax.random.normal(key, (n, 64)).astype(dtype)
        for key, n in zip(jax.random.split(jax.random.key(0)), (B, V), strict=True)
    )
    warp = Warp(jnp.full(B, 0.7), jnp.full(B, 20, jnp.int32), jnp.ones(B), jnp.zeros(B))

    def from_hidden(hidden, weight):
        return make_distribution(matmul(hidden, weight)[:, None], warp)[0]

    together = jax.jit(from_hidden)(hidden, weight)
    alone = jax.jit(lambda logits: make_distribution(logits, warp)[0])(together.warped.logits)
    assert together.warped.logits.dtype == dtype
    tokens = jnp.argmax(together.warped.logits, axis=-1)
    np.testing.assert_array_equal(together.warped.cutoff, alone.warped.cutoff)
    np.testing.assert_allclose(together.warped.lse, alone.warped.lse, rtol=1e-6)
    log_prob = jax.jit(lambda h, w: from_hidden(h, w).log_prob(tokens))(hidden, weight)
    np.testing.assert_allclose(log_prob, alone.log_prob(tokens), rtol=1e-5, atol=1e-5)


def test_ties_at_the_cutoff_all_remain():
    logits = jnp.array([[[2.0, 1.0, 1.0, 0.0]]])
    distribution, _ = make_distribution(logits, Warp(jnp.ones(1), jnp.full(1, 2, jnp.int32), jnp.ones(1), jnp.zeros(1)))
    log_p = np.array([distribution.log_prob(jnp.full((1, 1), v))[0, 0] for v in range(4)])
    expected = np.exp([2.0, 1.0, 1.0]) / np.exp([2.0, 1.0, 1.0]).sum()
    np.testing.assert_allclose(np.exp(log_p), [*expected, 0.0], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_row_with_non_finite_logits_is_no_distribution(bad):
    logits = jnp.zeros((2, 1, 5)).at[1, 0, 3].set(bad)
    distribution, _ = make_distribution(logits, Warp(jnp.ones(2), jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2)))
    np.testing.assert_array_equal(distribution.finite[:, 0], [True, False])
