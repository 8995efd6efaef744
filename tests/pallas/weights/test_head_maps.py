"""Products with the map of each head of latent attention against float64, for reference implementations and kernels.

Of a map in groups, the oracle multiplies what each code or number is by the scale of its own group."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from normals import normal
from stored_head_maps import IN_CODES, head_map

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
# Codes of 320 numbers fill two and a half blocks of bytes. Each format in float32, and as a GPU multiplies it.
IN_BLOCKS, IN_ONE_BLOCK = (3, 5, 2, 40, 320, 8), (1, 1, 5, 24, 64, 16)
CODES = [*((IN_BLOCKS, kind) for kind in IN_CODES), *((IN_ONE_BLOCK, f"{kind} bfloat16") for kind in IN_CODES)]
by_codes = pytest.mark.parametrize("case", CODES, ids=str)


def assert_close(actual, wanted, dtype: str):
    atol = 0.1 if dtype == "bfloat16" else 1e-5  # XLA of jax 0.11 rounds sums of bfloat16 on a CPU on their way
    np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, atol=atol)


def blocks(grid, N: int):
    """The scales of blocks of 128 x 128, each head with ``grid`` of them, as params have them: ``[N, n, groups]``."""
    return jnp.broadcast_to(jnp.repeat(grid, 128, axis=0), (N, 128 * grid.shape[0], grid.shape[1]))


def other_readings(N: int):
    """A map of N heads with 2 x 2 blocks each, and what it would be if its scales were read wrongly."""
    grid, factors = jnp.array([[1.0, 4.0], [2.0, 8.0]]) / 100, jnp.arange(1.0, N + 1)[:, None, None]
    right = blocks(grid, N) * factors
    wrong = {
        "of another head": blocks(grid, N) * factors[::-1],
        "transposed": blocks(grid.T, N) * factors,
        "inverted": 1 / right,
        "of another group": right[..., ::-1],
    }
    of, _, _ = head_map("blocks", N, 256, 256)
    return dataclasses.replace(of, scale=right), {
        name: dataclasses.replace(of, scale=scale) for name, scale in wrong.items()
    }


def other_codes():
    """A map in codes with zeros and an order, and what it would be if these were read wrongly."""
    of, _, _ = head_map("int4_32_float16_zeros_ordered", 2, 32, 128)
    scale, zero = jnp.split(of.scale, 2, axis=-1)
    weight = of.numbers
    return of, {
        "halves of bytes exchanged": dataclasses.replace(of, numbers=weight << 4 | weight >> 4),
        "zeros one less": dataclasses.replace(of, scale=jnp.concatenate([scale, zero - 1], axis=-1)),
        "groups the other way round": dataclasses.replace(of, scale=of.scale[..., ::-1, :]),
        "without the order": dataclasses.replace(of, order=None),
        "with the order inverted": dataclasses.replace(of, order=jnp.argsort(of.order).astype(jnp.int32)),
    }


class HeadMaps:
    """The tests of a kernel that multiplies by a map of each head; a subclass says which, and what the product is."""

    def random_problem(self, shape, stored):
        """Arguments of the kernel, and its result in float64."""
        raise NotImplementedError

    def product(self, of) -> jax.Array:
        """One token's product with a map of two heads."""
        raise NotImplementedError

    def assert_equals_float64(self, shape, stored):
        args, wanted, dtype = self.random_problem(shape, stored)
        assert_close(self.kernel(*args), wanted, dtype)

    @by_codes
    def test_equals_float64_in_codes(self, case):
        self.assert_equals_float64(*case)

    @pytest.mark.parametrize("readings", [lambda: other_readings(2), other_codes], ids=["scales", "codes"])
    def test_other_readings_give_other_numbers(self, readings):
        right, wrong = readings()
        found = np.asarray(self.product(right))
        for name, of in wrong.items():
            assert np.abs(found - np.asarray(self.product(of))).max() > 0.1, name


class TestAbsorbQueries(HeadMaps):
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.kernel = implementation(absorb_queries_reference, absorb_queries_kernel)

    def random_problem(self, shape, stored):
        B, T, N, Hn, Ck, Hr = shape
        keys, wide, dtype = head_map(stored, N, Hn, Ck)
        q = normal(np.random.default_rng(T), (B, T, N, Hn + Hr), dtype)
        positions = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
        rotation = rotation_at(positions, Rope(theta=100.0), Hr)
        q64 = np.asarray(q, np.float64)
        cos, sin = (np.asarray(angle, np.float64)[:, :, None] for angle in rotation)
        a, b = np.split(q64[..., Hn:], 2, axis=-1)
        product = np.einsum("btnh,nhc->btnc", q64[..., :Hn], wide)
        wanted = np.concatenate([product, a * cos - b * sin, b * cos + a * sin], axis=-1)
        return (q, keys, rotation), wanted, dtype

    def product(self, of):
        N, n = of.shape[:2]
        q, angle = normal(np.random.default_rng(0), (1, 1, N, n + 16)), jnp.zeros((1, 1, 8))
        return self.kernel(q, of, Rotation(angle, angle))

    @pytest.mark.parametrize("stored", ["float32", "bfloat16", *QUANTIZED])
    @by_shape
    def test_equals_float64(self, shape, stored):
        self.assert_equals_float64(shape, stored)


class TestProjectValues(HeadMaps):
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.kernel = implementation(project_values_reference, project_values_kernel)

    def random_problem(self, shape, stored):
        B, T, N, Hv, Ck, _ = shape
        values, wide, dtype = head_map(stored, N, Hv, Ck)
        attended = normal(np.random.default_rng(T), (B, T, N, Ck), dtype, scale=(Hv / Ck) ** 0.5)
        return (attended, values), np.einsum("btnc,nhc->btnh", np.asarray(attended, np.float64), wide), dtype

    def product(self, of):
        return self.kernel(normal(np.random.default_rng(0), (1, 1, 2, of.inputs)), of)

    @pytest.mark.parametrize("stored", BLOCKS)
    @by_shape
    def test_equals_float64(self, shape, stored):
        self.assert_equals_float64(shape, stored)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_values_of_a_weight_without_groups(stored):
    """Which has no kernel."""
    args, wanted, dtype = TestProjectValues().random_problem((3, 2, 2, 24, 32, 0), stored)
    assert_close(jax.jit(project_values_reference)(*args), wanted, dtype)
