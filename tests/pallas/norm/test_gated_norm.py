"""The gated norm of a delta net's heads, against the same in float64, for kernel and reference implementation."""

import functools

import numpy as np
import pytest
from normals import normal

from jspec.pallas.norm.gated_norm import gated_norm_kernel, gated_norm_reference
from jspec.pallas.norm.rms_norm import norm

EPS = 1e-6


class TestGatedNorm:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.gated_norm = implementation(
            *(functools.partial(f, eps=EPS) for f in (gated_norm_reference, gated_norm_kernel))
        )

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize(
        ("B", "T", "Nv", "Dv", "before"), [(1, 1, 3, 16, 0), (2, 3, 6, 64, 40), (3, 11, 4, 256, 8)]
    )
    def test_the_gate_comes_after_the_norm_and_in_float32(self, B, T, Nv, Dv, before, dtype):
        rng = np.random.default_rng(Dv)
        o, weight = normal(rng, (B, T, Nv, Dv), dtype, scale=3), normal(rng, (Dv,), dtype, mean=1)
        projected = normal(rng, (B, T, before + Nv * Dv), dtype)
        gate = np.asarray(projected, np.float64)[..., before:].reshape(o.shape)
        wanted = np.asarray(norm(o, weight, None, EPS, "rms"), np.float64) * gate / (1 + np.exp(-gate))
        made = self.gated_norm(o, projected, weight)
        assert made.dtype == o.dtype
        tolerance = 2**-7 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(np.asarray(made, np.float64), wanted, rtol=tolerance, atol=1e-5)
