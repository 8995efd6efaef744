"""Swap blocks: the state and pages of preempted requests in host memory."""

import collections
import itertools
import weakref
from typing import Any

import jax


class SwapBlock:
    """One row, or a part of its pages, in host memory.

    Attributes:
      saved: ``state.Saved``, in host memory.
      key: identifies the share of other processes.
    """

    def __init__(self, saved: Any, key: int):
        self.saved, self.key = saved, key


class SwapBlocks:
    """Allocates swap blocks and reports those that were garbage-collected."""

    def __init__(self):
        self._keys, self._collected = itertools.count(), collections.deque[int]()

    def allocate(self, saved: Any) -> SwapBlock:
        """A block with a key of its own."""
        block = SwapBlock(saved, next(self._keys))
        weakref.finalize(block, self._collected.append, block.key)
        return block

    def collected(self) -> list[int]:
        """The keys of blocks that were garbage-collected, each of them once."""
        return [self._collected.popleft() for _ in range(len(self._collected))]


def to_memory_kind(tree: Any, source: str, destination: str) -> Any:
    """A pytree of arrays, of which those in memory of kind ``source`` are copied to ``destination``.

    One call copies them all, because a call for each array takes longer than the program that gathered them.
    """

    def place(array: jax.Array) -> jax.sharding.Sharding:
        sharding = array.sharding
        return sharding.with_memory_kind(destination) if sharding.memory_kind == source else sharding

    return jax.device_put(tree, jax.tree.map(place, tree))
