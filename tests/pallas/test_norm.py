"""The residual sum with its norm, against the same in float64, for kernel and reference implementation; and its
derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.norm import add_norm, add_norm_kernel, add_norm_reference

EPS = 1e-5


def problem(shape, dtype):
    keys = jax.random.split(jax.random.key(sum(shape)), 3)
    x, y = (3 * jax.random.normal(key, shape).astype(dtype) for key in keys[:2])
    return x, y, (1 + jax.random.normal(keys[2], shape[-1:])).astype(dtype)


class TestAddNorm:
    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        self.add_norm = implementation(
            functools.partial(add_norm_reference, eps=EPS), functools.partial(add_norm_kernel, eps=EPS)
        )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 320), (5, 1, 4096), (1, 2, 5000)], ids=str)
    def test_agrees_with_float64(self, shape, dtype):
        args = problem(shape, dtype)
        added, normed = self.add_norm(*args)
        assert added.dtype == normed.dtype == args[0].dtype
        np.testing.assert_array_equal(added, args[0] + args[1])
        stream, weight = np.asarray(added, np.float64), np.asarray(args[2], np.float64)
        wanted = stream / np.sqrt(np.mean(stream**2, -1, keepdims=True) + EPS) * weight
        bound = 2**-6 * np.abs(wanted) + 1e-6 if dtype == "bfloat16" else 1e-5
        assert (np.abs(np.asarray(normed, np.float64) - wanted) <= bound).all()

    def test_a_token_that_is_not_finite_leaves_the_others_alone(self):
        x, y, weight = problem((2, 3, 320), "float32")
        _, clean = self.add_norm(x, y, weight)
        _, normed = self.add_norm(x.at[1, 2, 5].set(jnp.nan), y, weight)
        assert jnp.isnan(normed[1, 2]).all()
        np.testing.assert_array_equal(normed[0], clean[0])


def test_has_the_derivative_of_its_reference():
    args = problem((2, 3, 64), "float32")
    loss = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)[1])), argnums=(0, 1, 2)))(*args)  # noqa: E731
    got = loss(lambda *a: add_norm(*a, EPS))
    wanted = loss(lambda *a: add_norm_reference(*a, EPS))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
