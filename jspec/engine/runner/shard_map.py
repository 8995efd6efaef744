"""Programs over several devices: each is one program over all of them (``jax.shard_map``).

Every device holds the same rows, texts and noise, and computes the same drafts, verification results and logs. Each device
has its own shard of the weights and of the KV cache's heads (``jspec.config.sharding``).
"""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.config import Shards
from jspec.engine.round_log import CallLogs
from jspec.engine.runner.saved import Saved, is_layer, states
from jspec.engine.runner.state import OF_ROWS, DecodeState
from jspec.models.cache_pools import CacheShape, LayerKV, StateShape, has_states
from jspec.models.flatten import flatten
from jspec.models.protocols import Target
from jspec.pallas.collectives.access import reason_against_packets
from jspec.pallas.collectives.peers import Peers, room_for
from jspec.pallas.collectives.workspace import Workspace, bytes_of
from jspec.pallas.delta_net.state import DeltaState

log = logging.getLogger("jspec.engine")

_REPLICATED = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class ProgramSharding:
    """How the arguments of programs are sharded over a mesh.

    Attributes:
      mesh: the devices.
      shards: of the target, and of the draft model; None for a model that is replicated.
      leaves: the spec of each array of the target, and of the draft model; lists as the programs get them.
      cache: the spec of every pool of the target, or a tuple of those of each layer if some have recurrent states.
      draft: the same of the drafter's state.
    """

    mesh: Mesh
    shards: tuple[Shards | None, Shards | None]
    leaves: tuple[list[PartitionSpec], list[PartitionSpec]]
    cache: Any
    draft: Any

    @staticmethod
    def of(target: Target, draft_model: Any) -> "ProgramSharding | None":
        """The sharding of a target, and of the draft model beside it; None if the target is not sharded."""
        shards = getattr(target, "shards", None)
        if shards is None:
            return None
        leaves: list[Any] = flatten(target).leaves
        specs, draft_specs = (
            [leaf.sharding.spec for leaf in arrays] for arrays in (leaves, list[Any](flatten(draft_model).leaves))
        )
        return ProgramSharding(
            leaves[0].sharding.mesh,
            (shards, getattr(draft_model, "shards", None)),
            (specs, draft_specs),
            _cache_spec(target),
            _REPLICATED if getattr(draft_model, "shards", None) is None else _cache_spec(draft_model),
        )

    @property
    def state(self) -> Any:
        """The spec of every array of a ``DecodeState``."""
        replicated = dict.fromkeys((*OF_ROWS, "stats_of_confidence", "exchange", "row"), _REPLICATED)
        return DecodeState(**replicated, cache=self.cache, draft=self.draft)  # pyright: ignore[reportArgumentType]

    @property
    def saved(self) -> Any:
        """The spec of every array of a ``Saved``."""
        kept = self.cache, self.draft
        pages = jax.tree.map(_of_pages, kept, is_leaf=is_layer)
        return Saved(_REPLICATED, pages)  # pyright: ignore[reportArgumentType]

    @property
    def saved_states(self) -> Any:
        """The spec of every array of saved recurrent states."""
        kept = self.cache, self.draft
        # One spec stands for a tree: where nothing is sharded by layers, for states that are all replicated, or for none.
        return tuple(_REPLICATED if isinstance(x, PartitionSpec) else jax.tree.map(_of_row, states(x)) for x in kept)

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """The function as a program over all devices, each of which sees its own shards.

        Args:
          function: of arrays and trees of them.
          in_specs: the specs of its arguments, a prefix of the tree of arguments.
          out_specs: the same of its results.
        """
        # Replicated results are computed from replicated arrays and sums over all devices, which is not checked.
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    @property
    def axis(self) -> str:
        """The mesh axis."""
        [axis] = self.mesh.axis_names
        return axis

    def model_program(self, function: Callable) -> Callable:
        """``(leaves, state, *inputs) -> (state, other)`` over all devices, of ``function(leaves, state, *inputs,
        peers=)``. Logs of a call have the epochs behind it."""

        def on_device(leaves, state, *inputs):
            if state.exchange is None:
                return function(leaves, state, *inputs)
            peers = Peers.begin(state.exchange, self.axis)
            state, other = function(leaves, state, *inputs, peers=peers)
            exchange = peers.exchange()
            if isinstance(other, CallLogs):
                other = other._replace(epochs=exchange.epochs)
            return dataclasses.replace(state, exchange=exchange), other

        def sharded(leaves, state, *inputs):
            in_specs = self.leaves, self.state, *[_REPLICATED] * len(inputs)
            return self.shard_map(on_device, in_specs, (self.state, _REPLICATED))(leaves, state, *inputs)

        return sharded

    def workspace(self, target: Target, draft_model: Any, dtype) -> Workspace | None:
        """Memory for exchanges by packets, of a target and a draft model in ``dtype``; None where these are left to XLA."""
        if (reason := reason_against_packets(self.mesh)) is not None:
            say = log.warning if self.mesh.devices.flat[0].platform == "gpu" else log.info
            say("exchanges between %d devices are left to XLA: %s", self.mesh.size, reason)
            return None
        sharded = [model for model in (target, draft_model) if getattr(model, "shards", None) is not None]
        width = max(model.config.hidden_size for model in sharded)
        return Workspace.create(self.mesh, room_for(width, dtype, self.mesh.size))

    def forward(self, function: Callable) -> Callable:
        """``(leaves of the target, tokens) -> logits`` over all devices."""
        return self.shard_map(function, (list(self.leaves[0]), _REPLICATED), _REPLICATED)

    def replicated(self, function: Callable) -> Callable:
        """A function of arrays that every device holds whole, as it does the results, over all devices."""
        return self.shard_map(function, _REPLICATED, _REPLICATED)

    def copy_program(self, name: str, function: Callable) -> Callable:
        """The program that copies rows under this name, over all devices."""
        row, pages = _REPLICATED, _REPLICATED
        takes, gives = {
            "save": ((row, pages), self.saved),
            "restore": ((row, pages, self.saved), _REPLICATED),
            "save_states": ((row,), self.saved_states),
            "restore_states": ((row, self.saved_states), _REPLICATED),
        }[name]
        return self.shard_map(function, (self.state, *takes), (self.state, gives))

    def creating(self, make: Callable[[], Any], specs: Any = None) -> Callable[[], Any]:
        """A compiled ``make`` whose result is sharded from the start like a ``DecodeState``, or by ``specs``."""
        shardings = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.state if specs is None else specs)
        return jax.jit(make, out_shardings=shardings)


