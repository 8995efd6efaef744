"""Products of floats whose weights stream to the tensor cores, against sums in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.streamed_floats import streamed_product_kernel, streamed_product_reference
from jspec.pallas.streamed_product import Tiling

WEIGHT_FIRST = Tiling(64, 32, 64, 4, 3, True)
TOKENS_FIRST = Tiling(32, 64, 128, 4, 3, False)


class TestStreamedProduct:
    @pytest.fixture(autouse=True)
    def pick(self, implementation):
        self.implementation = implementation

    def product(self, x, weight, tiling: Tiling):
        def kernel(x, weight, interpret=False):
            return streamed_product_kernel(x, weight, tiling=tiling, interpret=interpret)

        step = None if tiling.parts == 1 else tiling.step(x.shape[-1])
        return self.implementation(lambda x, weight: streamed_product_reference(x, weight, step), kernel)(x, weight)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("shape", [(1, 64, 128), (3, 70, 100), (17, 200, 300), (70, 96, 1000)], ids=str)
    @pytest.mark.parametrize("parts", [1, 2])
    @pytest.mark.parametrize("tiling", [WEIGHT_FIRST, TOKENS_FIRST], ids=["weight first", "tokens first"])
    def test_agrees_with_float64(self, tiling, parts, shape, dtype):
        M, outputs, inputs = shape
        keys = jax.random.split(jax.random.key(sum(shape)))
        x, weight = (
            jax.random.normal(key, (n, inputs)).astype(dtype) for key, n in zip(keys, (M, outputs), strict=True)
        )
        tiling = dataclasses.replace(tiling, parts=parts)
        got = self.product(x, weight, tiling)
        in_parts, step = got if parts > 1 else got[:, None], tiling.step(inputs)
        assert in_parts.dtype == (dtype if parts == 1 else "float32")
        x, weight = (np.asarray(one, np.float64) for one in (x, weight))
        for i in range(in_parts.shape[1]):
            cut = slice(i * step, (i + 1) * step)
            exact, size = x[:, cut] @ weight[:, cut].T, np.abs(x[:, cut]) @ np.abs(weight[:, cut]).T
            bound = 1e-5 * size + 1e-12 + (2**-8 * np.abs(exact) if in_parts.dtype == jnp.bfloat16 else 0)
            assert (np.abs(np.asarray(in_parts[:, i], np.float64) - exact) <= bound).all()
