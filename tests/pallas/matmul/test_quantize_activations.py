"""Vectors of tokens in eight bits: each number within half a step of what it stands for, kernel and reference."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from normals import normal

from jspec.models.layers import ACTIVATE, ACTIVATED_IN_KERNELS
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.quantize_activations import (
    LARGEST,
    activate_and_quantize_kernel,
    activate_and_quantize_reference,
    quantize_tokens,
    quantize_tokens_kernel,
    quantize_tokens_reference,
)
from jspec.pallas.norm.rms_norm import add_norm_kernel, add_norm_reference

SHAPES = [(1, 1, 64), (2, 3, 320), (5, 1, 4096), (1, 2, 5000)]


def vectors(shape, dtype="bfloat16", seed=0):
    return normal(np.random.default_rng(seed), shape, dtype, scale=3)


def check(quantised, exact, dtype, slack=0.0, kind="int8"):
    """``exact``, float64: each number is at most half a step away, and a little more where it was computed inexactly."""
    assert quantised.numbers.dtype == {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}[kind]
    assert quantised.scale.dtype == jnp.float32
    assert quantised.dtype == dtype
    assert quantised.shape == exact.shape
    scale = np.asarray(quantised.scale, np.float64)[..., None]
    peak = np.abs(exact).max(-1, keepdims=True)
    np.testing.assert_allclose(scale, peak / LARGEST[kind], rtol=1e-6 + slack)
    error = np.abs(np.asarray(quantised.numbers, np.float64) * scale - exact)
    steps = (
        np.maximum(2.0**-9, 2.0**-3 * np.abs(exact) / scale) if kind == "fp8" else 1.0
    )  # of three digits, or subnormal
    assert (error <= (0.5 + 1e-4) * steps * scale + slack * peak).all()


class TestQuantizeTokens:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def quantize_tokens(x, kind="int8"):
            both = (functools.partial(f, kind=kind) for f in (quantize_tokens_reference, quantize_tokens_kernel))
            return implementation(*both)(x)

        self.quantize_tokens = quantize_tokens

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_is_within_half_a_step(self, shape, dtype):
        x = vectors(shape, dtype)
        check(self.quantize_tokens(x), np.asarray(x, np.float64), dtype)

    def test_fp8_is_within_half_a_step(self):
        x = vectors((2, 3, 320)) * jnp.exp2(jnp.arange(320.0) / -20).astype(jnp.bfloat16).reshape(1, 1, -1)
        check(self.quantize_tokens(x, "fp8"), np.asarray(x, np.float64), "bfloat16", kind="fp8")

    @pytest.mark.parametrize(("kind", "largest"), LARGEST.items())
    def test_the_largest_magnitude_becomes_that_of_the_kind(self, kind, largest):
        quantised = self.quantize_tokens(vectors((7, 100)), kind)
        np.testing.assert_array_equal(jnp.max(jnp.abs(quantised.numbers.astype(jnp.float32)), axis=-1), largest)

    @pytest.mark.parametrize("kind", LARGEST)
    def test_zeros_and_subnormal_numbers(self, kind):
        quantised = self.quantize_tokens(jnp.zeros((2, 64)).at[1, 3].set(2.0**-126), kind)
        np.testing.assert_array_equal(quantised.numbers.astype(jnp.float32), 0)
        np.testing.assert_array_equal(quantised.scale, 1)

    @pytest.mark.parametrize(("kind", "number"), [("int8", jnp.nan), ("int8", jnp.inf), ("fp8", jnp.nan)])
    def test_a_token_that_is_not_finite_leaves_the_others_alone(self, kind, number):
        x = vectors((3, 320))
        quantised, clean = self.quantize_tokens(x.at[1, 7].set(number), kind), self.quantize_tokens(x, kind)
        assert not jnp.isfinite(quantised.scale[1])
        for i in (0, 2):
            np.testing.assert_array_equal(*(one.numbers[i].astype(jnp.float32) for one in (quantised, clean)))
            assert quantised.scale[i] == clean.scale[i]


class TestActivateAndQuantize:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def activate_and_quantize(x, name="silu", kind="int8"):
            implementations = (functools.partial(f, activate=ACTIVATE[name], kind=kind) for f in (reference, kernel))
            return implementation(*implementations)(x)

        reference, kernel = activate_and_quantize_reference, activate_and_quantize_kernel
        self.activate_and_quantize = activate_and_quantize

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_is_within_half_a_step(self, shape, dtype):
        x = vectors((*shape[:-1], 2 * shape[-1]), dtype)
        gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
        check(self.activate_and_quantize(x), gate / (1 + np.exp(-gate)) * up, dtype, slack=1e-5)

    def test_fp8_is_within_half_a_step(self):
        x = vectors((2, 3, 640), "float32")
        gate, up = np.split(np.asarray(x, np.float64), 2, axis=-1)
        got = self.activate_and_quantize(x, kind="fp8")
        check(got, gate / (1 + np.exp(-gate)) * up, "float32", slack=1e-5, kind="fp8")

    @pytest.mark.parametrize("name", ACTIVATED_IN_KERNELS)
    def test_every_activation_agrees_with_jax(self, name):
        x = vectors((3, 200), "float32")
        gate, up = jnp.split(x, 2, axis=-1)
        check(
            self.activate_and_quantize(x, name),
            np.asarray(ACTIVATE[name](gate) * up, np.float64),
            "float32",
            slack=1e-5,
        )


class TestQuantizedNorm:
    """``add_norm`` with ``quantize``."""

    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.implementation = implementation

    @pytest.mark.parametrize("summands", [None, 3])
    @pytest.mark.parametrize(
        ("kind", "to"),
        [("rms", "int8"), ("rms", "fp8"), ("rms_wide", "int8"), ("rms_offset", "int8"), ("layer", "int8")],
    )
    def test_is_the_norm_within_half_a_step(self, kind, to, summands):
        x, y, weight, bias = (vectors((2, 3, 320), seed=i) for i in range(4))
        if summands is not None:
            y = PartialSums(jnp.stack([y] * summands, axis=-2))
        weight, bias = weight[0, 0], bias[0, 0] if kind == "layer" else None

        def with_norm(quantize: str | None):
            how = {"eps": 1e-5, "kind": kind, "quantize": quantize}
            implementations = (functools.partial(f, **how) for f in (add_norm_reference, add_norm_kernel))
            return self.implementation(*implementations)(x, y, weight, bias)

        (plain, normed), (added, quantised) = with_norm(None), with_norm(to)
        np.testing.assert_array_equal(added, plain)
        exact = np.asarray(normed, np.float64)
        check(quantised, exact, "bfloat16", slack=2**-8, kind=to)  # one number may be rounded the other way


def test_reshape_keeps_numbers_and_scales():
    quantised = quantize_tokens(vectors((2, 3, 64)))
    flat = quantised.reshape(6, 64)
    assert flat.shape == (6, 64)
    assert flat.scale.shape == (6,)
    np.testing.assert_array_equal(flat.reshape(2, 3, 64).numbers, quantised.numbers)


def test_vectors_too_long_for_a_kernel_are_quantised_by_the_reference():
    x = vectors((2, 40_000))
    check(quantize_tokens(x), np.asarray(x, np.float64), "bfloat16")
