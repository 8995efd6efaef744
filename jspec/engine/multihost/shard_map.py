"""How the programs of an engine run on several devices: each is one program over all of them (``jax.shard_map``).

Every device holds the same rows, texts and noise, and computes the same drafts, verdicts and logs. Of the weights, and of
the KV cache's heads, each has its own shard (``jspec.config.sharding``)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.config import Shards
from jspec.engine.runner.state import OF_ROWS, DecodeState, Saved
from jspec.models.flatten import flatten
from jspec.models.protocols import Target

_SAME = PartitionSpec()  # of an array that is the same on every device


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where the arguments of programs lie on the devices of a mesh.

    Attributes:
      mesh: the devices.
      shards: of the target, and of the draft model; None for what every device has all of.
      leaves: of each array of the target, and of the draft model, which of its axes is split; lists as the programs get
        them.
      cache, draft: the same of every pool of the target, and of the drafter.
    """

    mesh: Mesh
    shards: tuple[Shards | None, Shards | None]
    leaves: tuple[list[PartitionSpec], list[PartitionSpec]]
    cache: PartitionSpec
    draft: PartitionSpec

    @staticmethod
    def of(target: Target, draft_model: Any) -> "Spread | None":
        """That of a target, and of the draft model beside it; None if the target is not in shards."""
        shards = getattr(target, "shards", None)
        if shards is None:
            return None
        leaves: list[Any] = flatten(target).leaves
        specs, drafts = (
            [leaf.sharding.spec for leaf in arrays] for arrays in (leaves, list[Any](flatten(draft_model).leaves))
        )
        both = shards, getattr(draft_model, "shards", None)
        return Spread(leaves[0].sharding.mesh, both, (specs, drafts), _of_pools(target), _of_pools(draft_model))

    @property
    def state(self) -> Any:
        """Of every array of a ``DecodeState``."""
        same = dict.fromkeys((*OF_ROWS, "seen_of_confidence"), _SAME)
        return DecodeState(**same, cache=self.cache, draft=self.draft)  # pyright: ignore[reportArgumentType]

    @property
    def saved(self) -> Any:
        """Of every array of a ``Saved``."""
        return Saved(_SAME, (self.cache, self.draft))  # pyright: ignore[reportArgumentType]

    def over(self, function: Callable, given: Any, returned: Any) -> Callable:
        """The function as a program over all devices, on each of which it sees that device's parts.

        Args:
          function: of arrays and trees of them.
          given: where the arrays of its arguments lie, a prefix of the tree of arguments.
          returned: the same of what it returns.
        """
        # What is to be the same on every device is computed from what is, by sums over all of them, and not checked.
        return jax.shard_map(function, mesh=self.mesh, in_specs=given, out_specs=returned, check_vma=False)

    def of_models(self, function: Callable) -> Callable:
        """``(leaves, state, *told) -> (state, other)`` over all devices."""

        def spread(leaves, state, *told):
            given = self.leaves, self.state, *[_SAME] * len(told)
            return self.over(function, given, (self.state, _SAME))(leaves, state, *told)

        return spread

    def forward(self, function: Callable) -> Callable:
        """``(leaves of the target, tokens) -> logits`` over all devices."""
        return self.over(function, (list(self.leaves[0]), _SAME), _SAME)

    def of_rows(self, admit: Callable) -> Callable:
        """``(rows, entries) -> (rows, None)`` over all devices."""
        return self.over(admit, _SAME, _SAME)

    def saving(self, save: Callable) -> Callable:
        """``(state, row, pages) -> (state, saved)`` over all devices."""
        return self.over(save, (self.state, _SAME, _SAME), (self.state, self.saved))

    def restoring(self, restore: Callable) -> Callable:
        """``(state, row, pages, saved) -> (state, None)`` over all devices."""
        return self.over(restore, (self.state, _SAME, _SAME, self.saved), (self.state, _SAME))

    def made(self, make: Callable[[], Any], where: Any = None) -> Any:
        """What ``make()`` returns, each array in its place from the start: that of a ``DecodeState``, or ``where``."""
        places = jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.state if where is None else where)
        return jax.jit(make, out_shardings=places)()


def _of_pools(model: Any) -> PartitionSpec:
    """Of every pool ``[G, pages, P, H]`` of a model: shards have some of the KV heads each, but all of the latents."""
    shards = getattr(model, "shards", None)
    return _SAME if shards is None or model.cache_shape().latents else PartitionSpec(shards.axis)
