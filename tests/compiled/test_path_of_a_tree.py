"""An accepted path moved in the pools of all layers, as XLA compiles it for an H200, without one: one launch, and no pool is
copied."""

import jax
import jax.numpy as jnp
import pytest
from deviceless import compiled_for_h200, why_not

from benchmarks.rounds.hlo import launched, moves
from jspec.models.cache_pools import CacheShape, KVRounding, init_pool
from jspec.pallas.attention.move_path import move_path

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.mark.parametrize("rounding", [None, KVRounding()], ids=["bfloat16", "bytes"])
def test_a_path_is_moved_in_one_launch_and_in_place(rounding):
    """Layers differ in their heads, as those with windows and those without do in some models."""
    array, sizes = jax.ShapeDtypeStruct, [CacheShape(8, 128, rounding=rounding), CacheShape(4, 256, rounding=rounding)]
    cache = jax.eval_shape(lambda: init_pool(sizes * 16, 1 + 32 * 16, 64, jnp.bfloat16))
    where = array((32, 16), jnp.int32), array((32, 7), jnp.int32), array((32, 7), jnp.int32)
    step = compiled_for_h200(move_path, cache, *where, donate_argnums=0)
    least = min(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert [op.line for op in moves(step.as_text(), least)] == []
    assert len(launched(step.as_text())) == 1
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert memory.temp_size_in_bytes < least
