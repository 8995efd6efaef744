"""Data-parallel training of a draft head beside a sharded target: each device trains on some of the windows of a step.

The target's forward pass is tensor-parallel over all devices for every window, as in serving. The draft head is replicated,
and each device computes the loss of its own windows. It gets the target's logits of only these, so that no device has the
logits of all windows.

For example, with two devices and eight windows the target reads eight windows on both, each with its half of the attention
heads. Then the first device trains the draft head on windows 0 to 3, the second on windows 4 to 7, and the gradients are
added up."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jspec.config import ModelConfig
from jspec.engine.multihost.batch_sharded_verify import BatchSharding
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.models.decoder import Decoder
from jspec.models.flatten import flatten
from jspec.models.kv_cache import CausalView
from jspec.models.sharding import on_every_device
from jspec.quantization.weight import Weight
from jspec.train.loop import Loss
from jspec.train.objectives import Objective, loss_of

_REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class OwnWindows:
    """A sharded target with the interface of an unsharded one, for the device's own windows inside of a ``jax.shard_map``.

    Every method gathers the windows of all devices, because each of n shards can compute only its part for all of them. B is
    the number of a device's own windows.

    Attributes:
      target: the module of one shard.
    """

    target: Decoder

    @property
    def config(self) -> ModelConfig:
        """The config of the unsharded target."""
        return self.target.config

    def embed(self, tokens) -> jax.Array:
        """The embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``."""
        sharding = self._batch_sharding(tokens)
        return sharding.local_rows(self.target.embed(sharding.all_rows(tokens)))

    def with_auxiliary(self, tokens, positions, cache, view: CausalView, aux_layers: tuple[int, ...]):
        """Hidden states ``[B, T, D]``, features ``[B, T, E]`` and the cache of all windows; see ``Decoder``."""
        sharding = self._batch_sharding(tokens)
        tokens, positions, view = jax.tree.map(sharding.all_rows, (tokens, positions, view))
        hidden, features, cache = self.target.with_auxiliary(tokens, positions, cache, view, aux_layers)
        return sharding.local_rows(hidden), sharding.local_rows(features), cache

    def logits(self, hidden) -> jax.Array:
        """``[B, T, D] -> [B, T, V]`` in the target's dtype."""
        sharding = self._batch_sharding(hidden)
        return self.target.batch_sharded_logits(sharding.all_rows(hidden))

    def before_head(self, hidden) -> jax.Array:
        """Inputs of the output head for all windows, ``[n B, T, D]``, from hidden states of the own ones, ``[B, T, D]``."""
        return self.target.before_head(self._batch_sharding(hidden).all_rows(hidden))

    def scaled_logits(self, products) -> jax.Array:
        """Logits of the own windows ``[B, T, V]``, from the products of ``before_head`` and ``output_weight``, which are
        those of all windows with a part of the vocabulary, ``[n B, T, V / n]``."""
        return self.target.to_batch_shards(self.target.scaled_logits(products))

    @property
    def output_weight(self) -> Weight:
        """The shard's part of the weight of the output head, ``[V / n, D]``."""
        return self.target.output_weight

    def _batch_sharding(self, own) -> BatchSharding:
        shards = self.target.shards
        assert shards is not None
        return BatchSharding(shards, len(own))


def sharded_loss(objective: Objective, target: Decoder, dtype: str) -> Loss:
    """The loss of ``loss_of`` over all windows for a sharded target, with the same arguments.

    The number of devices has to divide that of the windows. Inside of the ``jax.shard_map`` each device computes the loss
    of its own windows, and the mean over the devices is taken outside. Each device gets the gradient of its own windows,
    and because the weights are replicated, the ``jax.shard_map`` sums them.

    Args:
      objective: the objective, a mean over the windows.
      target: the sharded target.
      dtype: ``bfloat16`` or ``float32``, in which target and head compute.
    """
    spread, shards, merge = ProgramSharding.of(target, None), target.shards, flatten(target).merge
    assert spread is not None
    assert shards is not None
    loss = loss_of(objective, lambda leaves: OwnWindows(merge(leaves)), dtype, shards.axis)
    given = _REPLICATED, (list(spread.leaves[0]), _REPLICATED), PartitionSpec(shards.axis), _REPLICATED
    each = spread.shard_map(lambda *args: loss(*args)[None], given, PartitionSpec(shards.axis))
    return lambda *args: each(*args).mean()


def loss_beside(objective: Objective, target: Any, dtype: str) -> Loss:
    """The loss of an objective with a target, whether it is sharded or not; arguments as for ``sharded_loss``."""
    if getattr(target, "shards", None) is not None:
        return sharded_loss(objective, target, dtype)
    return loss_of(objective, flatten(target).merge, dtype)


def replicate_beside(target: Any, arrays: Any) -> Any:
    """A draft head, or a pytree of arrays, replicated on the devices of a sharded target; unchanged for an unsharded one."""
    spread = ProgramSharding.of(target, None)
    return arrays if spread is None else on_every_device(arrays, spread.mesh)
