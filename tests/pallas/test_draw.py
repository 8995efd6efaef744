"""draw against a float64 oracle, for its twin and its kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.draw import draw, draw_kernel, draw_reference
from jspec.pallas.noise import random_bits, uniform_of_bits

MARGIN = 1e-5
R = 8


def oracle(logits, scale, threshold, key_data=None, noisy=None):
    """Scores [R, V] whose argmax is the token, and lse [R], in float64."""
    z = np.asarray(logits, np.float64)
    scaled = np.where(
        z >= np.asarray(threshold, np.float64)[:, None], z * np.asarray(scale, np.float64)[:, None], -np.inf
    )
    lse = np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1)) + scaled.max(-1)
    if key_data is not None:
        uniform = np.asarray(uniform_of_bits(random_bits(key_data, z.shape[1])), np.float64)
        scaled = scaled + np.where(np.asarray(noisy)[:, None], -np.log(-np.log1p(-uniform)), 0.0)
    return scaled, lse


def problem(V, dtype, seed=0):
    """Rows with and without noise, with and without a cut, at several temperatures."""
    keys = jax.random.split(jax.random.key(seed), 3)
    logits = (4 * jax.random.normal(keys[0], (R, V))).astype(dtype)
    scale = jnp.where(jnp.arange(R) % 2 == 0, 1.0, jax.random.uniform(keys[1], (R,), minval=0.5, maxval=4.0))
    median = jnp.sort(logits.astype(jnp.float32), axis=-1)[:, V // 2]
    threshold = jnp.where(jnp.arange(R) % 4 < 2, -jnp.inf, median)
    return logits, scale, threshold, jax.random.key_data(jax.random.split(keys[2], R)), jnp.arange(R) % 2 == 1


def assert_agrees(got, args):
    token, lse = np.asarray(got[0]), np.asarray(got[1])
    score, expected_lse = oracle(*args)
    assert token.dtype == np.int32
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, expected_lse, atol=3e-6, rtol=1e-6)
    assert ((token >= 0) & (token < score.shape[1])).all()
    short_of_best = score.max(-1) - np.take_along_axis(score, token[:, None], -1)[:, 0]
    assert (short_of_best < MARGIN).all(), short_of_best


class TestDraw:
    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        self.draw = implementation(draw_reference, draw_kernel)

    @pytest.mark.parametrize(
        ("V", "dtype"),
        [
            *[(1, "bfloat16"), (2, "float32"), (3, "bfloat16"), (127, "float32")],
            *[(257, "bfloat16"), (1000, "float32"), (1031, "bfloat16"), (1031, "float32")],
        ],
    )
    def test_agrees_with_the_oracle(self, V, dtype):
        args = problem(V, dtype)
        assert_agrees(self.draw(*args), args)

    def test_without_keys_no_row_draws(self):
        args = problem(257, "float32")[:3]
        assert_agrees(self.draw(*args), args)

    def test_a_greedy_tie_goes_to_the_lowest_id_across_blocks(self):
        logits = jnp.zeros((2, 600)).at[0, jnp.array([599, 130, 301])].set(7.0).at[1, jnp.array([255, 256])].set(7.0)
        token, _ = self.draw(logits, jnp.ones(2), jnp.full(2, -jnp.inf))
        assert token.tolist() == [130, 255]

    def test_minus_infinity_is_never_drawn_even_as_a_whole_block(self):
        logits, scale, threshold, keys, _ = problem(1000, "float32")
        banned = (jnp.arange(1000) < 900) | (jnp.arange(1000) % 3 == 0)
        logits, threshold = jnp.where(banned[None, :], -jnp.inf, logits), jnp.full(R, -jnp.inf)
        args = (logits, scale, threshold, keys, jnp.ones(R, bool))
        got = self.draw(*args)
        assert_agrees(got, args)
        assert not banned[got[0]].any()

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_bad_number_reaches_lse_and_no_other_row(self, bad):
        args = problem(257, "float32")
        clean_token, clean_lse = self.draw(*args)
        poisoned = args[0].at[2, 256].set(bad).at[5, 0].set(bad).at[6].set(bad)
        token, lse = self.draw(poisoned, *args[1:])
        rows = np.array([2, 5, 6])
        assert not np.isfinite(np.asarray(lse)[rows]).any()
        assert ((token >= 0) & (token < 257)).all()
        others = np.setdiff1d(np.arange(R), rows)
        np.testing.assert_array_equal(np.asarray(token)[others], np.asarray(clean_token)[others])
        np.testing.assert_array_equal(np.asarray(lse)[others], np.asarray(clean_lse)[others])

    def test_a_row_of_nothing_has_no_finite_normaliser(self):
        logits, *rest = problem(257, "float32")
        _, lse = self.draw(jnp.full_like(logits, -jnp.inf), *rest[:1], jnp.full(R, -jnp.inf), *rest[2:])
        assert not np.isfinite(lse).any()

    def test_rows_do_not_see_their_slot(self):
        args = problem(257, "bfloat16")
        order = jnp.array([3, 1, 7, 0, 2, 6, 5, 4])
        token, lse = self.draw(*args)
        moved_token, moved_lse = self.draw(*(x[order] for x in args))
        np.testing.assert_array_equal(moved_token, token[order])
        np.testing.assert_array_equal(moved_lse, lse[order])


def test_the_public_function_is_the_twin_on_a_cpu():
    args = problem(127, "float32")
    with jax.default_device(jax.devices("cpu")[0]):
        for got, expected in zip(jax.jit(draw)(*args), jax.jit(draw_reference)(*args), strict=True):
            np.testing.assert_array_equal(got, expected)
