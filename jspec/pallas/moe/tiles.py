"""Tiles of assignments of tokens to experts, one for a program instance, and the weights of the experts.

A *tile* is up to ``assignments`` assignments that belong to one expert. They lie side by side in the order by expert
(``jspec.pallas.moe.router``)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import block_ids, broadcast_columns, tile_indices
from jspec.quantization.weight import Weight


class ExpertMap(NamedTuple):
    """A linear map of each of X experts.

    Attributes:
      weight: ``[X, out, in]``, as it is stored.
      bias: ``[X, out]``, or None.
    """

    weight: Weight
    bias: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class ExpertTiling:
    """The tile sizes of a grouped matmul.

    Attributes:
      assignments: assignments of a tile.
      outputs: output features of a program instance.
      inputs: input features that are read together.
      num_warps: warps of an instance.
      num_stages: how many reads are under way at once.
      outputs_first: whether instances that start one after another have outputs of one tile, which lie side by side in
        memory, and not the same outputs of one tile after another.
      joined: whether the features of gate and those of up are the outputs of one product, twice ``outputs`` then, and not of
        two, for which a trip would wait one after the other.
    """

    assignments: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    outputs_first: bool = False
    joined: bool = False

    @property
    def tile_axis(self) -> int:
        """The axis of the grid that counts tiles; the other one counts blocks of outputs."""
        return int(self.outputs_first)

    def output_ids(self, times: int = 1):
        """In a kernel: the output features of this program instance, int32 ``[outputs]``, so many times one after
        another."""
        ids = jnp.arange(times * self.outputs, dtype=jnp.int32)
        return pl.program_id(1 - self.tile_axis) * self.outputs + (ids if times == 1 else ids % self.outputs)

    def output_mask(self, output, width: int):
        """Which of the output features ``output [outputs]`` there are, of ``width``; None if all instances have only
        such."""
        return None if width % self.outputs == 0 else output < width


class ExpertTile(NamedTuple):
    """Assignments of one expert.

    Attributes:
      expert: the expert, counted from the first of those that are here.
      place: int32 ``[assignments]``, their places in the order by expert.
      real: bool ``[assignments]``, false past the expert's last assignment.
      assignment: int32 ``[assignments]``.
    """

    expert: jax.Array
    place: jax.Array
    real: jax.Array
    assignment: jax.Array


def num_tiles(A: int, X: int, size: int) -> int:
    """The most tiles of so many assignments that A of them to X experts can have."""
    hit = min(A, X)  # the most experts that can have a tile of their own
    return hit + (A - hit) // size


def tile_of_instance(
    expert_ref, sizes_ref, order_ref, first_ref, tiling: ExpertTiling, X: int
) -> tuple[jax.Array, ExpertTile]:
    """In a kernel: whether this program instance has a tile of one of the X experts whose weights are here, and the tile.

    An instance without such a tile has one of assignments to experts that are elsewhere, which may be empty.

    Args:
      expert_ref, sizes_ref, order_ref: of ``Routed``, with all experts.
      first_ref: int32 ``[1]``, the first of the X experts; None if all experts are here.
      tiling: that of the kernel.
      X: how many experts are here.
    """
    if expert_ref.shape[0] == 1:
        return _tile_of_one_token(expert_ref, first_ref, tiling, X)
    t, count, size = pl.program_id(tiling.tile_axis), sizes_ref.shape[0], tiling.assignments
    ids = block_ids(0, pl.next_power_of_2(count))
    sizes = pltriton.load(sizes_ref.at[ids], mask=ids < count, other=0)
    start = jnp.int32(0) if first_ref is None else first_ref[0]
    here = (ids >= start) & (ids < start + X)
    tiles = jnp.where(here, (sizes + size - 1) // size, 0)
    expert, num_tiles = jnp.sum((jnp.cumsum(tiles) <= t).astype(jnp.int32)), jnp.sum(tiles)
    earlier, has_tile = ids < expert, t < num_tiles
    begin = jnp.sum(jnp.where(earlier, sizes, 0)) + size * (t - jnp.sum(jnp.where(earlier, tiles, 0)))
    place = begin + jnp.arange(size, dtype=jnp.int32)
    real = (place < jnp.sum(jnp.where(ids <= expert, sizes, 0))) & has_tile
    if first_ref is not None:
        before, own = jnp.sum(jnp.where(ids < start, sizes, 0)), jnp.sum(jnp.where(here, sizes, 0))
        other = size * (t - num_tiles) + jnp.arange(size, dtype=jnp.int32)
        place = jnp.where(has_tile, place, jnp.where(other < before, other, other + own))
        real |= (place < order_ref.shape[0]) & jnp.logical_not(has_tile)
    # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
    nowhere = order_ref.shape[0]
    assignment = pltriton.load(order_ref.at[place], mask=real, other=nowhere)
    expert = jnp.clip(expert - start, 0, X - 1)
    return has_tile, ExpertTile(expert, jnp.where(real, place, nowhere), real, assignment)


def _tile_of_one_token(expert_ref, first_ref, tiling: ExpertTiling, X: int) -> tuple[jax.Array, ExpertTile]:
    """``tile_of_instance`` of one token: each of its choices is a tile. Their places are those of the choices, since nobody
    else's stand between them, and neither sizes nor an order have to be waited for."""
    t = pl.program_id(tiling.tile_axis)
    expert = expert_ref[0, t] - (0 if first_ref is None else first_ref[0])
    real = jnp.arange(tiling.assignments, dtype=jnp.int32) == 0
    place = jnp.where(real, t, expert_ref.shape[1])
    return (expert >= 0) & (expert < X), ExpertTile(jnp.clip(expert, 0, X - 1), place, real, place)


def store_tile(ref, line, output, real, x, column=None):
    """In a kernel: store ``[assignments, outputs]`` where ``real`` and where there is such an output feature. ``column``
    says where features are, if these are in another order."""
    mask = jnp.broadcast_to((output < ref.shape[1])[None, :], x.shape)
    pltriton.store(
        ref.at[tile_indices(line, output if column is None else column)],
        x.astype(ref.dtype),
        mask=broadcast_columns(real, x.shape[1]) & mask,
    )
