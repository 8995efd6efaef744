"""One program's part of a mixture of experts: its tile of assignments, and the products of these with an expert's weights.

A *tile* is up to ``rows`` assignments that belong to one expert. They lie side by side in the order by expert
(``jspec.pallas.routing``)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.mxfp4 import GROUP, PAIR
from jspec.pallas.flash import dot, each
from jspec.pallas.mxfp4 import powers, values
from jspec.pallas.triton import block_ids


class Stacked(NamedTuple):
    """The same linear map of each of X experts.

    Attributes:
      weight: ``[X, out, in]``, as it is stored; in MXFP4 (``jspec.mxfp4``) uint8 ``[X, out, bytes]``.
      scale: float32 ``[X, out]``, by which a quantised weight is multiplied; in MXFP4 uint8 ``[X, out, groups]``. None for
        a weight that is not quantised.
      bias: ``[X, out]``, or None.
    """

    weight: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None

    @property
    def is_mxfp4(self) -> bool:
        """Whether the weight is stored in MXFP4."""
        return self.weight.dtype == jnp.uint8


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


def products(x_ref, row, tile: Tile, stacked: Stacked, outputs, inside, tiling: Tiling) -> list[Any]:
    """In a kernel: what the tile's expert makes of rows of ``x_ref``, for some of its output features.

    Args:
      row: int32 ``[rows]``.
      stacked: refs.
      outputs: int32 ``[columns]`` each, the output features of each product.
      inside: bool ``[columns]``, which of these there are.

    Returns:
      float32 ``[rows, columns]`` for each of ``outputs``.
    """
    read = _Packed if stacked.is_mxfp4 else _Plain
    operands = read(x_ref, row, tile, stacked, inside, tiling)

    def add(i, sums):
        for x, weights in operands.of(i, outputs):
            sums = tuple(total + dot(x, weight, trans_b=True) for total, weight in zip(sums, weights, strict=True))
        return sums

    nothing = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, operands.trips, add, (nothing,) * len(outputs))

    def of_outputs(ref):
        return (pltriton.load(ref.at[tile.expert, output], mask=inside, other=0.0) for output in outputs)

    if stacked.scale is not None and not stacked.is_mxfp4:
        sums = (total * scale[None, :] for total, scale in zip(sums, of_outputs(stacked.scale), strict=True))
    if stacked.bias is not None:
        sums = (
            total + bias.astype(jnp.float32)[None, :]
            for total, bias in zip(sums, of_outputs(stacked.bias), strict=True)
        )
    return list(sums)


@dataclasses.dataclass(frozen=True)
class _Operands:
    """In a kernel: what is multiplied in each trip of the loop over input features. Fields are those of ``products``."""

    x_ref: Any
    row: Any
    tile: Tile
    stacked: Stacked
    inside: Any
    tiling: Tiling

    @property
    def width(self) -> int:
        """How many input features there are."""
        return self.x_ref.shape[1]

    @property
    def depth(self) -> int:
        """How many of them a trip reads."""
        raise NotImplementedError

    @property
    def trips(self) -> int:
        return pl.cdiv(self.width, self.depth)

    def x(self, ids):
        """Features ``ids [n]`` of the rows, ``[rows, n]``; 0 past the last of them."""
        return pltriton.load(self.x_ref.at[_grid(self.row, ids)], mask=self.mask(self.tile.real, ids), other=0.0)

    def mask(self, real, ids):
        """Which of ``[n, m]`` numbers there are, if ``real [n]`` says which rows there are, and ``ids [m]`` are features."""
        mask = each(real, ids.shape[0])
        every = self.width % self.depth == 0
        return mask if every else mask & jnp.broadcast_to((ids < self.width)[None, :], mask.shape)


class _Plain(_Operands):
    """A weight of one number for each input feature."""

    @property
    def depth(self) -> int:
        return min(self.tiling.depth, max(pl.next_power_of_2(self.width), 16))

    def of(self, i, outputs):
        """Blocks ``x [rows, depth]`` and, for each of ``outputs``, ``[columns, depth]`` to multiply it with."""
        ids = block_ids(i, self.depth)
        x, ref, mask = self.x(ids), self.stacked.weight, self.mask(self.inside, ids)
        weights = [_load_weight(ref.at[self.tile.expert, *_grid(output, ids)], mask, x.dtype) for output in outputs]
        return [(x, weights)]


class _Packed(_Operands):
    """A weight in MXFP4, whose groups of input features are multiplied one after the other."""

    @property
    def depth(self) -> int:
        return max(self.tiling.depth, PAIR)

    def of(self, i, outputs):
        """Blocks ``x [rows, 32]`` and, for each of ``outputs``, ``[columns, 32]`` to multiply it with."""
        pairs = self.depth // PAIR
        for pair in (i * pairs + j for j in range(pairs)):
            both = zip(*(self._groups(pair, output) for output in outputs), strict=True)
            for half, weights in enumerate(both):
                x = self.x(block_ids(2 * pair + half, GROUP))
                yield x, [weight.astype(x.dtype) for weight in weights]

    def _groups(self, pair, output):
        """The weights of the two groups of a pair, bfloat16 ``[columns, 32]`` each."""
        expert = self.tile.expert
        weight_ref: Any = self.stacked.weight
        scale_ref: Any = self.stacked.scale
        there = self.inside & (pair * PAIR < self.width)
        at = weight_ref.at[expert, *_grid(output, block_ids(pair, GROUP))]
        byte = pltriton.load(at, mask=each(there, GROUP), other=0).astype(jnp.int32)
        for half, code in enumerate((byte & 15, byte >> 4)):
            scale = pltriton.load(scale_ref.at[expert, output, 2 * pair + half], mask=there, other=0)
            yield values(code) * powers(scale.astype(jnp.int32))[:, None]


def _load_weight(at, mask, dtype):
    """In a kernel: a block of a weight in ``dtype``, 0 where ``mask`` is false."""
    if jnp.issubdtype(at.dtype, jnp.integer) or at.dtype == dtype:
        return pltriton.load(at, mask=mask, other=0).astype(dtype)
    weight = pltriton.load(at, mask=mask).astype(dtype)  # Triton has no fp8 literal for ``other``
    return jnp.where(mask, weight, jnp.zeros((), dtype))


def store(ref, row, column, real, x):
    """In a kernel: write ``[rows, columns]`` where there is such a row and such a column."""
    inside = jnp.broadcast_to((column < ref.shape[1])[None, :], x.shape)
    pltriton.store(ref.at[_grid(row, column)], x.astype(ref.dtype), mask=each(real, x.shape[1]) & inside)


def _grid(row, column):
    """Indices of the elements at rows ``row [n]`` and columns ``column [m]``: two arrays ``[n, m]``."""
    shape = row.shape[0], column.shape[0]
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)
