"""The tokens that are closest to being sampled, for the reference implementation and the kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda
from normals import normal

from jspec.pallas.sampling.candidates import closest_kernel, closest_reference
from jspec.pallas.sampling.sample import sample_reference

B, J, C = 8, 3, 4
reference, sampled = jax.jit(functools.partial(closest_reference, count=C)), jax.jit(sample_reference)


def problem(V, dtype="float32"):
    """Greedy requests and others, with and without filters."""
    rng, kind = np.random.default_rng(V), np.arange(B)
    temperature = np.where(kind % 2 == 0, 0.0, rng.uniform(0.5, 1.5, B))
    top_p, min_p = np.where((kind == 5) | (kind == 7), 0.9, 1.0), np.where(kind == 7, 0.01, 0.0)
    of_rows = jnp.asarray(np.where(kind == 3, 6, 0).astype(np.int32)), *map(jnp.float32, (top_p, min_p))
    keys = jnp.asarray(rng.integers(2**32, size=(B, J, 2), dtype=np.uint32))
    return normal(rng, (B, J, V), dtype, scale=3), jnp.float32(temperature), *of_rows, keys


class TestClosest:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.closest = implementation(reference, functools.partial(closest_kernel, count=C))

    @pytest.mark.parametrize("V", [5, 997, 5000])
    def test_the_first_is_the_token_that_is_drawn(self, V):
        args = problem(V)
        tokens, likely = self.closest(*args)
        np.testing.assert_array_equal(tokens[..., 0], sampled(*args)[0])
        assert (likely[..., :-1] >= likely[..., 1:] - 1e-6).all()

    @pytest.mark.parametrize("V", [997, 5000])
    def test_greedy_requests_get_the_likeliest_tokens(self, V):
        args = problem(V)
        tokens, likely = (np.asarray(x)[::2] for x in self.closest(*args))
        log_probs = np.asarray(jax.nn.log_softmax(args[0].astype(jnp.float32)))[::2]
        np.testing.assert_array_equal(tokens, np.argsort(-log_probs, axis=-1, kind="stable")[..., :C])
        np.testing.assert_allclose(likely, np.take_along_axis(log_probs, tokens, -1), atol=2e-5)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_kernel_is_the_reference(self, dtype):
        args = problem(3000, dtype)
        wanted = [np.asarray(x) for x in reference(*args)]
        tokens, likely = (np.asarray(x) for x in self.closest(*args))
        exist = np.isfinite(wanted[1])
        np.testing.assert_array_equal(exist, np.isfinite(likely))
        np.testing.assert_array_equal(tokens[exist], wanted[0][exist])
        np.testing.assert_allclose(likely[exist], wanted[1][exist], atol=1e-4)
        assert all(
            len(set(row[real])) == real.sum()
            for row, real in zip(tokens.reshape(-1, C), exist.reshape(-1, C), strict=True)
        )

    def test_tokens_that_are_cut_are_none(self):
        logits, *_, keys = problem(997)
        ones, rows = jnp.ones(B), jnp.arange(B, dtype=jnp.int32)
        _, likely = self.closest(logits, ones, 1 + rows % 3, ones, 0 * ones, keys)
        np.testing.assert_array_equal(np.isfinite(likely).sum(-1), np.broadcast_to(1 + np.arange(B) % 3, (J, B)).T)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_logits_that_make_no_distribution_have_none(self, bad):
        logits, *rest = problem(997)
        _, likely = self.closest(logits.at[:, 1, 500].set(bad), *rest)
        assert (np.isfinite(np.asarray(likely)) == np.array([True, False, True])[None, :, None])[[0, 2, 4, 6]].all()
        assert not np.isfinite(np.asarray(likely)[:, 1]).any()


@pytest.mark.parametrize(("V", "count"), [(151_936, 4), (32_000, 16), (256, 2)])
def test_it_lowers_for_cuda(V, count):
    array = jax.ShapeDtypeStruct
    rows = [array((2,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
    args = array((2, 4, V), jnp.bfloat16), *rows, array((2, 4, 2), jnp.uint32)
    assert for_cuda(functools.partial(closest_kernel, count=count), args).count("jspec_rank_tokens") >= 1
