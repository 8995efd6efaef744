"""Tile and block sizes of the attention kernels, and how many program instances share the slots of a row."""

from dataclasses import dataclass, replace

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
      split_slots: the most slots that an instance reads of a row with few query tokens, unless that takes more than
        ``max_splits`` instances. A row with a long text thus has more instances than the others, which do not wait for
        it.
      max_splits: see ``split_slots``.
      part_slots: how many slots, whole tiles, each instance reads of any row, from slot 0 on, so that the parts of a sum
        follow from no other row and no later token. With None, which is what models have, an instance reads an even share
        of the slots.
    """

    tile_bytes: int = 16384
    most_slots: int = 64
    queries: int = 64
    instances: int = 132
    num_warps: int = 4
    num_stages: int = 3
    split_slots: int = 2048
    max_splits: int = 8
    part_slots: int | None = None

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
