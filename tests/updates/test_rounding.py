"""Weights are rounded on a device to the bits that ``jspec.models.quantization`` rounds them to on the host."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.models.quantization import quantize
from jspec.updates import rounding


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", rounding.ROUNDED)
@pytest.mark.parametrize("shape", [(64, 128), (257, 320)], ids=str)  # in one piece, and with a rest
def test_a_device_rounds_as_the_host(shape, name, dtype, monkeypatch):
    monkeypatch.setattr(rounding, "_AT_ONCE", 2**14)
    weight = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    weight[3], weight[5, 7] = 0, 300
    found = jax.jit(rounding.rounded, static_argnums=1)(jnp.asarray(weight), name)
    for expected, got in zip(quantize(weight, name), found, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(got).view(np.uint8), expected.view(np.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", rounding.ROUNDED)
def test_a_gpu_rounds_as_the_host(name, dtype):
    """But for groups of int4 of which two scales have errors that are equal to the last bits."""
    weight = (np.random.default_rng(0).standard_normal((4096, 14336)) * 0.02).astype(dtype)
    found = jax.jit(rounding.rounded, static_argnums=1)(jnp.asarray(weight), name)
    differ = [
        int((np.asarray(got) != expected).sum()) for expected, got in zip(quantize(weight, name), found, strict=True)
    ]
    print(f"{name}, {dtype}: {differ} differ")
    assert differ[1] <= (weight.size // 128 * 1e-5 if name == "int4" else 0)
    assert differ[0] <= differ[1] * 128
