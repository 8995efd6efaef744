"""The small-batch matmul of floats against sums in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normals import normal

from jspec.pallas.matmul.bf16 import bf16_matmul, bf16_matmul_kernel, bf16_matmul_reference
from jspec.pallas.matmul.partial_sums import PartialSums, reduce_partial_sums
from jspec.pallas.matmul.small_batch import small_batch_tiling
from jspec.pallas.matmul.tiling import MatmulTiling

WEIGHT_FIRST = MatmulTiling(64, 32, 64, 4, 3, True)
TOKENS_FIRST = MatmulTiling(32, 64, 128, 4, 3, False)


class TestBf16Matmul:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.implementation = implementation

    def product(self, x, weight, tiling: MatmulTiling):
        def kernel(x, weight, interpret=False):
            return bf16_matmul_kernel(x, weight, tiling=tiling, interpret=interpret)

        split_inputs = tiling.split_inputs(x.shape[-1])
        return self.implementation(lambda x, weight: bf16_matmul_reference(x, weight, split_inputs), kernel)(x, weight)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [(1, 64, 128), (3, 70, 100), (17, 200, 300), (70, 96, 1000)], ids=str)
    @pytest.mark.parametrize("num_splits", [1, 2])
    @pytest.mark.parametrize("tiling", [WEIGHT_FIRST, TOKENS_FIRST], ids=["weight first", "tokens first"])
    def test_agrees_with_float64(self, tiling, num_splits, shape, dtype):
        x, weight = problem(*shape, dtype)
        tiling = dataclasses.replace(tiling, num_splits=num_splits)
        got = self.product(x, weight, tiling)
        assert isinstance(got, PartialSums) == (num_splits > 1)
        sums, split_inputs = got.summands if num_splits > 1 else got[:, None], tiling.split_inputs(shape[2]) or shape[2]
        assert sums.dtype == (dtype if num_splits == 1 else "float32")
        x, weight = (np.asarray(array, np.float64) for array in (x, weight))
        for i in range(sums.shape[1]):
            cut = slice(i * split_inputs, (i + 1) * split_inputs)
            exact, size = x[:, cut] @ weight[:, cut].T, np.abs(x[:, cut]) @ np.abs(weight[:, cut]).T
            bound = 1e-5 * size + 1e-12 + (2**-8 * np.abs(exact) if sums.dtype == jnp.bfloat16 else 0)
            assert (np.abs(np.asarray(sums[:, i], np.float64) - exact) <= bound).all()


def problem(M: int, outputs: int, inputs: int, dtype="bfloat16"):
    """Tokens ``[M, inputs]`` and a weight ``[outputs, inputs]``."""
    rng = np.random.default_rng(M)
    return tuple(normal(rng, (n, inputs), dtype) for n in (M, outputs))


@pytest.mark.parametrize("tokens", [2, 5, 16, 33, 64])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 14336), (4096, 4096), (6144, 4096), (2048, 8192), (3072, 2048)])
def test_tilings_fit_the_chip(tokens, outputs, inputs):
    tiling = small_batch_tiling(tokens, outputs, inputs, allow_partial_sums=True, itemsize=2)
    assert -(-inputs // tiling.inputs) % tiling.num_splits == 0  # every split has as many trips
    assert 2 * (tiling.outputs + tiling.tokens) * tiling.inputs * tiling.num_stages <= 227 * 1024  # shared memory
    assert tiling.outputs * tiling.tokens <= 128 * 32 * tiling.num_warps  # registers of the sums


def test_partial_sums_are_added_before_they_are_rounded():
    x, weight = problem(6, 64, 2048)
    x = x.reshape(2, 3, 2048)
    sums = bf16_matmul(x, weight, True)
    assert isinstance(sums, PartialSums)
    assert sums.summands.shape == (2, 3, 4, 64)
    assert sums.summands.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_allclose(np.asarray(sums.total(jnp.bfloat16), np.float64), exact, rtol=2**-8, atol=1e-3)
    assert sums.total(jnp.bfloat16).dtype == jnp.bfloat16


@pytest.mark.parametrize("allow_partial_sums", [False, True])
def test_its_derivative_is_that_of_the_product(allow_partial_sums):
    args = problem(3, 16, 1024, "float32")

    def total(product, x, weight):
        return jnp.sum(jnp.sin(product(x, weight)))

    got, wanted = (
        jax.grad(lambda x, weight, product=product: total(product, x, weight), argnums=(0, 1))(*args)
        for product in (
            lambda *args: reduce_partial_sums(bf16_matmul(*args, allow_partial_sums), jnp.float32),
            bf16_matmul_reference,
        )
    )
    for gradient, expected in zip(got, wanted, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-3)
