"""sample against a float64 oracle, for its reference implementation and its kernel; cutoffs have a file of their
own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normals import normal
from picks import shortfall

from jspec.pallas.sampling.sample import sample, sample_kernel, sample_reference

MARGIN = 1e-5
B, J = 8, 2


def problem(V, dtype, seed=0):
    """Requests with and without noise and filters, at several temperatures."""
    rng, kind = np.random.default_rng(seed), np.arange(B)
    temperature = np.where(kind % 2 == 0, 0.0, rng.uniform(0.25, 2.0, B))
    temperature[3] = 1.0
    top_p, min_p = np.where((kind == 5) | (kind == 7), 0.9, 1.0), np.where(kind == 7, 0.01, 0.0)
    of_rows = jnp.asarray(np.where(kind % 4 == 1, V // 2, 0).astype(np.int32)), *map(jnp.float32, (top_p, min_p))
    keys = jnp.asarray(rng.integers(2**32, size=(B, J, 2), dtype=np.uint32))
    return normal(rng, (B, J, V), dtype, scale=4), jnp.float32(temperature), *of_rows, keys


def assert_agrees(got, args):
    token, rows = got
    logits, temperature, *_ = args
    if len(args) == 5:
        undrawn = np.broadcast_to(np.asarray(temperature)[:, None] > 0, token.shape)
        np.testing.assert_array_equal(token == -1, undrawn)
        token = jnp.where(undrawn, jnp.argmax(logits, axis=-1).astype(jnp.int32), token)
    key_data = args[5] if len(args) > 5 else jnp.zeros((B, J, 2), jnp.uint32)
    assert token.dtype == jnp.int32
    assert rows.lse.dtype == jnp.float32
    np.testing.assert_allclose(
        rows.scale[:, 0], np.where(temperature == 0, 1, 1 / np.maximum(temperature, 1e-9)), rtol=1e-6
    )
    z, scale, cutoff = (np.asarray(x, np.float64) for x in rows[:3])
    scaled = np.where(z >= cutoff[..., None], z * scale[..., None], -np.inf)
    peak = scaled.max(-1, keepdims=True)
    weight = np.exp(scaled - peak)
    np.testing.assert_allclose(rows.lse, np.log(weight.sum(-1)) + peak[..., 0], atol=3e-6, rtol=1e-6)
    assert ((token >= 0) & (token < logits.shape[2])).all()
    noisy = np.repeat(np.asarray(temperature) > 0, J) & (len(args) > 5)
    flat = lambda x: x.reshape(B * J, -1)  # noqa: E731
    short_of_best = shortfall(flat(weight), flat(key_data), noisy, token.reshape(-1))
    assert (short_of_best < MARGIN).all(), short_of_best


class TestSample:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.sample = implementation(sample_reference, sample_kernel)

    @pytest.mark.parametrize(
        ("V", "dtype"),
        [
            *[(1, "bfloat16"), (2, "float32"), (3, "bfloat16"), (127, "float32")],
            *[(257, "bfloat16"), (1000, "float32"), (1031, "bfloat16"), (1031, "float32")],
        ],
    )
    def test_agrees_with_the_oracle(self, V, dtype):
        args = problem(V, dtype)
        assert_agrees(self.sample(*args), args)

    def test_without_keys_only_greedy_rows_have_a_token(self):
        args = problem(257, "float32")[:5]
        assert_agrees(self.sample(*args), args)

    def test_filters_of_greedy_requests_are_ignored(self):
        logits, temperature, *_ = problem(257, "float32")
        _, rows = self.sample(logits, temperature, jnp.full(B, 3, jnp.int32), jnp.full(B, 0.5), jnp.full(B, 0.5))
        np.testing.assert_array_equal(
            np.isneginf(rows.cutoff), np.repeat(np.asarray(temperature) == 0, J).reshape(B, J)
        )

    def test_a_greedy_tie_goes_to_the_lowest_id_across_blocks(self):
        logits = jnp.zeros((1, 2, 600)).at[0, 0, jnp.array([599, 130, 301])].set(7.0)
        logits = logits.at[0, 1, jnp.array([255, 256])].set(7.0)
        token, _ = self.sample(logits, jnp.zeros(1), jnp.zeros(1, jnp.int32), jnp.ones(1), jnp.zeros(1))
        assert token.tolist() == [[130, 255]]

    def test_minus_infinity_is_never_sampled_even_as_a_whole_block(self):
        logits, *_, key_data = problem(1000, "float32")
        banned = (jnp.arange(1000) < 900) | (jnp.arange(1000) % 3 == 0)
        logits = jnp.where(banned[None, None, :], -jnp.inf, logits)
        args = (logits, jnp.full(B, 0.8), jnp.zeros(B, jnp.int32), jnp.ones(B), jnp.zeros(B), key_data)
        got = self.sample(*args)
        assert_agrees(got, args)
        assert not banned[got[0]].any()

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_a_bad_number_reaches_lse_and_no_other_row(self, bad):
        args = problem(257, "float32")
        clean_token, clean = self.sample(*args)
        poisoned = args[0].at[2, 0, 256].set(bad).at[5, 1, 0].set(bad).at[7, 0].set(bad).at[3, 1, 100].set(bad)
        token, rows = self.sample(poisoned, *args[1:])
        hit = np.zeros((B, J), bool)
        hit[[2, 5, 7, 3], [0, 1, 0, 1]] = True
        assert not np.isfinite(np.asarray(rows.lse)[hit]).any()
        assert ((token >= 0) & (token < 257)).all()
        np.testing.assert_array_equal(np.asarray(token)[~hit], np.asarray(clean_token)[~hit])
        np.testing.assert_array_equal(np.asarray(rows.lse)[~hit], np.asarray(clean.lse)[~hit])

    def test_logits_that_are_all_minus_infinity_have_no_finite_normaliser(self):
        logits, *rest = problem(257, "float32")
        _, rows = self.sample(jnp.full_like(logits, -jnp.inf), *rest)
        assert not np.isfinite(rows.lse).any()

    def test_results_do_not_depend_on_the_order_of_rows(self):
        args = problem(257, "bfloat16")
        order = jnp.array([3, 1, 7, 0, 2, 6, 5, 4])
        token, rows = self.sample(*args)
        moved_token, moved = self.sample(*(x[order] for x in args))
        np.testing.assert_array_equal(moved_token, token[order])
        np.testing.assert_array_equal(moved.lse, rows.lse[order])


def test_the_public_function_is_the_reference_on_a_cpu():
    args = problem(127, "float32")
    with jax.default_device(jax.devices("cpu")[0]):
        for got, expected in zip(
            *map(jax.tree.leaves, (jax.jit(sample)(*args), jax.jit(sample_reference)(*args))), strict=True
        ):
            np.testing.assert_array_equal(got, expected)
