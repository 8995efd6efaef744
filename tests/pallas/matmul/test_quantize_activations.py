"""Vectors of tokens in int8: each number within half a step of what it stands for, kernel and reference implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.layers import ACTIVATE, ACTIVATED_IN_KERNELS
from jspec.pallas.matmul.quantize_activations import (
    activate_and_quantize_kernel,
    activate_and_quantize_reference,
    quantize_tokens,
    quantize_tokens_kernel,
    quantize_tokens_reference,
)
from jspec.pallas.norm.rms_norm import add_norm_kernel, add_norm_reference

SHAPES = [(1, 1, 64), (2, 3, 320), (5, 1, 4096), (1, 2, 5000)]


def vectors(shape, dtype="bfloat16", seed=0):
    return (3 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def check(rounded, exact, dtype, slack=0.0):
    """``exact``, float64: each number is at most half a step away, and a little more where it was computed inexactly."""
    assert rounded.numbers.dtype == jnp.int8
    assert rounded.scale.dtype == jnp.float32
    assert rounded.dtype == dtype
    assert rounded.shape == exact.shape
    scale = np.asarray(rounded.scale, np.float64)[..., None]
    peak = np.abs(exact).max(-1, keepdims=True)
    np.testing.assert_allclose(scale, peak / 127, rtol=1e-6 + slack)
    error = np.abs(np.asarray(rounded.numbers, np.float64) * scale - exact)
    assert (error <= (0.5 + 1e-4) * scale + slack * peak).all()


class TestRoundTokens:
    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        self.quantize_tokens = implementation(quantize_tokens_reference, quantize_tokens_kernel)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_is_within_half_a_step(self, shape, dtype):
        x = vectors(shape, dtype)
        check(self.quantize_tokens(x), np.asarray(x, np.float64), dtype)

    def test_the_largest_magnitude_becomes_127(self):
        rounded = self.quantize_tokens(vectors((7, 100)))
        np.testing.assert_array_equal(jnp.max(jnp.abs(rounded.numbers.astype(jnp.int32)), axis=-1), 127)

    def test_zeros_and_subnormal_numbers(self):
        rounded = self.quantize_tokens(jnp.zeros((2, 64)).at[1, 3].set(2.0**-126))
        np.testing.assert_array_equal(rounded.numbers, 0)
        np.testing.assert_array_equal(rounded.scale, 1)

    @pytest.mark.parametrize("number", [jnp.nan, jnp.inf])
    def test_a_token_that_is_not_finite_leaves_the_others_alone(self, number):
        x = vectors((3, 320))
        rounded, clean = self.quantize_tokens(x.at[1, 7].set(number)), self.quantize_tokens(x)
        assert not jnp.isfinite(rounded.scale[1])
        for i in (0, 2):
            np.testing.assert_array_equal(rounded.numbers[i], clean.numbers[i])
            assert rounded.scale[i] == clean.scale[i]


class TestActivateAndRound:
    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        def activate_and_quantize(x, name="silu"):
            both = (functools.partial(f, activate=ACTIVATE[name]) for f in (reference, kernel))
            return implementation(*both)(x)

        reference, kernel = activate_and_quantize_reference, activate_and_quantize_kernel
        self.activate_and_quantize = activate_and_quantize

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_is_within_half_a_step(self, shape, dtype):
        x = vectors((*shape[:-1], 2 * shape[-1]), dtype)
        gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
        check(self.activate_and_quantize(x), gate / (1 + np.exp(-gate)) * up, dtype, slack=1e-5)

    @pytest.mark.parametrize("name", ACTIVATED_IN_KERNELS)
    def test_activations(self, name):
        x = vectors((3, 200), "float32")
        gate, up = jnp.split(x, 2, axis=-1)
        check(
            self.activate_and_quantize(x, name),
            np.asarray(ACTIVATE[name](gate) * up, np.float64),
            "float32",
            slack=1e-5,
        )


class TestRoundedNorm:
    """``add_norm`` with ``quantize``."""

    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        self.implementation = implementation

    @pytest.mark.parametrize("parts", [None, 3])
    @pytest.mark.parametrize("kind", ["rms", "rms_wide", "rms_offset", "layer"])
    def test_is_the_norm_within_half_a_step(self, kind, parts):
        x, y, weight, bias = (vectors((2, 3, 320), seed=i) for i in range(4))
        if parts is not None:
            y = jnp.stack([y] * parts, axis=-2)
        weight, bias = weight[0, 0], bias[0, 0] if kind == "layer" else None

        def with_norm(quantize: bool):
            how = {"eps": 1e-5, "kind": kind, "quantize": quantize}
            both = (functools.partial(f, **how) for f in (add_norm_reference, add_norm_kernel))
            return self.implementation(*both)(x, y, weight, bias)

        (plain, normed), (added, rounded) = with_norm(False), with_norm(True)
        np.testing.assert_array_equal(added, plain)
        check(
            rounded, np.asarray(normed, np.float64), "bfloat16", slack=2**-8
        )  # one number may be rounded the other way


def test_other_axes_of_rounded_tokens():
    rounded = quantize_tokens(vectors((2, 3, 64)))
    flat = rounded.reshape(6, 64)
    assert flat.shape == (6, 64)
    assert flat.scale.shape == (6,)
    np.testing.assert_array_equal(flat.reshape(2, 3, 64).numbers, rounded.numbers)


def test_vectors_too_long_for_a_kernel_are_rounded_all_the_same():
    x = vectors((2, 40_000))
    check(quantize_tokens(x), np.asarray(x, np.float64), "bfloat16")
