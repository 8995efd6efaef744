"""residual_masses and residual_sample against a float64 oracle, for their reference implementations and their kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from picks import shortfall
from residual_problems import B, K, T, problem

from jspec.pallas.sampling.residual import (
    LEAST,
    Residual,
    residual_masses,
    residual_masses_kernel,
    residual_masses_reference,
    residual_sample,
    residual_sample_kernel,
    residual_sample_reference,
)
from jspec.pallas.sampling.warped_logits import WarpedLogits, group_size, num_groups, over_vocabulary
from jspec.sampling.streams import RoundNoise

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


def over_all_tokens(residual):
    """The same residual with the draft's logits over all tokens."""
    logits = over_vocabulary(residual.q.logits, residual.draft_ids)
    return residual._replace(q=residual.q._replace(logits=logits), draft_ids=None)


def probability(rows, width):
    """float64 [B, J, width]."""
    z, scale, cutoff, lse = (np.asarray(x, np.float64) for x in rows)
    p = np.where(z >= cutoff[..., None], np.exp(z * scale[..., None] - lse[..., None]), 0.0)
    return np.pad(p, ((0, 0), (0, 0), (0, width - z.shape[2])))


def weights(residual):
    """float64 [B, T, V] of w p, and of what is left of it."""
    p, q, drafts, point_mass, valid, log_weight, draft_ids = residual
    V, row = p.logits.shape[2], np.broadcast_to(np.arange(T), (B, T))
    rejected, known = (
        row < np.asarray(valid)[:, None],
        np.take_along_axis(np.asarray(point_mass), np.minimum(row, K - 1), 1),
    )
    w = 1.0 if log_weight is None else np.where(rejected, np.exp(np.asarray(log_weight, np.float64)), 1.0)[..., None]
    target = np.where((row <= np.asarray(valid)[:, None])[..., None], probability(p, V), 0.0) * w
    drafted = np.minimum(row, K - 1)
    if draft_ids is None:
        q = probability(q, V)
    else:
        q = np.where(np.asarray(draft_ids) >= 0, probability(q, q.logits.shape[2])[..., np.asarray(draft_ids)], 0.0)
    draft = np.take_along_axis(q, drafted[..., None], axis=1) * (rejected & ~known)[..., None]
    token = np.take_along_axis(np.asarray(drafts), drafted, axis=1)
    excluded = np.where(rejected & known, token, -1)[..., None]
    return target, np.where(np.arange(V) == excluded, 0.0, np.maximum(target - draft, 0.0))


def subtracted(residual):
    """bool [B, T], where q is taken away from w p."""
    known = np.take_along_axis(np.asarray(residual.point_mass), np.minimum(np.arange(T), K - 1)[None], 1)
    return (np.arange(T) < np.asarray(residual.valid)[:, None]) & ~known


def by_group(weight):
    V = weight.shape[-1]
    groups, size = num_groups(V), group_size(V)
    return np.pad(weight, ((0, 0), (0, 0), (0, groups * size - V))).reshape(*weight.shape[:2], groups, size).sum(-1)


def assert_token_is_best(got, residual, at, noise, best):
    (token, ok), (target, left) = got, weights(residual)
    assert token.dtype == jnp.int32
    assert ok.all()
    at = np.asarray(at)
    target, left = (x[np.arange(B), at] for x in (target, left))
    known, token = np.asarray(best)[np.arange(B), at], np.asarray(token)
    weight, free = np.where(left.any(-1, keepdims=True), left, target), known < 0
    keys = jnp.stack(noise.of_requests().last_key(jnp.asarray(at), residual.valid), axis=-1)[free]
    short_of_best = shortfall(weight[free], keys, np.ones(free.sum(), bool), token[free])
    assert (short_of_best < MARGIN).all(), short_of_best
    np.testing.assert_array_equal(token[~free], known[~free])


