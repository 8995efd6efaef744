"""residual_mass and residual_draw against a float64 oracle, for their twins and their kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.draw import draw_reference
from jspec.pallas.noise import random_bits, uniform_of_bits
from jspec.pallas.residual import (
    Rows,
    residual_draw,
    residual_draw_kernel,
    residual_draw_reference,
    residual_mass,
    residual_mass_kernel,
    residual_mass_reference,
)

B, K = 4, 3
MARGIN = 1e-4  # of the float32 logarithm of a difference, against float64
CASES = [
    (1, 1, "bfloat16"),
    (2, 2, "float32"),
    (3, 1, "float32"),
    (127, 127, "bfloat16"),
    (257, 200, "float32"),
    (1000, 1000, "bfloat16"),
    (1031, 640, "bfloat16"),
    (1031, 1031, "float32"),
]


def laws(key, J, V, dtype, spread=3.0):
    """J rows per request, every second one cut below its median."""
    keys = jax.random.split(key, 2)
    logits = (spread * jax.random.normal(keys[0], (B, J, V))).astype(dtype)
    scale = jax.random.uniform(keys[1], (B, J), minval=0.5, maxval=2.0)
    median = jnp.sort(logits.astype(jnp.float32), axis=-1)[..., V // 2]
    threshold = jnp.where((jnp.arange(B)[:, None] + jnp.arange(J)[None, :]) % 2 == 0, -jnp.inf, median)
    _, lse = draw_reference(logits.reshape(-1, V), scale.reshape(-1), threshold.reshape(-1))
    return Rows(logits, scale, threshold, lse.reshape(B, J))


def problem(V, V_q, dtype, seed=0):
    """p, q, row, log_weight, use_q, excluded, key_data, noisy: rows at both ends, greedy beside noisy, q on and off."""
    keys = jax.random.split(jax.random.key(seed), 4)
    p, q = laws(keys[0], K + 1, V, dtype), laws(keys[1], K, V_q, dtype)
    row = jnp.array([0, K - 1, K, 1], jnp.int32)
    use_q = jnp.array([True, True, False, True])
    excluded = jnp.array([-1, -1, V // 2 if V > 1 else -1, -1], jnp.int32)
    log_weight = jnp.log(jax.random.uniform(keys[2], (B,), minval=0.2)).at[0].set(0.0)
    key_data = jax.random.key_data(jax.random.split(keys[3], B))
    return p, q, row, log_weight, use_q, excluded, key_data, jnp.array([True, False, True, True])


def probability(rows, width):
    """float64 [B, J, width]."""
    z, scale, threshold, lse = (np.asarray(x, np.float64) for x in rows)
    p = np.where(z >= threshold[..., None], np.exp(z * scale[..., None] - lse[..., None]), 0.0)
    return np.pad(p, ((0, 0), (0, 0), (0, width - z.shape[2])))


def scores(p, q, row, log_weight, use_q, excluded, key_data, noisy):
    """float64 [B, V] whose argmax is the token."""
    V, b, row = p.logits.shape[2], np.arange(B), np.asarray(row)
    target = probability(p, V)[b, row] * np.exp(np.asarray(log_weight, np.float64))[:, None]
    draft = probability(q, V)[b, np.minimum(row, K - 1)] * np.asarray(use_q)[:, None]
    left = np.where(np.arange(V) == np.asarray(excluded)[:, None], 0.0, np.maximum(target - draft, 0.0))
    left = np.where(left.any(-1, keepdims=True), left, target)
    uniform = np.asarray(uniform_of_bits(random_bits(key_data, V)), np.float64)
    with np.errstate(divide="ignore"):
        return np.log(left) + np.where(np.asarray(noisy)[:, None], -np.log(-np.log1p(-uniform)), 0.0)


def assert_token_is_best(token, args):
    token, score = np.asarray(token), scores(*args)
    assert token.dtype == np.int32
    short_of_best = score.max(-1) - score[np.arange(B), token]
    assert (short_of_best < MARGIN).all(), short_of_best


class TestResidualMass:
    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        self.mass = implementation(residual_mass_reference, residual_mass_kernel)

    @pytest.mark.parametrize(("V", "V_q", "dtype"), CASES)
    def test_agrees_with_the_oracle(self, V, V_q, dtype):
        p, q, *_ = problem(V, V_q, dtype)
        log_weight = jnp.log(jax.random.uniform(jax.random.key(9), (B, K), minval=0.1)).at[0].set(0.0)
        weighed = probability(p, V)[:, :K] * np.exp(np.asarray(log_weight, np.float64))[..., None]
        expected = np.maximum(weighed - probability(q, V), 0.0).sum(-1)
        mass = self.mass(p, q, log_weight)
        assert mass.dtype == jnp.float32
        np.testing.assert_allclose(mass, expected, atol=3e-6)
        assert expected.max() > (0.05 if V > 1 else -1)

    def test_equal_laws_leave_exactly_nothing(self):
        p, *_ = problem(257, 257, "bfloat16")
        q = Rows(*(x[:, :K] for x in p))
        np.testing.assert_array_equal(self.mass(p, q, jnp.zeros((B, K))), np.zeros((B, K)))

    def test_a_bad_number_stays_in_its_row_and_the_bonus_row_is_not_read(self):
        p, q, *_ = problem(257, 200, "float32")
        clean = np.array(self.mass(p, q, jnp.zeros((B, K))))
        p = p._replace(logits=p.logits.at[:, K].set(jnp.nan), lse=p.lse.at[:, K].set(jnp.nan))
        q = q._replace(logits=q.logits.at[1, 1].set(jnp.inf), lse=q.lse.at[1, 1].set(jnp.nan))
        mass = np.array(self.mass(p, q, jnp.zeros((B, K))))
        assert np.isnan(mass[1, 1])
        mass[1, 1] = clean[1, 1]
        np.testing.assert_array_equal(mass, clean)


class TestResidualDraw:
    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        self.draw = implementation(residual_draw_reference, residual_draw_kernel)

    @pytest.mark.parametrize(("V", "V_q", "dtype"), CASES)
    def test_agrees_with_the_oracle(self, V, V_q, dtype):
        for seed in range(3):
            args = problem(V, V_q, dtype, seed)
            assert_token_is_best(self.draw(*args), args)

    def test_equal_laws_fall_back_to_a_draw_from_p(self):
        p, _, row, _, _, _, key_data, noisy = problem(257, 257, "bfloat16")
        q = Rows(*(x[:, :K] for x in p))
        row = jnp.minimum(row, K - 1)
        token = self.draw(p, q, row, jnp.zeros(B), jnp.ones(B, bool), jnp.full(B, -1), key_data, noisy)
        chosen = (x[jnp.arange(B), row] for x in p[:3])
        np.testing.assert_array_equal(token, draw_reference(*chosen, key_data, noisy)[0])

    def test_the_excluded_token_is_not_drawn_even_if_it_is_the_likeliest(self):
        args = list(problem(257, 200, "float32"))
        args[4], args[5] = jnp.zeros(B, bool), jnp.full(B, -1)
        first = self.draw(*args)
        args[5] = first
        second = self.draw(*args)
        assert (second != first).all()
        assert_token_is_best(second, args)

    def test_a_residual_of_one_rounding_step_is_still_found(self):
        z = jnp.full((1, 2, 300), -5.0).at[0, :, 130].set(-0.1)
        p = Rows(z, jnp.ones((1, 2)), jnp.full((1, 2), -jnp.inf), jnp.zeros((1, 2)))
        q = Rows(*(x[:, :1] for x in p))
        q = q._replace(logits=jnp.full((1, 1, 300), -4.0).at[0, 0, 130].set(jnp.nextafter(-0.1, -1.0)))
        row, one = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
        for noisy in (one, ~one):
            token = self.draw(p, q, row, jnp.zeros(1), one, row - 1, jnp.zeros((1, 2), jnp.uint32), noisy)
            assert token.tolist() == [130]

    def test_bad_numbers_in_rows_that_are_not_drawn_from_change_nothing(self):
        args = problem(257, 200, "float32")
        p, q, row, *rest = args
        chosen = np.arange(K + 1)[None, :] == np.asarray(row)[:, None]
        used = chosen[:, :K] & np.asarray(rest[1])[:, None]
        poison = lambda x, keep: jnp.where(keep.reshape(*keep.shape, *(1,) * (x.ndim - 2)), x, jnp.nan)  # noqa: E731
        poisoned_p, poisoned_q = (Rows(*(poison(x, keep) for x in rows)) for rows, keep in ((p, chosen), (q, used)))
        np.testing.assert_array_equal(self.draw(poisoned_p, poisoned_q, row, *rest), self.draw(*args))


def test_the_public_functions_are_the_twins_on_a_cpu():
    args = problem(127, 100, "float32")
    masses = (*args[:2], jnp.zeros((B, K)))
    with jax.default_device(jax.devices("cpu")[0]):
        np.testing.assert_array_equal(jax.jit(residual_draw)(*args), jax.jit(residual_draw_reference)(*args))
        np.testing.assert_array_equal(jax.jit(residual_mass)(*masses), jax.jit(residual_mass_reference)(*masses))
