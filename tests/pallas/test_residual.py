"""residual_masses and residual_draw against a float64 oracle, for their twins and their kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from picks import shortfall

from jspec.pallas.draw import weigh
from jspec.pallas.residual import (
    Residual,
    residual_draw,
    residual_draw_kernel,
    residual_draw_reference,
    residual_masses,
    residual_masses_kernel,
    residual_masses_reference,
)
from jspec.pallas.rows import Rows, group_size, num_groups

B, K, T = 4, 3, 4
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
    *_, lse = weigh(logits.reshape(-1, V), scale.reshape(-1), threshold.reshape(-1))
    return Rows(logits, scale, threshold, lse.reshape(B, J))


def problem(V, V_q, dtype, seed=0, weighed=True):
    """A residual of every row, at, key_data, known: draws at both ends, q on and off, a token excluded, one known."""
    keys = jax.random.split(jax.random.key(seed), 4)
    p, q = laws(keys[0], T, V, dtype), laws(keys[1], K, V_q, dtype)
    row = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    excluded = jnp.full((B, T), -1).at[3, 1].set(V // 2 if V > 1 else -1)
    use_q = (row < K) & (excluded < 0)
    log_weight = jnp.log(jax.random.uniform(keys[2], (B, T), minval=0.2)).at[0].set(0.0) if weighed else None
    key_data = jax.random.key_data(jax.random.split(keys[3], B))
    at, known = jnp.array([0, K - 1, K, 1], jnp.int32), jnp.full(B, -1).at[0].set(V - 1)
    return Residual(p, q, row, log_weight, use_q, excluded), at, key_data, known


def probability(rows, width):
    """float64 [B, J, width]."""
    z, scale, threshold, lse = (np.asarray(x, np.float64) for x in rows)
    p = np.where(z >= threshold[..., None], np.exp(z * scale[..., None] - lse[..., None]), 0.0)
    return np.pad(p, ((0, 0), (0, 0), (0, width - z.shape[2])))


def weights(residual):
    """float64 [B, J, V] of w p, and of what is left of it."""
    p, q, row, log_weight, use_q, excluded = residual
    V, b, row = p.logits.shape[2], np.arange(B)[:, None], np.asarray(row)
    w = 1.0 if log_weight is None else np.exp(np.asarray(log_weight, np.float64))[..., None]
    target = probability(p, V)[b, row] * w
    draft = probability(q, V)[b, np.minimum(row, K - 1)] * np.asarray(use_q)[..., None]
    left = np.where(np.arange(V) == np.asarray(excluded)[..., None], 0.0, np.maximum(target - draft, 0.0))
    return target, left


def by_group(weight):
    V = weight.shape[-1]
    groups, size = num_groups(V), group_size(V)
    return np.pad(weight, ((0, 0), (0, 0), (0, groups * size - V))).reshape(*weight.shape[:2], groups, size).sum(-1)


def assert_token_is_best(token, residual, at, key_data, known):
    token, (target, left) = np.asarray(token), weights(residual)
    assert token.dtype == np.int32
    target, left = (x[np.arange(B), np.minimum(at, x.shape[1] - 1)] for x in (target, left))
    weight, free = np.where(left.any(-1, keepdims=True), left, target), np.asarray(known) < 0
    short_of_best = shortfall(weight[free], key_data[free], np.ones(free.sum(), bool), token[free])
    assert (short_of_best < MARGIN).all(), short_of_best
    np.testing.assert_array_equal(token[~free], np.asarray(known)[~free])


def every_row(p, q):
    """max(p - q, 0) of the K rows."""
    row = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (B, K))
    return Residual(p, q, row, None, jnp.ones((B, K), bool), jnp.full((B, K), -1))


class TestResidual:
    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        self.masses = implementation(residual_masses_reference, residual_masses_kernel)
        self.draw_one = implementation(residual_draw_reference, residual_draw_kernel)

    def draw(self, residual, *rest):
        return self.draw_one(residual, self.masses(residual), *rest)

    @pytest.mark.parametrize(("V", "V_q", "dtype"), CASES)
    @pytest.mark.parametrize("weighed", [True, False])
    def test_masses_agree_with_the_oracle(self, V, V_q, dtype, weighed):
        residual, *_ = problem(V, V_q, dtype, weighed=weighed)
        masses, (target, left) = self.masses(residual), weights(residual)
        assert masses.left.dtype == masses.all.dtype == jnp.float32
        np.testing.assert_allclose(masses.all, by_group(target), atol=3e-6)
        np.testing.assert_allclose(masses.left, by_group(left), atol=3e-6)
        assert left.sum(-1).max() > (0.05 if V > 1 else -1)

    @pytest.mark.parametrize(("V", "V_q", "dtype"), CASES)
    def test_tokens_agree_with_the_oracle(self, V, V_q, dtype):
        for seed in range(3):
            args = problem(V, V_q, dtype, seed)
            assert_token_is_best(self.draw(*args), *args)

    def test_one_row_is_drawn_from_alone(self):
        residual, at, key_data, known = problem(1031, 640, "bfloat16")
        one = [None if x is None else x[jnp.arange(B), at][:, None] for x in residual[2:]]
        alone = Residual(*residual[:2], *one)
        np.testing.assert_array_equal(self.draw(alone, at, key_data, known), self.draw(residual, at, key_data, known))

    def test_equal_laws_leave_exactly_nothing_and_the_draw_is_from_p(self):
        (p, *_), at, key_data, known = problem(257, 257, "bfloat16")
        residual = every_row(p, Rows(*(x[:, :K] for x in p)))
        masses = self.masses(residual)
        np.testing.assert_array_equal(masses.left, np.zeros(masses.left.shape))
        assert_token_is_best(self.draw(residual, at, key_data, known), residual, at, key_data, known)

    def test_the_excluded_token_is_not_drawn_even_if_it_is_the_likeliest(self):
        residual, at, key_data, _ = problem(257, 200, "float32")
        known = jnp.full(B, -1)
        residual = residual._replace(use_q=jnp.zeros((B, T), bool), excluded=jnp.full((B, T), -1))
        first = self.draw(residual, at, key_data, known)
        residual = residual._replace(excluded=jnp.broadcast_to(first[:, None], (B, T)))
        second = self.draw(residual, at, key_data, known)
        assert (second != first).all()
        assert_token_is_best(second, residual, at, key_data, known)

    def test_a_residual_of_one_rounding_step_is_still_found(self):
        z = jnp.full((1, 2, 300), -5.0).at[0, :, 130].set(-0.1)
        p = Rows(z, jnp.ones((1, 2)), jnp.full((1, 2), -jnp.inf), jnp.zeros((1, 2)))
        q = Rows(*(x[:, :1] for x in p))
        q = q._replace(logits=jnp.full((1, 1, 300), -4.0).at[0, 0, 130].set(jnp.nextafter(-0.1, -1.0)))
        first = jnp.zeros((1, 1), jnp.int32)
        residual = Residual(p, q, first, None, jnp.ones((1, 1), bool), first - 1)
        assert self.draw(residual, first[0], jnp.zeros((1, 2), jnp.uint32), first[0] - 1).tolist() == [130]

    def test_bad_numbers_stay_in_their_rows(self):
        args = residual, at, *_ = problem(257, 200, "float32")
        drawn = np.arange(T)[None, :] == np.asarray(at)[:, None]
        used = (drawn & np.asarray(residual.use_q))[:, :K]
        p, q = (
            rows._replace(lse=jnp.where(keep, rows.lse, jnp.nan))
            for rows, keep in ((residual.p, drawn), (residual.q, used))
        )
        poisoned = residual._replace(p=p, q=q)
        clean, masses = self.masses(residual), self.masses(poisoned)
        assert np.isnan(masses.left).any(-1)[~drawn].all()
        np.testing.assert_array_equal(np.asarray(masses.left)[drawn], np.asarray(clean.left)[drawn])
        np.testing.assert_array_equal(self.draw(poisoned, *args[1:]), self.draw(*args))


def test_the_public_functions_are_the_twins_on_a_cpu():
    residual, *rest = problem(127, 100, "float32")
    with jax.default_device(jax.devices("cpu")[0]):
        masses = jax.jit(residual_masses)(residual)
        for got, expected in zip(masses, jax.jit(residual_masses_reference)(residual), strict=True):
            np.testing.assert_array_equal(got, expected)
        token = jax.jit(residual_draw)(residual, masses, *rest)
        np.testing.assert_array_equal(token, jax.jit(residual_draw_reference)(residual, masses, *rest))
