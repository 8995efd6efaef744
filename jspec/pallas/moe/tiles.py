"""One program's part of a mixture of experts: its tile of assignments.

A *tile* is up to ``rows`` assignments that belong to one expert. They lie side by side in the order by expert
(``jspec.pallas.moe.router``)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import each
from jspec.pallas.triton import block_ids


class Stacked(NamedTuple):
    """The same linear map of each of X experts.

    Attributes:
      weight: ``[X, out, in]``, as it is stored; in MXFP4 (``jspec.quantization.mxfp4``) uint8 ``[pairs, X, out, 32]``.
      scale: float32 ``[X, out]``, by which a quantised weight is multiplied; in MXFP4 uint32 ``[pairs, X, out]``. None for a
        weight that is not quantised.
      bias: ``[X, out]``, or None.
    """

    weight: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None

    @property
    def is_mxfp4(self) -> bool:
        """Whether the weight is stored in MXFP4."""
        return self.weight.dtype == jnp.uint8

    @property
    def num_outputs(self) -> int:
        """How many output features there are."""
        return self.weight.shape[2 if self.is_mxfp4 else 1]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the products are cut up.

    Attributes:
      rows: assignments of a tile.
      columns: output features of a program.
      depth: input features that are read together.
      num_warps: warps of a program.
      num_stages: how many reads are under way at once.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def inside(self, column, width: int):
        """Which of the output features ``column [columns]`` there are, of ``width``; None if every program has only such."""
        return None if width % self.columns == 0 else column < width


class Tile(NamedTuple):
    """Assignments of one expert.

    Attributes:
      expert: whose they are.
      at: int32 ``[rows]``, their places in the order by expert.
      real: bool ``[rows]``, which of these there are.
      assignment: int32 ``[rows]``.
    """

    expert: jax.Array
    at: jax.Array
    real: jax.Array
    assignment: jax.Array


def this_tile(sizes_ref, order_ref, rows: int) -> tuple[jax.Array, Tile]:
    """In a kernel: whether this program has a tile, and the tile."""
    t, X = pl.program_id(0), sizes_ref.shape[0]
    ids = block_ids(0, pl.next_power_of_2(X))
    sizes = pltriton.load(sizes_ref.at[ids], mask=ids < X, other=0)
    tiles = (sizes + rows - 1) // rows
    expert = jnp.sum((jnp.cumsum(tiles) <= t).astype(jnp.int32))
    earlier = ids < expert
    first = jnp.sum(jnp.where(earlier, sizes, 0)) + rows * (t - jnp.sum(jnp.where(earlier, tiles, 0)))
    end = jnp.sum(jnp.where(ids <= expert, sizes, 0))
    at, there = first + jnp.arange(rows, dtype=jnp.int32), t < jnp.sum(tiles)
    real = (at < end) & there
    # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
    nowhere = order_ref.shape[0]
    assignment = pltriton.load(order_ref.at[at], mask=real, other=nowhere)
    return there, Tile(jnp.minimum(expert, X - 1), jnp.where(real, at, nowhere), real, assignment)


def store(ref, row, column, real, x):
    """In a kernel: write ``[rows, columns]`` where there is such a row and such a column."""
    inside = jnp.broadcast_to((column < ref.shape[1])[None, :], x.shape)
    pltriton.store(ref.at[grid(row, column)], x.astype(ref.dtype), mask=each(real, x.shape[1]) & inside)


def grid(row, column):
    """Indices of the elements at rows ``row [n]`` and columns ``column [m]``: two arrays ``[n, m]``."""
    shape = row.shape[0], column.shape[0]
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)
