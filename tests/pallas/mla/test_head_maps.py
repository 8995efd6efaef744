"""Products with the map of each head of latent attention against float64, for reference implementations and kernels.

Of a map in blocks, the oracle multiplies each block of 128 numbers of a latent by its scale by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import Rope
from jspec.models.layers import rotation_at
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.mla.absorb_queries import absorb_queries_kernel, absorb_queries_reference
from jspec.pallas.mla.project_values import project_values_kernel, project_values_reference

BLOCKS = ["blocks", "blocks bfloat16"]
QUANTIZED = ["int8", "float8_e4m3fn", *BLOCKS]
# B, T, N, n, Ck, Hr: one token, tokens of several blocks, and sizes that fill no block; the second has three groups of
# numbers that share scales, of which the last is not full.
SHAPES = [(1, 1, 5, 24, 32, 16), (3, 5, 2, 64, 328, 8), (2, 40, 3, 192, 256, 64)]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def head_map(stored: str, N: int, n: int, Ck: int):
    """A map ``[N, n, Ck]``: its weight, scale, what they stand for in float64, and the dtype of what it multiplies."""
    of_weight, of_scale = jax.random.split(jax.random.key(Ck))
    weight, dtype = jax.random.normal(of_weight, (N, n, Ck)) * n**-0.5, "bfloat16" if "bf" in stored else "float32"
    if stored in ("float32", "bfloat16"):
        weight, scale = weight.astype(dtype), None
        return weight, scale, np.asarray(weight, np.float64), dtype
    groups = -(-Ck // 128) if "blocks" in stored else 1
    weight = (100 * weight).astype("int8" if stored == "int8" else "float8_e4m3fn")
    scale = jax.random.uniform(of_scale, (N, n, groups), minval=0.5) / 100
    wanted = np.asarray(weight.astype(jnp.float32), np.float64)
    for group in range(groups):
        numbers = slice(128 * group, 128 * group + 128) if groups > 1 else slice(None)
        wanted[..., numbers] *= np.asarray(scale, np.float64)[:, :, group, None]
    return weight, scale if "blocks" in stored else scale[..., 0], wanted, dtype


def assert_close(actual, wanted, dtype: str):
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, atol=0.04 if dtype == "bfloat16" else 1e-5)


def blocks(grid, N: int):
    """The scales of blocks of 128 x 128, each head with ``grid`` of them, as params have them: ``[N, n, groups]``."""
    return jnp.broadcast_to(jnp.repeat(grid, 128, axis=0), (N, 128 * grid.shape[0], grid.shape[1]))


def other_readings(N: int):
    """Scales of N heads with 2 x 2 blocks each, and what they would be if they were read wrongly."""
    grid, factors = jnp.array([[1.0, 4.0], [2.0, 8.0]]) / 100, jnp.arange(1.0, N + 1)[:, None, None]
    right = blocks(grid, N) * factors
    return right, {
        "of another head": blocks(grid, N) * factors[::-1],
        "transposed": blocks(grid.T, N) * factors,
        "inverted": 1 / right,
        "of another group": right[..., ::-1],
    }


class TestAbsorbQueries:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.absorb = implementation(absorb_queries_reference, absorb_queries_kernel)

    @pytest.mark.parametrize("stored", ["float32", "bfloat16", *QUANTIZED])
    @by_shape
    def test_equals_float64(self, shape, stored):
        B, T, N, Hn, Ck, Hr = shape
        weight, scale, wide, dtype = head_map(stored, N, Hn, Ck)
        q = jax.random.normal(jax.random.key(T), (B, T, N, Hn + Hr)).astype(dtype)
        positions = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
        rotation = rotation_at(positions, Rope(theta=100.0), Hr)
        q64 = np.asarray(q, np.float64)
        cos, sin = (np.asarray(angle, np.float64)[:, :, None] for angle in rotation)
        a, b = np.split(q64[..., Hn:], 2, axis=-1)
        product = np.einsum("btnh,nhc->btnc", q64[..., :Hn], wide)
        wanted = np.concatenate([product, a * cos - b * sin, b * cos + a * sin], axis=-1)
        assert_close(self.absorb(q, weight, scale, rotation), wanted, dtype)

    def test_other_readings_of_the_scales_give_other_queries(self):
        weight, _, _, _ = head_map("blocks", 2, 256, 256)
        q, angle = jax.random.normal(jax.random.key(0), (1, 1, 2, 256 + 16)), jnp.zeros((1, 1, 8))
        right, wrong = other_readings(2)
        found = np.asarray(self.absorb(q, weight, right, Rotation(angle, angle)))
        for name, scale in wrong.items():
            other = np.asarray(self.absorb(q, weight, scale, Rotation(angle, angle)))
            assert np.abs(found - other).max() > 0.1, name


class TestProjectValues:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.project = implementation(project_values_reference, project_values_kernel)

    @pytest.mark.parametrize("stored", BLOCKS)
    @by_shape
    def test_equals_float64(self, shape, stored):
        B, T, N, Hv, Ck, _ = shape
        weight, scale, wide, dtype = head_map(stored, N, Hv, Ck)
        attended = jax.random.normal(jax.random.key(T), (B, T, N, Ck)).astype(dtype) * (Hv / Ck) ** 0.5
        wanted = np.einsum("btnc,nhc->btnh", np.asarray(attended, np.float64), wide)
        assert_close(self.project(attended, weight, scale), wanted, dtype)

    def test_other_readings_of_the_scales_give_other_values(self):
        weight, _, _, _ = head_map("blocks", 2, 256, 256)
        attended = jax.random.normal(jax.random.key(0), (1, 1, 2, 256))
        right, wrong = other_readings(2)
        found = np.asarray(self.project(attended, weight, right))
        for name, scale in wrong.items():
            assert np.abs(found - np.asarray(self.project(attended, weight, scale))).max() > 0.1, name


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_values_of_a_weight_without_groups(stored):
    """Which has no kernel."""
    weight, scale, wide, dtype = head_map(stored, 2, 24, 32)
    attended = jax.random.normal(jax.random.key(0), (3, 2, 2, 32)).astype(dtype)
    wanted = np.einsum("btnc,nhc->btnh", np.asarray(attended, np.float64), wide)
    assert_close(jax.jit(project_values_reference)(attended, weight, scale), wanted, dtype)
