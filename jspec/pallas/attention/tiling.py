"""Tile and block sizes of the attention kernels, and how many program instances share the slots of a row."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.triton import MMA_SIZE


@dataclass(frozen=True)
class AttentionTiling:
    """The sizes of tiles and blocks; the last bits of the results depend on them.

    Attributes:
      tile_bytes: bytes of the keys of a tile, and of its values, in registers.
      most_slots: of a tile, whose scores are held in registers.
      queries: the most queries of a program instance; if a KV head has more, several instances read its keys.
      instances: if the batch makes fewer program instances than this, the slots of a row are split among several, until
        there are nearly so many.
      num_warps: warps of an instance.
      num_stages: how many tiles an instance has under way at once.
      split_slots: the most slots of a row with few query tokens that an instance reads, unless that takes more than
        ``max_splits`` instances. A row with a long text thus has more instances than the others, which do not wait for
        it.
      max_splits: see ``split_slots``.
      part_slots: how many slots, whole tiles, a part has. Each part of a row, from slot 0 on, is a sum of its own, and
        they are merged in their order, so that the results do not depend on how many instances share them. With None,
        which attention over latents has, the slots of an instance are one part, an even share of the row's.
    """

    tile_bytes: int = 16384
    most_slots: int = 64
    queries: int = 64
    instances: int = 132
    num_warps: int = 4
    num_stages: int = 3
    split_slots: int = 2048
    max_splits: int = 8
    part_slots: int | None = 512

    def tile_slots(self, key_bytes: int) -> int:
        """How many cache slots a tile has, a power of two, if a key has ``key_bytes`` bytes."""
        fitting = max(self.tile_bytes // key_bytes, MMA_SIZE)
        return min(1 << (fitting.bit_length() - 1), self.most_slots)

    def num_splits(self, cells: int, tiles: int) -> int:
        """How many program instances share the slots of a cell: a row, a KV head and a block of queries.

        Args:
          cells: how many cells there are.
          tiles: how many tiles the slots of a row make at most.
        """
        wanted = max(1, self.instances // cells)
        return min(1 << (wanted.bit_length() - 1), pl.next_power_of_2(tiles))

    def num_splits_of_long_rows(self, min_splits: int, slots: int) -> int:
        """How many instances share a row of the most slots, if every row has at least ``min_splits``."""
        return max(min_splits, min(self.max_splits, pl.next_power_of_2(pl.cdiv(slots, self.split_slots))))

    def sharing(
        self, cells: int, tiles: int, tile_slots: int, few: bool, span: int | None, softmax_bytes: int
    ) -> "Sharing":
        """How instances share the slots of a cell.

        Args:
          cells, tiles: as of ``num_splits``.
          tile_slots: slots of a tile.
          few: whether there are so few query tokens that rows with long texts have more instances than others.
          span: how many consecutive slots the query tokens of a row see in their windows; None without windows.
          softmax_bytes: what one stored softmax of every query takes.
        """
        fewest = splits = self.num_splits(cells, tiles)
        if few and span is None:
            splits = self.num_splits_of_long_rows(fewest, tiles * tile_slots)
        if self.part_slots is None:
            return Sharing(splits, splits, fewest, pl.cdiv(tiles, splits))
        part_tiles, rest = divmod(self.part_slots, tile_slots)
        assert rest == 0, f"parts of {self.part_slots} slots are no whole tiles of {tile_slots}"
        parts = pl.cdiv(tiles, part_tiles)
        if span is not None:
            parts = min(parts, pl.cdiv(span - 1, self.part_slots) + 1)
        head = 1 if fewest > 1 else max(self.split_slots // self.part_slots, 1)
        head = max(head, parts + 1 - max(_STORED_BYTES // softmax_bytes, 1))
        if splits == 1 or head >= parts:
            return Sharing(1, 1, part_slots=self.part_slots, part_tiles=part_tiles, head=parts)
        if span is not None:
            return Sharing(parts, parts, part_slots=self.part_slots, part_tiles=part_tiles, ring=True)
        stored = parts + 1 - head
        return Sharing(min(splits, stored), stored, part_slots=self.part_slots, part_tiles=part_tiles, head=head)


@dataclass(frozen=True)
class Sharing:
    """How program instances share the slots of a row, and which softmaxes they store.

    The first parts of a row, its *head*, are merged by one instance, in the order in which the others are merged with the
    result afterwards. How many those are changes no bit.

    Attributes:
      splits: how many instances there are.
      stored: how many softmaxes of a row are stored, if there are several instances.
      min_splits: of instances with even shares, how many every row uses. A row with more than ``split_tiles`` tiles for
        each uses more.
      split_tiles: how many tiles such an instance has at most, unless all instances are used.
      part_slots, part_tiles: how many slots, and tiles, a part has; None if instances have even shares.
      head: how many parts the first instance merges.
      ring: whether parts of a window are stored, each in the place of its number modulo ``stored``.
    """

    splits: int
    stored: int
    min_splits: int = 1
    split_tiles: int = 0
    part_slots: int | None = None
    part_tiles: int | None = None
    head: int = 1
    ring: bool = False

    @property
    def merges(self) -> bool:
        """Whether an instance may have several parts."""
        return self.part_tiles is not None and (self.splits > 1 or self.head > 1)

    def parts_of(self, split, first, end):
        """In a kernel: the first part of an instance among parts ``first`` to ``end``, where they end, and how far apart
        they are."""
        if self.splits == 1:
            return first, end, jnp.int32(1)
        if self.ring:
            part = first + _rem(split - _rem(first, self.stored) + self.stored, self.stored)
            return part, jnp.minimum(part + 1, end), jnp.int32(1)
        part, limit, stride = self.head + split - 1, end, self.splits - 1
        of_head = jnp.int32(0), jnp.minimum(self.head, end), jnp.int32(1)
        return tuple(
            jnp.where(split == 0, *pair) for pair in zip(of_head, (part, limit, jnp.int32(stride)), strict=True)
        )

    def owner(self, slot):
        """In a kernel: which instance has the part of a slot."""
        assert self.part_slots is not None, "instances with even shares have no parts"
        part = slot // self.part_slots
        if self.splits == 1 or self.ring:
            return _rem(part, self.splits)
        return jnp.where(part < self.head, jnp.int32(0), 1 + _rem(part - self.head, self.splits - 1))

    def place(self, part):
        """In a kernel: where the softmax of a part is stored, or of the head up to that part."""
        return _rem(part, self.stored) if self.ring else jnp.maximum(part - self.head + 1, 0)

    def places(self, last, window: int | None):
        """In a kernel: the first place, and the end of those, that hold what a query sees whose last slot is ``last``;
        modulo ``stored``."""
        if self.part_slots is None:
            return 0, self.stored
        if self.ring and window is not None:
            return jnp.maximum(last - (window - 1), 0) // self.part_slots, (last + self.part_slots) // self.part_slots
        return 0, jnp.where(last < 0, jnp.int32(0), self.place(last // self.part_slots) + 1)


def _rem(x, y: int):
    """The remainder of int32 numbers that are at least 0; ``%`` takes more instructions."""
    return jax.lax.rem(x, jnp.int32(y))


_STORED_BYTES = 2**30  # softmaxes that are stored, at most
_USUAL_HEAD, LARGEST_HEAD = 256, 512
# fp32 is multiplied outside the tensor cores, from registers, and takes long enough for a merge to pay.
_TILINGS = {
    jnp.dtype("bfloat16"): AttentionTiling(),
    jnp.dtype("float32"): AttentionTiling(tile_bytes=8192, queries=16, instances=264),
}
# Larger heads: the weighted sums of fewer queries fill as many registers. These sizes have not been timed.
_OF_LARGE_HEADS = {
    jnp.dtype("bfloat16"): AttentionTiling(queries=32, num_warps=8, num_stages=2),
    jnp.dtype("float32"): AttentionTiling(queries=16, instances=264, num_warps=8, num_stages=2),
}
# The fastest in benchmarks/log/attention.md, for what was timed there: heads of 128, of which four share a KV head. With
# heads of 256, or with more that share, registers are spilled.
_OF_BYTES, _HEAD_OF_BYTES, _SHARED_BYTES = AttentionTiling(tile_bytes=32768, most_slots=128), 128, 4


def tiling_of(dtype, H: int) -> AttentionTiling | None:
    """The tiling for heads of H numbers; None if the kernels do not support them."""
    fits = pl.next_power_of_2(H) == H and MMA_SIZE <= H <= LARGEST_HEAD
    return (_TILINGS if H <= _USUAL_HEAD else _OF_LARGE_HEADS).get(jnp.dtype(dtype)) if fits else None


def tiling_of_bytes(dtype, H: int, R: int, T: int) -> AttentionTiling | None:
    """``tiling_of`` for T query tokens over a pool of bytes, of whose KV heads R query heads read each.

    Tiles have the same slots for any T. If T R is more than one block of the tensor cores, fewer tiles are under way, which
    leaves shared memory for two program instances on an SM."""
    if jnp.dtype(dtype) != jnp.bfloat16 or H != _HEAD_OF_BYTES or R > _SHARED_BYTES:
        return tiling_of(dtype, H)
    return _OF_BYTES if T * R <= MMA_SIZE else replace(_OF_BYTES, num_stages=2)
