"""Whole steps with a target in shards on 2 and 4 devices: the joint distribution of completions, the acceptance of every
round.

The oracle has causal passes of the whole model on one device alone."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from packets import exchange_of

from jspec.config import Shards
from jspec.engine.multihost.batch_sharded_verify import BatchSharding
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.models import flat_params
from jspec.models.sharding import build_shards, mesh_of, on_every_device
from jspec.pallas.collectives import peers
from jspec.pallas.collectives.peers import Peers, room_for
from jspec.pallas.collectives.workspace import MOST_BLOCKS
from jspec.pallas.matmul import partial_sums
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.sampling.streams import RoundNoise
from lossless.checks import LAST, p_values
from lossless.head_program import ANY_TARGET, FOUR_HEADS, HEADS, HeadOracle, HeadProgram, head_of, serving, target
from lossless.losslessness import Losslessness, Run, runs_of
from lossless.statistics import LEVEL

RULES = ("rejection", "block", "match")


@dataclasses.dataclass(frozen=True)
class ShardedProgram(HeadProgram):
    """``HeadProgram`` with a target in so many shards, and a head that every device has.

    If ``batch_sharded``, each device verifies some of the rows; otherwise all devices verify all. With ``packets``, programs
    add up and gather as they do where GPUs exchange packets.
    """

    shards: int = 2
    batch_sharded: bool = False
    packets: bool = False
    noise: Callable[..., RoundNoise] = RoundNoise  # pyright: ignore[reportIncompatibleVariableOverride]

    def models(self, tables):
        del tables
        return _models(
            self.architecture, self.head, Shards(self.shards, batch_sharded_from=0 if self.batch_sharded else 1 << 60)
        )

    def over_devices(self, function, gives_state: bool):
        models = self.models(None)
        spread = ProgramSharding.of(*models)
        assert spread is not None
        places = [jax.tree.map(lambda leaf: leaf.sharding.spec, model) for model in models]
        function = by_packets(function, self.shards) if self.packets else function
        return spread.shard_map(function, (*places, spread.state), spread.state if gives_state else PartitionSpec())


@functools.cache
def _models(architecture: str, head: str, shards: Shards):
    whole, mesh = target(architecture), mesh_of(shards.count, "tp")
    split = build_shards(whole.config, flat_params(whole), "float32", shards, mesh)
    return split, on_every_device(serving(HEADS[head], head_of(head)), mesh)


def by_packets(function, shards: int):
    """The function of a target, a head and a state, with peers for the target."""

    def with_peers(target, head, state):
        exchange = exchange_of(shards, room_for(target.config.hidden_size, jnp.float32, shards), MOST_BLOCKS)
        target.peers = Peers.begin(exchange, "tp")
        result, target.peers = function(target, head, state), None
        return result

    return with_peers


def noise_of_its_own(key_data, length) -> RoundNoise:
    """Noise that is another one on every device."""
    return RoundNoise(key_data + jax.lax.axis_index("tp").astype(key_data.dtype), length)


ALL = [
    ShardedProgram(RULES[(i + j) % 3], head, architecture=architecture, shards=shards, batch_sharded=(i + j) % 2 == 0)
    for i, head in enumerate(ANY_TARGET)
    for j, (architecture, shards) in enumerate(
        (("LlamaForCausalLM", 2), (FOUR_HEADS, 4), ("Qwen3MoeForCausalLM", 2), ("Glm4MoeLiteForCausalLM", 2))
    )
]
QUICK = (ShardedProgram("block", "eagle", batch_sharded=True, packets=True),)
NIGHTLY = (
    ShardedProgram("rejection", "eagle"),
    ShardedProgram("match", "medusa", packets=True),
    ShardedProgram("rejection", "assistant", packets=True),
    ShardedProgram("rejection", "eagle3", batch_sharded=True),
)


class TestSteps(Losslessness):
    tables, oracle = None, HeadOracle
    runs = (*runs_of(QUICK, NIGHTLY, 8_000), *(Run(program, 100_000, "long") for program in ALL))
    seed = 79

    @pytest.mark.nightly
    def test_different_noise_on_each_device_is_detected(self):
        """Devices that draw other tokens than their neighbours put keys and values of other texts together."""
        assert self._least(ShardedProgram("rejection", "eagle", shards=2, noise=noise_of_its_own)) < LEVEL

    @pytest.mark.nightly
    def test_results_of_other_rows_are_detected(self, monkeypatch):
        gather_results = BatchSharding.gather_results

        def rolled(sharding, result):
            return jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), gather_results(sharding, result))

        monkeypatch.setattr(BatchSharding, "gather_results", rolled)
        jax.clear_caches()
        assert self._least(ShardedProgram("rejection", "eagle", batch_sharded=True)) < LEVEL
        jax.clear_caches()

    @pytest.mark.nightly
    def test_packets_that_have_not_come_are_detected(self, monkeypatch):
        """Every second sum reads a place of the workspace before its packets have come: only its own part is there."""
        peer_sum_reference = peers.peer_sum_reference

        def early(y, stream, exchange, **how):
            factor = jnp.where(exchange.epochs[0] % 2 == 0, jax.lax.axis_index(y.reduce_axis) == 0, 1)
            seen = PartialSums(y.summands * factor.astype(y.summands.dtype), y.bias, y.reduce_axis)
            return peer_sum_reference(seen, stream, exchange, **how)

        monkeypatch.setattr(peers, "peer_sum_reference", early)
        jax.clear_caches()
        assert self._least(ShardedProgram("rejection", "eagle", packets=True)) < LEVEL
        jax.clear_caches()

    @pytest.mark.long
    def test_missing_sums_over_shards_are_detected(self, monkeypatch):
        monkeypatch.setattr(partial_sums, "all_reduce", lambda x, reduce_axis: x)
        jax.clear_caches()
        assert self._least(ShardedProgram("rejection", "medusa", shards=2)) < LEVEL
        jax.clear_caches()

    def _least(self, program) -> float:
        run = Run(program, 4_000)
        sampled = [pair for pair in self.with_oracles(program, self.play(run)) if pair[0].ask.warp.temperature]
        return min(p_values(sampled, LAST))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_tested_with_every_number_of_shards(rule):
    assert {(one.shards, one.batch_sharded) for one in ALL if one.verify == rule} == {
        (2, False),
        (2, True),
        (4, False),
        (4, True),
    }
