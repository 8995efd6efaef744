"""Batch-sharded verification: which rounds use it, and that each device gets the logits of its own rows."""

import jax
import jax.numpy as jnp
import pytest
from engines import TARGET, in_shards, target
from jax.sharding import PartitionSpec

from jspec.config.sharding import AXIS
from jspec.engine.multihost.batch_sharded_verify import BatchSharding
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.models.flatten import flatten
from jspec.sampling.verify import VerifyResult

SAME, ROWS = PartitionSpec(), PartitionSpec(AXIS)
B, T = 4, 3


def hidden():
    return jax.random.normal(jax.random.key(0), (B, T, TARGET.hidden_size))


def on_shards(shards: int, function, out_specs):
    """The results of a function of a target, on so many devices."""
    model = in_shards(target(), shards, batch_sharded_from=0)
    sharding, arrays = ProgramSharding.of(model, None), flatten(model)
    assert sharding is not None
    program = sharding.shard_map(lambda leaves: function(arrays.merge(leaves)), (sharding.leaves[0],), out_specs)
    return jax.jit(program)(arrays.leaves)


@pytest.mark.parametrize("count", [2, 4])
class TestOnShards:
    def test_each_device_computes_the_logits_of_its_rows(self, count):
        def logits(model):
            return model.logits(hidden()), model.batch_sharded_logits(hidden())

        gathered, local = on_shards(count, logits, (SAME, ROWS))
        assert gathered.shape == local.shape == (B, T, TARGET.vocab_size)
        assert jnp.all(gathered == local)

    def test_gathered_rows_are_in_order(self, count):
        tree = {"a": jnp.arange(B), "b": (jnp.arange(B * 6).reshape(B, 2, 3), None)}

        def there_and_back(model):
            sharding = BatchSharding(model.shards, B // count)
            return jax.tree.map(sharding.all_rows, sharding.local_rows(tree))

        returned = on_shards(count, there_and_back, SAME)
        assert jax.tree.structure(returned) == jax.tree.structure(tree)
        assert all(map(jnp.array_equal, jax.tree.leaves(returned), jax.tree.leaves(tree)))

    def test_gathered_results_are_in_row_order(self, count):
        result = VerifyResult(jnp.arange(B), 7 * jnp.arange(B), jnp.arange(B) % 3 == 1)

        def there_and_back(model):
            sharding = BatchSharding(model.shards, B // count)
            return sharding.gather_results(sharding.local_rows(result))

        gathered = on_shards(count, there_and_back, SAME)
        for array, expected in zip(gathered, result, strict=True):
            assert array.dtype == expected.dtype
            assert jnp.array_equal(array, expected)


@pytest.mark.parametrize(
    ("rows", "less", "rows_per_device"),
    [(4, 0, 2), (3, 0, None), (1, 0, None), (4, 1, None)],
    ids=["even", "odd", "one", "few"],
)
def test_rows_are_sharded_if_they_divide_evenly_and_have_enough_logits(rows, less, rows_per_device):
    enough = rows * T * TARGET.vocab_size * 4
    model = in_shards(target(), 2, batch_sharded_from=enough + less)
    sharding = BatchSharding.of(model, jnp.zeros((rows, T, TARGET.hidden_size)))
    assert (sharding and sharding.rows) == rows_per_device


def test_one_device_verifies_all_rows():
    assert BatchSharding.of(target(), hidden()) is None
