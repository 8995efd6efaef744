"""Rows that are dealt to devices: which rounds do so, and that each device gets the logits of its own rows."""

import jax
import jax.numpy as jnp
import pytest
from engines import TARGET, in_shards, target
from jax.sharding import PartitionSpec

from jspec.config.sharding import AXIS
from jspec.engine.multihost.batch_sharded_verify import Dealing
from jspec.engine.multihost.shard_map import Spread
from jspec.models.flatten import flatten
from jspec.sampling.verify import Verdict

SAME, ROWS = PartitionSpec(), PartitionSpec(AXIS)
B, T = 4, 3


def hidden():
    return jax.random.normal(jax.random.key(0), (B, T, TARGET.hidden_size))


def over(shards: int, function, returned):
    """The function of a target on each of so many devices, and what it returns, in the places of ``returned``."""
    model = in_shards(target(), shards, deal_from=0)
    spread, arrays = Spread.of(model, None), flatten(model)
    assert spread is not None
    program = spread.over(lambda leaves: function(arrays.merge(leaves)), (spread.leaves[0],), returned)
    return jax.jit(program)(arrays.leaves)


@pytest.mark.parametrize("count", [2, 4])
class TestOver:
    def test_a_device_has_the_logits_of_its_rows(self, count):
        def logits(model):
            return model.logits(hidden()), Dealing(model.shards, B // count).logits(model, hidden())

        every, dealt = over(count, logits, (SAME, ROWS))
        assert every.shape == dealt.shape == (B, T, TARGET.vocab_size)
        assert jnp.all(every == dealt)

    def test_rows_come_back_in_their_order(self, count):
        tree = {"a": jnp.arange(B), "b": (jnp.arange(B * 6).reshape(B, 2, 3), None)}

        def there_and_back(model):
            dealing = Dealing(model.shards, B // count)
            return jax.tree.map(dealing.everyone, dealing.mine(tree))

        found = over(count, there_and_back, SAME)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        assert all(map(jnp.array_equal, jax.tree.leaves(found), jax.tree.leaves(tree)))

    def test_verdicts_come_back_in_their_order(self, count):
        verdict = Verdict(jnp.arange(B), 7 * jnp.arange(B), jnp.arange(B) % 3 == 1)

        def there_and_back(model):
            dealing = Dealing(model.shards, B // count)
            return dealing.verdicts(dealing.mine(verdict))

        found = over(count, there_and_back, SAME)
        for one, wanted in zip(found, verdict, strict=True):
            assert one.dtype == wanted.dtype
            assert jnp.array_equal(one, wanted)


@pytest.mark.parametrize(
    ("rows", "less", "dealt"), [(4, 0, 2), (3, 0, None), (1, 0, None), (4, 1, None)], ids=["even", "odd", "one", "few"]
)
def test_rows_are_dealt_where_they_divide_and_have_enough_logits(rows, less, dealt):
    enough = rows * T * TARGET.vocab_size * 4
    model = in_shards(target(), 2, deal_from=enough + less)
    found = Dealing.of(model, jnp.zeros((rows, T, TARGET.hidden_size)))
    assert (found and found.rows) == dealt


def test_one_device_judges_all_rows():
    assert Dealing.of(target(), hidden()) is None
