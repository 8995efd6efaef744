"""Tile and block sizes of the attention kernels, and how many program instances share the slots of a row."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jspec.pallas.attention.parts import PARTS, Parts, Sharing
from jspec.pallas.triton import MMA_SIZE


@dataclass(frozen=True)
class AttentionTiling:
    """The sizes of tiles and blocks. With ``parts``, bits of the results depend on these and on the slots of a tile alone.

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
      parts: which slots are a part, whose sum is one of its own. With None, which attention over latents has, the slots of
        an instance are one part, an even share of the row's.
    """

    tile_bytes: int = 16384
    most_slots: int = 64
    queries: int = 64
    instances: int = 132
    num_warps: int = 4
    num_stages: int = 3
    split_slots: int = 4096
    max_splits: int = 8
    parts: Parts | None = PARTS

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
        if self.parts is None:
            return Sharing(None, tile_slots, splits, splits, min_splits=fewest, split_tiles=pl.cdiv(tiles, splits))
        parts = self.parts.count(tiles * tile_slots, span)
        splits *= 1 if fewest == 1 else 2  # parts make uneven shares
        # So many slots are merged in registers where a batch fills a GPU, an eighth of them where it fills half of one.
        head = self.parts.count(max(self.split_slots // fewest**3, 1))
        head = max(head, parts + 1 - max(_STORED_BYTES // softmax_bytes, 1))
        if splits == 1 or head >= parts:
            return Sharing(self.parts, tile_slots, 1, 1, head=parts)
        if span is not None:
            return Sharing(self.parts, tile_slots, parts, parts, ring=True)
        stored = parts + 1 - head
        return Sharing(self.parts, tile_slots, min(splits, stored), stored, head=head)


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
