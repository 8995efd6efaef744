"""The residual sum with its norm, against the same in float64, for kernel and reference implementation; and its
derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normals import normal

from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.norm.rms_norm import SumOptions, add_norm, add_norm_kernel, add_norm_reference, norm, norm_kernel

EPS = 1e-5


KINDS = ("rms", "rms_wide", "rms_offset", "layer")


def problem(shape, dtype, kind="rms"):
    rng = np.random.default_rng(sum(shape))
    x, y = (normal(rng, shape, dtype, scale=3) for _ in range(2))
    weight, bias = (normal(rng, shape[-1:], dtype, mean=1) for _ in range(2))
    return x, y, weight, bias if kind == "layer" else None


class TestAddNorm:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def add_norm(*args, kind="rms"):
            of_kind = (functools.partial(f, eps=EPS, kind=kind) for f in (add_norm_reference, add_norm_kernel))
            return implementation(*of_kind)(*args)

        self.add_norm = add_norm

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 320), (5, 1, 4096), (1, 2, 5000)], ids=str)
    @pytest.mark.parametrize("kind", KINDS)
    def test_agrees_with_float64(self, kind, shape, dtype):
        args = problem(shape, dtype, kind)
        added, normed = self.add_norm(*args, kind=kind)
        assert added.dtype == normed.dtype == args[0].dtype
        np.testing.assert_array_equal(added, args[0] + args[1])
        stream = centred = np.asarray(added, np.float64)
        if kind == "layer":
            centred = stream - stream.mean(-1, keepdims=True)
        scale = (np.asarray(args[2], np.float64) + (kind == "rms_offset")) / np.sqrt(
            np.mean(centred**2, -1, keepdims=True) + EPS
        )
        bias = np.asarray(args[3], np.float64) if kind == "layer" else 0.0
        # The sum, the normed numbers and the result are rounded by at most 2^-9 of themselves each.
        bound = 2**-6 * (np.abs(stream * scale) + np.abs(bias)) + 1e-6 if dtype == "bfloat16" else 2e-5
        assert (np.abs(np.asarray(normed, np.float64) - centred * scale - bias) <= bound).all()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 320)], ids=str)
    @pytest.mark.parametrize("parts", [1, 5])
    def test_adds_partial_sums(self, parts, shape, dtype):
        x, y, *vectors = problem(shape, dtype)
        many = normal(np.random.default_rng(9), (*shape[:-1], parts, shape[-1]), dtype)
        added, normed = self.add_norm(x, PartialSums(many), *vectors)
        together = np.asarray(many, np.float64).sum(-2)
        error = np.abs(np.asarray(added, np.float64) - np.asarray(x, np.float64) - together)
        # The sum of the parts and that with x are rounded.
        bound = 2**-8 * (np.abs(together) + np.abs(np.asarray(added, np.float64))) if dtype == "bfloat16" else 1e-5
        assert (error <= bound).all()
        again = np.asarray(self.add_norm(added, jnp.zeros_like(y), *vectors)[1], np.float64)
        np.testing.assert_allclose(np.asarray(normed, np.float64), again, rtol=2**-6 if dtype == "bfloat16" else 1e-5)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("parts", [None, 3])
    @pytest.mark.parametrize(("kind", "scaled"), [*((kind, True) for kind in KINDS), ("rms_wide", False)])
    def test_norms_what_it_adds_and_multiplies_the_sum(self, kind, scaled, parts, dtype):
        """As if each were a step of its own, whose result is rounded."""
        x, y, weight, bias = problem((2, 3, 320), dtype, kind)
        _, _, own_weight, own_bias = problem((2, 1, 320), dtype, kind)
        scale = jnp.full(1, 0.83, dtype) if scaled else None
        summed = y if parts is None else PartialSums(jnp.stack([y, 2 * y, -y], axis=-2))
        total = y if parts is None else summed.total(y.dtype)
        added, normed = self.add_norm(x, summed, weight, bias, SumOptions(own_weight, own_bias, scale), kind=kind)
        wanted = x + norm(total, own_weight, own_bias, EPS, kind)
        wanted = wanted * scale[0] if scaled else wanted
        close = {"rtol": 2**-6, "atol": 2**-6} if dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-5}
        for got, by_steps in ((added, wanted), (normed, norm(wanted, weight, bias, EPS, kind))):
            assert got.dtype == x.dtype
            np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(by_steps, np.float64), **close)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_token_that_is_not_finite_leaves_the_others_alone(self, kind):
        x, y, *vectors = problem((2, 3, 320), "float32", kind)
        _, clean = self.add_norm(x, y, *vectors, kind=kind)
        _, normed = self.add_norm(x.at[1, 2, 5].set(jnp.nan), y, *vectors, kind=kind)
        assert jnp.isnan(normed[1, 2]).all()
        np.testing.assert_array_equal(normed[0], clean[0])


@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_has_the_derivative_of_its_reference(kind, parts):
    x, y, *vectors = problem((2, 3, 64), "float32", kind)
    args = x, y if parts is None else PartialSums(jnp.stack([y] * parts, axis=-2)), *vectors
    loss = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)[1])), argnums=(0, 1, 2)))(*args)  # noqa: E731
    got = loss(lambda *a: add_norm(*a, EPS, kind))
    wanted = loss(functools.partial(add_norm_reference, eps=EPS, kind=kind))
    for x, y in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


class TestNorm:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.norm = lambda kind: implementation(
            *(functools.partial(f, eps=EPS, kind=kind) for f in (norm, norm_kernel))
        )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_that_of_a_sum_with_zeros(self, kind, dtype):
        """Which the tests above compare with float64."""
        x, y, weight, bias = problem((2, 3, 320), dtype, kind)
        _, wanted = add_norm_kernel(x, jnp.zeros_like(y), weight, bias, eps=EPS, kind=kind, interpret=True)
        made = self.norm(kind)(x, weight, bias)
        assert made.dtype == x.dtype
        tolerance = 2**-7 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(*(np.asarray(z, np.float64) for z in (made, wanted)), rtol=tolerance, atol=1e-6)
