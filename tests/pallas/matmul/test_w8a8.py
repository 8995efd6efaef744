"""Products of rounded tokens with weights of int8, against sums of the same integers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.pallas.matmul.quantize_activations import QuantizedActivations
from jspec.pallas.matmul.small_batch import small_batch_tiling
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.matmul.w8a8 import w8a8_matmul, w8a8_matmul_kernel, w8a8_matmul_reference

WEIGHT_FIRST = MatmulTiling(64, 32, 64, 4, 3, True)
TOKENS_FIRST = MatmulTiling(32, 64, 128, 4, 3, False)


def problem(M: int, outputs: int, inputs: int, dtype="bfloat16"):
    """Quantised tokens ``[M, inputs]``, a weight and its scales."""
    rng = np.random.default_rng(M + outputs + inputs)

    def integers(*shape):
        return jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)

    scales = (jnp.asarray(np.exp(rng.normal(-3, 1, size)), jnp.float32) for size in (M, outputs))
    x_scale, scale = scales
    return QuantizedActivations(integers(M, inputs), x_scale, jnp.dtype(dtype)), integers(outputs, inputs), scale


def wanted(x: QuantizedActivations, weight, scale):
    """In float64, not rounded."""
    sums = np.asarray(x.numbers, np.int64) @ np.asarray(weight, np.int64).T
    return sums * np.asarray(x.scale, np.float64)[:, None] * np.asarray(scale, np.float64)


class TestW8A8Matmul:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.implementation = implementation

    def product(self, *args, tiling: MatmulTiling | None = None):
        def kernel(*args, interpret=False):
            return w8a8_matmul_kernel(*args, tiling=tiling, interpret=interpret)

        split_inputs = None if tiling is None else tiling.split_inputs(args[0].shape[-1])
        return self.implementation(lambda *args: w8a8_matmul_reference(*args, split_inputs=split_inputs), kernel)(*args)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        "shape", [(1, 64, 128), (3, 70, 100), (17, 200, 300), (70, 96, 1536), (130, 300, 128)], ids=str
    )
    @pytest.mark.parametrize("tiling", [None, WEIGHT_FIRST, TOKENS_FIRST], ids=["own", "weight first", "tokens first"])
    def test_agrees_with_integers(self, tiling, shape, dtype):
        args = problem(*shape, dtype)
        got, exact = self.product(*args, tiling=tiling), wanted(*args)
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8 if dtype == "bfloat16" else 1e-6)

    @pytest.mark.parametrize("num_splits", [2, 4])
    @pytest.mark.parametrize("inputs", [1024, 1000])
    @pytest.mark.parametrize("tiling", [WEIGHT_FIRST, TOKENS_FIRST], ids=["weight first", "tokens first"])
    def test_partial_sums_add_up(self, tiling, inputs, num_splits):
        args = problem(5, 70, inputs, "float32")
        tiling = dataclasses.replace(tiling, num_splits=num_splits)
        got = self.product(*args, tiling=tiling).summands
        assert got.shape == (5, num_splits, 70)
        exact, split_inputs = wanted(*args), tiling.split_inputs(inputs)
        np.testing.assert_allclose(got.sum(1), exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())
        first = dataclasses.replace(args[0], numbers=args[0].numbers[:, :split_inputs])
        np.testing.assert_allclose(got[:, 0], wanted(first, args[1][:, :split_inputs], args[2]), rtol=1e-6)

    def test_the_largest_sums_are_exact(self):
        """2^28, which float32 would not add up exactly."""
        x, weight, scale = problem(2, 16, 16_384, "float32")
        args = dataclasses.replace(x, numbers=jnp.full_like(x.numbers, 127)), jnp.full_like(weight, -127), scale
        np.testing.assert_allclose(self.product(*args), wanted(*args), rtol=1e-6)

    def test_a_token_that_is_not_finite_leaves_the_others_alone(self):
        x, *weight = problem(3, 64, 200)
        clean = self.product(x, *weight)
        got = self.product(dataclasses.replace(x, scale=x.scale.at[1].set(jnp.nan)), *weight)
        assert jnp.isnan(got[1]).all()
        np.testing.assert_array_equal(got[jnp.array([0, 2])], clean[jnp.array([0, 2])])


@pytest.mark.parametrize("tokens", [1, 2, 16, 33, 64, 80, 128, 129, 320, 512])
@pytest.mark.parametrize("allow_partial_sums", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(28672, 4096), (4096, 14336), (2048, 8192), (2048, 2048), (70, 100)])
def test_tilings_fit_the_chip(tokens, allow_partial_sums, outputs, inputs):
    tiling = small_batch_tiling(tokens, outputs, inputs, allow_partial_sums)
    assert tiling.num_splits == 1 or allow_partial_sums
    assert -(-inputs // tiling.inputs) % tiling.num_splits == 0  # every part has as many trips
    assert (tiling.outputs if tiling.weight_first else tiling.tokens) >= 16
    assert (tiling.outputs + tiling.tokens) * tiling.inputs * tiling.num_stages <= 227 * 1024  # shared memory
    assert tiling.outputs * tiling.tokens <= 128 * 32 * tiling.num_warps  # registers of the sums


def test_partial_sums_add_up_to_the_product():
    x, weight, scale = problem(6, 2048, 8192, "float32")
    x = x.reshape(2, 3, 8192)
    sums, product = w8a8_matmul(x, weight, scale, allow_partial_sums=True).summands, w8a8_matmul(x, weight, scale)
    assert sums.shape == (2, 3, 4, 2048)
    assert product.shape == (2, 3, 2048)
    np.testing.assert_allclose(sums.sum(-2), product, rtol=1e-4, atol=1e-5 * float(jnp.abs(product).max()))


def test_a_small_product_is_not_split():
    assert small_batch_tiling(5, 64, 128, True).num_splits == 1
    assert w8a8_matmul(*problem(5, 64, 128), allow_partial_sums=True).shape == (5, 64)
