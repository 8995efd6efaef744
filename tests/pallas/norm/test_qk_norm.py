"""Norms of the heads of queries and keys, against the same in float64, for kernel and reference implementation; and their
derivative."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normals import normal

from jspec.pallas.norm.qk_norm import qk_norm, qk_norm_kernel, qk_norm_reference
from jspec.pallas.norm.rms_norm import norm

EPS = 1e-5
KINDS = ("rms", "rms_wide", "rms_offset", "layer")


def problem(shape, dtype, kind="rms"):
    rng = np.random.default_rng(sum(shape))
    qkv = normal(rng, shape, dtype, scale=3)
    vectors = [normal(rng, shape[-1:], dtype, mean=1) for _ in range(4)]
    return qkv, tuple(vectors[:2]), tuple(vectors[2:]) if kind == "layer" else (None, None)


class TestQKNorm:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def qk_norm(*args, num_heads, kind="rms"):
            static = {"num_heads": num_heads, "eps": EPS, "kind": kind}
            of_kind = (functools.partial(f, **static) for f in (qk_norm_reference, qk_norm_kernel))
            return implementation(*of_kind)(*args)

        self.qk_norm = qk_norm

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        ("B", "T", "N", "G", "H"), [(1, 1, 4, 1, 16), (2, 3, 4, 2, 128), (1, 70, 2, 1, 64), (3, 11, 1, 1, 256)]
    )
    @pytest.mark.parametrize("kind", KINDS)
    def test_agrees_with_float64(self, kind, B, T, N, G, H, dtype):
        qkv, weights, biases = problem((B, T, N + 2 * G, H), dtype, kind)
        normed = self.qk_norm(qkv, weights, biases, num_heads=(N, G), kind=kind)
        assert normed.dtype == qkv.dtype
        np.testing.assert_array_equal(normed[:, :, N + G :], qkv[:, :, N + G :])
        for heads, weight, bias in zip((slice(0, N), slice(N, N + G)), weights, biases, strict=True):
            x = np.asarray(qkv[:, :, heads], np.float64)
            x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
            scale = np.asarray(weight, np.float64) + (kind == "rms_offset")
            added = 0.0 if bias is None else np.asarray(bias, np.float64)
            wanted = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS) * scale
            # The normed numbers and the result are rounded by at most 2^-9 of themselves each.
            bound = 2**-7 * (np.abs(wanted) + np.abs(added)) + 1e-6 if dtype == "bfloat16" else 2e-5
            assert (np.abs(np.asarray(normed[:, :, heads], np.float64) - wanted - added) <= bound).all()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_values_are_normed_by_a_third_weight(self, dtype):
        qkv, weights, biases = problem((2, 3, 8, 64), dtype, "rms_wide")
        third = jnp.arange(64).astype(dtype) / 64
        normed = self.qk_norm(qkv, (*weights, third), (*biases, None), num_heads=(4, 2), kind="rms_wide")
        two = self.qk_norm(qkv, weights, biases, num_heads=(4, 2), kind="rms_wide")
        np.testing.assert_array_equal(normed[:, :, :6], two[:, :, :6])
        wanted = np.asarray(norm(qkv[:, :, 6:], third, None, EPS, "rms_wide"), np.float32)
        np.testing.assert_allclose(np.asarray(normed[:, :, 6:], np.float32), wanted, rtol=2**-7, atol=1e-6)

    def test_a_head_that_is_not_finite_leaves_the_others_alone(self):
        qkv, *vectors = problem((2, 3, 4, 16), "float32")
        clean = self.qk_norm(qkv, *vectors, num_heads=(2, 1))
        normed = self.qk_norm(qkv.at[1, 2, 0, 5].set(jnp.nan), *vectors, num_heads=(2, 1))
        assert jnp.isnan(normed[1, 2, 0]).all()
        np.testing.assert_array_equal(normed.at[1, 2, 0].set(0), clean.at[1, 2, 0].set(0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("H", [16, 24])
def test_has_the_derivative_of_its_reference(H, kind):
    args = problem((2, 3, 4, H), "float32", kind)
    loss = lambda f: jax.jit(jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a, (2, 1), EPS, kind))), argnums=(0, 1)))(*args)  # noqa: E731
    got, wanted = jax.tree.leaves(loss(qk_norm)), jax.tree.leaves(loss(qk_norm_reference))
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
