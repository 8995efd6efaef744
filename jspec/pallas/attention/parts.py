"""The parts of a row's slots, whose sums are merged in their order, and how program instances share them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Parts:
    """Which slots of a row are a part. It follows from their place alone, so that the sums of attention do not depend on
    which passes read them, nor on how many program instances share them.

    Parts grow with their place as floating-point numbers do: the first ``2 * steps`` have ``shortest`` slots, and from then
    on each power of two is followed by ``steps`` parts of one length. Parts of short texts are short, which a single row
    needs to keep a GPU busy; those of long texts are not many, because each has a sum that is stored or merged.

    Attributes:
      shortest: slots of the first parts, a power of two.
      steps: how many parts there are from a power of two to the next, a power of two.
    """

    shortest: int = 128
    steps: int = 8

    def number(self, slot: Any) -> Any:
        """The number of the part in which a slot lies, from 0 on."""
        shortest, steps = _log2(self.shortest), _log2(self.steps)
        doublings = _at_least_0(_floor_log2(slot) - (shortest + steps))
        return (slot >> (shortest + doublings)) + (doublings << steps)

    def start(self, number: Any) -> Any:
        """The first slot of a part."""
        shortest, steps = _log2(self.shortest), _log2(self.steps)
        doublings = _at_least_0((number >> steps) - 1)
        return (number - (doublings << steps)) << (shortest + doublings)

    def count(self, slots: int, span: int | None = None) -> int:
        """How many parts so many slots of a row make; at most, among ``span`` slots one after another. Those are most
        if they begin with the last slot of the first part."""
        if span is not None:
            slots = min(slots, self.shortest + span - 1)
        return self.number(slots - 1) + 1


PARTS = Parts()


def _log2(x: int) -> int:
    """The binary logarithm of a power of two."""
    return x.bit_length() - 1


def _floor_log2(x):
    """That of any number of at least 1; at most 0 of others."""
    return x.bit_length() - 1 if isinstance(x, int) else 31 - jax.lax.clz(x)


def _at_least_0(x):
    return max(x, 0) if isinstance(x, int) else jnp.maximum(x, 0)


@dataclass(frozen=True)
class Sharing:
    """How program instances share the slots of a row, and which softmaxes they store.

    The first parts of a row, its *head*, are merged by one instance, in the order in which the others are merged with the
    result afterwards. How many those are changes no bit.

    Attributes:
      parts: which slots are a part; None if instances have even shares.
      tile_slots: how many slots a tile has.
      splits: how many instances there are.
      stored: how many softmaxes of a row are stored, if there are several instances.
      min_splits: of instances with even shares, how many every row uses. A row with more than ``split_tiles`` tiles for
        each uses more.
      split_tiles: how many tiles such an instance has at most, unless all instances are used.
      head: how many parts the first instance merges.
      ring: whether parts of a window are stored, each in the place of its number modulo ``stored``.
    """

    parts: Parts | None
    tile_slots: int
    splits: int
    stored: int
    min_splits: int = 1
    split_tiles: int = 0
    head: int = 1
    ring: bool = False

    def __post_init__(self):
        if self.parts is not None:
            shortest = self.parts.shortest
            assert shortest % self.tile_slots == 0, f"parts of {shortest} slots are no whole tiles of {self.tile_slots}"

    @property
    def merges(self) -> bool:
        """Whether an instance may have several parts."""
        return self.parts is not None and (self.splits > 1 or self.head > 1)

    def tiles_of(self, split, first, end):
        """In a kernel: an instance's first tile among tiles ``first`` to ``end`` of a row, and the end of its tiles."""
        if self.splits == 1:
            return first, end
        if self.parts is None:
            used = jnp.clip(pl.cdiv(end - first, self.split_tiles), self.min_splits, self.splits)
            return tuple(first + (end - first) * jnp.minimum(split + i, used) // used for i in range(2))
        if self.ring:
            part = self.parts.number(first * self.tile_slots)
            part += _rem(split - _rem(part, self.stored) + self.stored, self.stored)
            return jnp.maximum(first, self._first_tile(part)), jnp.minimum(end, self._first_tile(part + 1))
        behind_head, others = self._first_tile(jnp.int32(self.head)), self.splits - 1
        rest = jnp.maximum(end - behind_head, 0)

        def begin(i):  # of the i-th of the others, where a part begins
            tile = behind_head + jax.lax.div(rest * i, jnp.int32(others))
            part = self.part_of(tile)
            before, behind = self._first_tile(part), self._first_tile(part + 1)
            return jnp.where(2 * tile > before + behind, behind, before)

        stop = jnp.where(split == 0, behind_head, jnp.where(split == others, end, begin(split)))
        return jnp.where(split == 0, 0, begin(split - 1)), jnp.minimum(stop, end)

    def _first_tile(self, part):
        assert self.parts is not None, "instances with even shares have no parts"
        return self.parts.start(part) // self.tile_slots

    def part_of(self, tile):
        """In a kernel: the number of a tile's part."""
        assert self.parts is not None, "instances with even shares have no parts"
        return self.parts.number(tile * self.tile_slots)

    def place(self, part):
        """In a kernel: where the softmax of a part is stored, or of the head up to that part."""
        return _rem(part, self.stored) if self.ring else jnp.maximum(part - self.head + 1, 0)

    def places(self, last, window: int | None, end=None):
        """In a kernel: the first place, and the end of those, that hold what a query sees whose last slot is ``last``;
        modulo ``stored``. Its window ends with the slot ``end``, or else with the last."""
        if self.parts is None:
            return 0, self.stored
        newest = self.parts.number(jnp.maximum(last, 0))
        if self.ring and window is not None:
            oldest = (last if end is None else end) - (window - 1)
            return self.parts.number(jnp.maximum(oldest, 0)), jnp.where(last < 0, 0, newest + 1)
        return 0, jnp.where(last < 0, jnp.int32(0), self.place(newest) + 1)


def _rem(x, y: int):
    """The remainder of int32 numbers that are at least 0; ``%`` takes more instructions."""
    return jax.lax.rem(x, jnp.int32(y))
