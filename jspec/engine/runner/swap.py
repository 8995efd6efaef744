"""The parts of a preempted request that lie in host memory."""

import collections
import itertools
import weakref
from typing import Any

import jax


class Part:
    """What one program saved of a request.

    Attributes:
      saved: ``state.Saved``, in host memory.
      key: what other processes call their share of it.
    """

    def __init__(self, saved: Any, key: int):
        self.saved, self.key = saved, key


class Parts:
    """Makes parts, and notices when nobody needs them any more."""

    def __init__(self):
        self._keys, self._dropped = itertools.count(), collections.deque[int]()

    def part(self, saved: Any) -> Part:
        """A part with a key of its own."""
        part = Part(saved, next(self._keys))
        weakref.finalize(part, self._dropped.append, part.key)
        return part

    def dropped(self) -> list[int]:
        """The keys of parts that nobody needs any more, each of them once."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]


def moved(saved: Any, here: str, there: str) -> Any:
    """A pytree of arrays, those in one kind of memory copied to another, unless they are in neither.

    One call copies them all, because a call for each array takes longer than the program that gathered them."""

    def place(array: jax.Array) -> jax.sharding.Sharding:
        sharding = array.sharding
        return sharding.with_memory_kind(there) if sharding.memory_kind == here else sharding

    return jax.device_put(saved, jax.tree.map(place, saved))