def exchange_bytes(hidden_size: int, dtype: str, gpus: int) -> int:
    """The memory that exchanges by packets take on each of so many GPUs, which share a target of such a width."""
    return bytes_of(room_for(hidden_size, dtype, gpus), gpus)


def _cache_spec(target: Target) -> Any:
    """The spec of every pool of a model in shards, or a tuple of those of each layer if some have recurrent states, which
    are sharded by their heads."""
    shapes, pool = target.cache_shape(), _pool_spec(target)
    if not has_states(shapes):
        return pool
    axis = pool[0]
    by_half, of_columns = PartitionSpec(None, None, None, axis), PartitionSpec(None, None, axis)
    of_state: Any = DeltaState(PartitionSpec(None, axis), by_half, by_half, by_half, of_columns)  # pyright: ignore
    of_pools: Any = LayerKV(pool, pool, pool)  # pyright: ignore
    return tuple(None if shape is None else of_state if isinstance(shape, StateShape) else of_pools for shape in shapes)


def _of_pages(layer: Any) -> Any:
    """The spec of what a layer keeps in pages, of which all arrays have the same; None for recurrent states."""
    if isinstance(layer, DeltaState):
        return None
    return layer.k if isinstance(layer, LayerKV) else layer


def _of_row(spec: PartitionSpec) -> PartitionSpec:
    """The spec of one row of an array of recurrent states, without the axis of rows."""
    at = 1 if len(spec) == 4 else 0
    return PartitionSpec(*spec[:at], *spec[at + 1 :])


def _pool_spec(model: Any) -> PartitionSpec:
    """The spec of every pool ``[G, pages, P, H]`` of a model: KV heads are sharded, latents are replicated."""
    shards = getattr(model, "shards", None)
    if shards is None:
        return _REPLICATED
    latents = any(isinstance(shape, CacheShape) and shape.latents for shape in model.cache_shape())
    return _REPLICATED if latents else PartitionSpec(shards.axis)
