"""Accepted paths of trees moved to where the text goes on: the reference implementation and the kernel, all layers in one
launch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of

from jspec.models.cache_pools import CacheShape, KVRounding, init_pool
from jspec.pallas.attention.move_path import move_in_pools_kernel, move_in_pools_reference, move_path

P, M, B = 8, 4, 5
TOKENS, HEADS = KVRounding(), KVRounding((0.5, 1.0), (1.0, 2.0))
LAYERS = [CacheShape(2, 16), CacheShape(1, 64), CacheShape(3, 32, rounding=TOKENS), CacheShape(2, 16, rounding=HEADS)]


def pools_of(dtype) -> tuple:
    """A cache of layers of several sizes, one without a pool of its own; every number is another one, as far as there are so
    many."""
    rng = np.random.default_rng(0)

    def numbers(x):
        kind = jnp.float32 if x.dtype == jnp.float32 else x.dtype
        high = 256 if x.dtype == jnp.uint8 else 1e6
        return jnp.asarray(rng.permutation(x.size).reshape(x.shape) % high, kind)

    cache = init_pool(LAYERS, 1 + B * M, P, jnp.dtype(dtype))
    filled = [layer.with_pages(jax.tree.map(numbers, layer.in_pages)) for layer in cache if layer is not None]
    return (*filled[:2], None, *filled[2:])


def paths(seed: int, J: int):
    """Rows' tables, and random paths of trees: slots that grow, and the first slots behind the root. One row moves nothing,
    one less than others; one reaches past its table, and one its null pages."""
    rng = np.random.default_rng(seed)
    table = 1 + rng.permutation(B * M).reshape(B, M)
    root = np.array([3, 0, 9, P * M - J, P - 2])
    steps = np.cumsum(1 + rng.integers(0, 3, (B, J)), axis=1)
    source, target = root[:, None] + steps, root[:, None] + 1 + np.arange(J) + np.zeros_like(steps)
    source[1], target[2, J // 2 :], table[4, 1:] = -1, -1, 0
    return tuple(jnp.asarray(x, jnp.int32) for x in (table, source, target))


def moved_one_by_one(pool, table, source, target) -> np.ndarray:
    """The definition, in numpy, in the order of the path."""
    pool, (table, source, target) = np.array(pool), map(np.asarray, (table, source, target))
    for b, j in np.argwhere((source >= 0) & (target >= 0) & (np.maximum(source, target) < P * M)):
        here, there = ((table[b, slot // P], slot % P) for slot in (source[b, j], target[b, j]))
        if here[0] and there[0]:
            pool[:, there[0], there[1]] = pool[:, here[0], here[1]]
    return pool


class TestMovePath:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.move = implementation(move_in_pools_reference, move_in_pools_kernel)

    @pytest.mark.parametrize(("J", "dtype"), [(2, "float32"), (5, "bfloat16"), (7, "float32")])
    def test_the_path_follows_the_root_and_nothing_else_changes(self, J, dtype):
        pools = jax.tree.leaves([layer and layer.in_pages for layer in pools_of(dtype)])
        for seed in range(6):
            where = paths(seed, J)
            for got, pool in zip(self.move(pools, *where), pools, strict=True):
                wanted = moved_one_by_one(pool, *where)
                assert (wanted != np.asarray(pool)).any()
                np.testing.assert_array_equal(got, wanted)


def test_a_cache_keeps_its_structure_and_the_scales_of_heads():
    cache, where = pools_of("float32"), paths(0, 5)
    got = jax.jit(move_path)(cache, *where)
    assert jax.tree.structure(got) == jax.tree.structure(cache)
    for layer, moved in zip(cache, got, strict=True):
        if layer is not None:
            wanted = jax.tree.map(lambda pool: moved_one_by_one(pool, *where), layer.in_pages)
            jax.tree.map(np.testing.assert_array_equal, moved, layer.with_pages(wanted))


def shapes(layers: int, G: int = 8, H: int = 128, rounding=None):
    """The cache of a model of 32 rows of 1,024 slots, and what is moved."""
    array, sizes = jax.ShapeDtypeStruct, [CacheShape(G, H, rounding=rounding)] * layers
    cache = jax.eval_shape(lambda: init_pool(sizes, 1 + 32 * 16, 64, jnp.bfloat16))
    return cache, array((32, 16), jnp.int32), *[array((32, 7), jnp.int32)] * 2


@pytest.mark.parametrize("rounding", [None, TOKENS])
@pytest.mark.parametrize("layers", [1, 36])
def test_all_layers_are_one_launch(layers, rounding):
    assert kernels_of(for_cuda(move_path, shapes(layers, rounding=rounding))) == ["move_path"]


def test_lines_that_are_no_power_of_two_are_moved_by_the_reference():
    assert kernels_of(for_cuda(move_path, shapes(1, H=96))) == []