class TestResidual:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.masses = implementation(residual_masses_reference, residual_masses_kernel)
        self.draw_one = implementation(residual_sample_reference, residual_sample_kernel)

    def sample(self, residual, *rest):
        return self.draw_one(residual, self.masses(residual), *rest)

    @pytest.mark.parametrize("scattered", [False, True])
    @pytest.mark.parametrize(("V", "V_q", "dtype"), CASES)
    @pytest.mark.parametrize("weighed", [True, False])
    def test_masses_agree_with_the_oracle(self, V, V_q, dtype, weighed, scattered):
        residual, at, *_ = problem(V, V_q, dtype, weighed=weighed, scattered=scattered)
        (_, left), masses, at_one = weights(residual), self.masses(residual), self.masses(residual, at)
        assert masses.dtype == at_one.dtype == jnp.float32
        np.testing.assert_allclose(masses, by_group(left), atol=3e-6)
        np.testing.assert_allclose(at_one[:, 0], by_group(left)[np.arange(B), at], atol=3e-6)
        assert left.sum(-1).max() > (0.05 if V > 1 else -1)

    @pytest.mark.parametrize("scattered", [False, True])
    @pytest.mark.parametrize(("V", "V_q", "dtype"), CASES)
    def test_tokens_agree_with_the_oracle(self, V, V_q, dtype, scattered):
        for seed in range(3):
            args = problem(V, V_q, dtype, seed, scattered=scattered)
            assert_token_is_best(self.sample(*args), *args)

    def test_a_draft_vocabulary_is_the_same_as_minus_infinity_outside_of_it(self):
        """The masses but for rounding, which differs with what XLA fuses, and every decision."""
        residual, at, *rest = problem(257, 200, "float32", scattered=True)
        full = over_all_tokens(residual)
        np.testing.assert_allclose(self.masses(residual), self.masses(full), rtol=1e-5)
        np.testing.assert_array_equal(self.sample(residual, at, *rest), self.sample(full, at, *rest))

    def test_tokens_past_the_end_of_a_draft_vocabulary_are_not_in_it(self):
        residual, at, *rest = problem(257, 200, "float32", scattered=True)
        cut = residual._replace(draft_ids=residual.draft_ids[:225])
        padded = residual._replace(draft_ids=residual.draft_ids.at[225:].set(-1))
        np.testing.assert_allclose(self.masses(cut), self.masses(padded), rtol=1e-6)
        np.testing.assert_array_equal(self.sample(cut, at, *rest), self.sample(padded, at, *rest))

    def test_the_masses_of_one_row_are_enough(self):
        residual, at, *rest = problem(257, 200, "float32")
        alone = self.draw_one(residual, self.masses(residual, at), at, *rest)
        np.testing.assert_array_equal(alone, self.sample(residual, at, *rest))

    def test_equal_distributions_leave_next_to_nothing_and_p_is_sampled(self):
        (p, _, *rest), *args = problem(257, 257, "float32", weighed=False)
        residual = Residual(p, WarpedLogits(*(x[:, :K] for x in p)), *rest)
        total = np.asarray(self.masses(residual)).sum(-1)
        rejected = subtracted(residual)
        np.testing.assert_allclose(total[rejected], LEAST, rtol=1e-5)
        assert_token_is_best(self.sample(residual, *args), residual, *args)

    def test_a_point_mass_is_not_sampled_even_if_it_is_the_likeliest(self):
        residual, _, noise, best = problem(257, 200, "float32", weighed=False)
        residual = residual._replace(point_mass=jnp.ones((B, K), bool), drafts=jnp.full((B, K), -1))
        at, best = jnp.zeros(B, jnp.int32), jnp.full_like(best, -1)
        first, _ = self.sample(residual, at, noise, best)
        residual = residual._replace(drafts=jnp.broadcast_to(first[:, None], (B, K)))
        second = self.sample(residual, at, noise, best)
        assert (second[0] != first).all()
        assert_token_is_best(second, residual, at, noise, best)

    def test_a_residual_of_one_rounding_step_is_still_found(self):
        z = jnp.full((1, 2, 300), -5.0).at[0, :, 130].set(-0.1)
        p = WarpedLogits(z, jnp.ones((1, 2)), jnp.full((1, 2), -jnp.inf), jnp.zeros((1, 2)))
        q = WarpedLogits(*(x[:, :1] for x in p))
        q = q._replace(logits=jnp.full((1, 1, 300), -4.0).at[0, 0, 130].set(jnp.nextafter(-0.1, -1.0)))
        none = jnp.zeros((1, 1), jnp.int32)
        residual = Residual(p, q, none, jnp.zeros((1, 1), bool), jnp.ones(1, jnp.int32), None)
        for length in range(20):
            noise = RoundNoise(jnp.zeros((1, 2), jnp.uint32), jnp.full(1, length, jnp.int32))
            token, _ = self.sample(residual, none[0], noise, jnp.full((1, 2), -1))
            assert token.tolist() == [130]

    def test_bad_numbers_stay_in_their_rows(self):
        residual, at, *rest = problem(257, 200, "float32")
        sampled = np.arange(T)[None] == np.asarray(at)[:, None]
        used = sampled & subtracted(residual)
        p, q = (
            rows._replace(lse=jnp.where(mask, rows.lse, jnp.nan))
            for rows, mask in ((residual.p, sampled), (residual.q, used[:, :K]))
        )
        poisoned = residual._replace(p=p, q=q)
        clean, masses = self.masses(residual), self.masses(poisoned)
        wanted = np.arange(T) <= np.asarray(residual.valid)[:, None]
        np.testing.assert_array_equal(np.isnan(masses).any(-1), wanted & ~sampled)
        np.testing.assert_array_equal(np.asarray(masses)[sampled], np.asarray(clean)[sampled])
        np.testing.assert_array_equal(self.sample(poisoned, at, *rest), self.sample(residual, at, *rest))

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_row_without_a_distribution_is_reported(self, bad):
        residual, at, *rest = problem(257, 200, "float32")
        lse = residual.p.lse.at[1, at[1]].set(bad).at[2, 0].set(bad)
        _, ok = self.sample(residual._replace(p=residual.p._replace(lse=lse)), at, *rest)
        np.testing.assert_array_equal(ok, [True, False, True, True])


def test_the_public_functions_are_the_references_on_a_cpu():
    residual, *rest = problem(127, 100, "float32")
    with jax.default_device(jax.devices("cpu")[0]):
        masses = jax.jit(residual_masses)(residual)
        np.testing.assert_array_equal(masses, jax.jit(residual_masses_reference)(residual))
        got = jax.jit(residual_sample)(residual, masses, *rest)
        np.testing.assert_array_equal(got, jax.jit(residual_sample_reference)(residual, masses, *rest))
