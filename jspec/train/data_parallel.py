"""Training with a target in shards: every device trains the draft head on some of the windows of a step.

The target's forward pass takes all devices for every window, as in serving. What the draft head makes of it is each device's
own: it has all of the head's weights, and computes the loss of its own windows. It gets the target's logits of these
alone, so that no device has the logits of all windows.

For example, with two devices and eight windows the target reads eight windows on both, each with its half of the attention
heads. Then the first device trains the draft head on windows 0 to 3, the second on windows 4 to 7, and the gradients are
added up."""

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jspec.config import ModelConfig
from jspec.engine.multihost.batch_sharded_verify import BatchSharding
from jspec.engine.multihost.shard_map import ProgramSharding
from jspec.models.decoder import Decoder
from jspec.models.flatten import split
from jspec.models.kv_cache import CausalView
from jspec.models.sharding import on_every_device
from jspec.train.loop import Loss
from jspec.train.objectives import Objective, loss_of

_SAME = PartitionSpec()  # of an array that is the same on every device


@dataclasses.dataclass(frozen=True)
class OwnWindows:
    """A target in shards that takes each device's own windows, and gives what belongs to them.

    For the inside of a ``jax.shard_map``, where losses and draft heads use it as they use a whole target. Every method
    brings the windows of all devices together, because each of n shards can do only its part for all of them. B is the
    number of a device's own windows.

    Attributes:
      target: the module of one shard.
    """

    target: Decoder

    @property
    def config(self) -> ModelConfig:
        """The architecture of the whole target."""
        return self.target.config

    def embed(self, tokens) -> jax.Array:
        """The embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``."""
        sharding = self._batch_sharding(tokens)
        return sharding.local_rows(self.target.embed(sharding.all_rows(tokens)))

    def with_auxiliary(self, tokens, positions, cache, view: CausalView, aux_layers: tuple[int, ...]):
        """Hidden states ``[B, T, D]``, features ``[B, T, E]`` and the cache, as ``Decoder.with_auxiliary`` returns them; the
        cache alone is that of all windows."""
        sharding = self._batch_sharding(tokens)
        tokens, positions, view = jax.tree.map(sharding.all_rows, (tokens, positions, view))
        hidden, features, cache = self.target.with_auxiliary(tokens, positions, cache, view, aux_layers)
        return sharding.local_rows(hidden), sharding.local_rows(features), cache

    def logits(self, hidden) -> jax.Array:
        """``[B, T, D] -> [B, T, V]`` in the target's dtype."""
        sharding = self._batch_sharding(hidden)
        return sharding.logits(self.target, sharding.all_rows(hidden))

    def before_head(self, hidden) -> jax.Array:
        """What the output head reads of all windows, ``[n B, T, D]``, from the hidden states of the own, ``[B, T, D]``."""
        return self.target.before_head(self._batch_sharding(hidden).all_rows(hidden))

    def scaled_logits(self, products) -> jax.Array:
        """Logits of the own windows ``[B, T, V]``, from the products of ``before_head`` and ``output_weight``, which are
        those of all windows with a part of the vocabulary, ``[n B, T, V / n]``."""
        return self.target.dealt(self.target.scaled_logits(products))

    @property
    def output_weight(self) -> jax.Array:
        """The shard's part of the weight of the output head, ``[V / n, D]``."""
        return self.target.output_weight

    @property
    def output_scale(self) -> jax.Array | None:
        """The scales of this part if it is quantised, float32 ``[V / n]``, or None."""
        return self.target.output_scale

    def _batch_sharding(self, own) -> BatchSharding:
        shards = self.target.shards
        assert shards is not None
        return BatchSharding(shards, len(own))


def spread_loss(objective: Objective, target: Decoder, dtype: str) -> Loss:
    """The loss of ``loss_of`` for a target in shards, with the same arguments. It is the loss of all windows.

    The number of devices has to divide that of the windows. Inside of the ``jax.shard_map`` each has the loss of its own
    windows, and the mean over the devices is taken outside of it. A gradient comes back the same way: each device gets that
    of its own windows, and as the weights are the same on every device, the ``jax.shard_map`` adds up what they get.

    Args:
      objective: what is minimised, a mean over the windows.
      target: the target in shards.
      dtype: ``bfloat16`` or ``float32``, in which target and head compute.
    """
    spread, shards, merge = ProgramSharding.of(target, None), target.shards, split(target).merge
    assert spread is not None
    assert shards is not None
    loss = loss_of(objective, lambda leaves: OwnWindows(merge(leaves)), dtype, shards.axis)
    given = _SAME, (list(spread.leaves[0]), _SAME), PartitionSpec(shards.axis), _SAME
    each = spread.shard_map(lambda *args: loss(*args)[None], given, PartitionSpec(shards.axis))
    return lambda *args: each(*args).mean()


def beside(target: Any, arrays: Any) -> Any:
    """A draft head, or a pytree of arrays, where the target computes: on each of its devices if it is in shards, and
    otherwise as it is."""
    spread = ProgramSharding.of(target, None)
    return arrays if spread is None else on_every_device(arrays, spread.mesh)
