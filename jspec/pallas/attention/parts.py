"""The parts of a row's slots, whose sums are merged in their order, and how program instances share them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl


@dataclass(frozen=True)
class Parts:
    """Which slots of a row are a part. It follows from their place alone, so that the sums of attention do not depend on
    which passes read them, nor on how many program instances share them.

    Parts of short texts are short, which a single row needs to keep a GPU busy. Those of long texts are longer, because
    each has a sum that is stored or merged.

    Attributes:
      lengths: ``(slot, length)``: parts from this slot on have so many slots, until the next of these.
    """

    lengths: tuple[tuple[int, int], ...]

    def number(self, slot, xp: Any = jnp):
        """The number of the part in which a slot lies; ``xp`` is numpy outside a program."""
        counts = [xp.clip(slot - begin, 0, limit) // length for begin, length, limit in self._levels]
        return sum(counts[1:], start=counts[0])

    def start(self, number, xp: Any = jnp):
        """The first slot of a part."""
        before, starts = 0, []
        for _, length, limit in self._levels:
            starts.append(xp.clip(number - before, 0, limit // length) * length)
            before += limit // length
        return sum(starts[1:], start=starts[0])

    def count(self, slots: int, span: int | None = None) -> int:
        """How many parts so many slots of a row make; at most, among ``span`` slots one after another. Those are most
        if they begin with the last slot of the first part."""
        if span is not None:
            slots = min(slots, self.lengths[0][1] + span - 1)
        return int(self.number(slots - 1, np)) + 1

    @property
    def _levels(self) -> list[tuple[int, int, int]]:
        """Slot, length, and for how many slots parts have this length."""
        ends = [begin for begin, _ in self.lengths[1:]] + [_MOST_SLOTS]
        return [(begin, length, end - begin) for (begin, length), end in zip(self.lengths, ends, strict=True)]


_MOST_SLOTS = 2**30
# An eighth of the largest power of two up to their first slot, and at least two tiles and at most eight.
PARTS = Parts(((0, 128), (2048, 256), (4096, 512)))


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
        for _, length in () if self.parts is None else self.parts.lengths:
            assert length % self.tile_slots == 0, f"parts of {length} slots are no whole tiles of {self.tile_slots}"

    @property
    def merges(self) -> bool:
        """Whether an instance may have several parts."""
        return self.parts is not None and (self.splits > 1 or self.head > 1)

    def tiles_of(self, split, first, end):
        """In a kernel: the first tile of an instance, among tiles ``first`` to ``end`` of a row, and the end of its tiles."""
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

        def begin(i):  # of the i-th of the others, in whole parts
            tile = behind_head + jax.lax.div(rest * i, jnp.int32(others))
            return self._first_tile(self.parts.number(tile * self.tile_slots))

        stop = jnp.where(split == others, end, begin(split))
        return jnp.where(split == 0, 0, begin(split - 1)), jnp.where(split == 0, jnp.minimum(behind_head, end), stop)

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

    def places(self, last, window: int | None):
        """In a kernel: the first place, and the end of those, that hold what a query sees whose last slot is ``last``;
        modulo ``stored``."""
        if self.parts is None:
            return 0, self.stored
        newest = self.parts.number(jnp.maximum(last, 0))
        if self.ring and window is not None:
            return self.parts.number(jnp.maximum(last - (window - 1), 0)), jnp.where(last < 0, 0, newest + 1)
        return 0, jnp.where(last < 0, jnp.int32(0), self.place(newest) + 1)


def _rem(x, y: int):
    """The remainder of int32 numbers that are at least 0; ``%`` takes more instructions."""
    return jax.lax.rem(x, jnp.int32(y))
