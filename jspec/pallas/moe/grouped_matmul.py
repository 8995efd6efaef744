"""The products of a tile of assignments (``jspec.pallas.moe.tiles``) with the weights of its expert."""

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import dot, each
from jspec.pallas.matmul.mxfp4 import unpacked
from jspec.pallas.moe.tiles import Stacked, Tile, Tiling, grid
from jspec.pallas.triton import block_ids
from jspec.quantization.mxfp4 import GROUP, PAIR, num_pairs


def products(x_ref, row, tile: Tile, stacked: Stacked, outputs, inside, tiling: Tiling) -> list[Any]:
    """In a kernel: what the tile's expert makes of rows of ``x_ref``, for some of its output features.

    Args:
      row: int32 ``[rows]``.
      stacked: refs.
      outputs: int32 ``[columns]`` each, the output features of each product.
      inside: bool ``[columns]``, which of these there are; None for all.

    Returns:
      float32 ``[rows, columns]`` for each of ``outputs``.
    """
    read = _Packed if stacked.is_mxfp4 else _Plain
    operands = read(x_ref, row, tile, stacked, inside, tiling)

    def add(i, sums):
        for x, weights in operands.of(i, outputs):
            sums = tuple(total + operands.product(x, weight) for total, weight in zip(sums, weights, strict=True))
        return sums

    sums = jax.lax.fori_loop(0, operands.trips, add, (operands.nothing(),) * len(outputs))
    sums = [operands.by_row(total) for total in sums]

    def of_outputs(ref):
        return (_load(ref.at[tile.expert, output], inside) for output in outputs)

    if stacked.scale is not None and not stacked.is_mxfp4:
        sums = (total * scale[None, :] for total, scale in zip(sums, of_outputs(stacked.scale), strict=True))
    if stacked.bias is not None:
        sums = (
            total + bias.astype(jnp.float32)[None, :]
            for total, bias in zip(sums, of_outputs(stacked.bias), strict=True)
        )
    return list(sums)


@dataclasses.dataclass(frozen=True)
class _Operands(abc.ABC):
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
    @abc.abstractmethod
    def depth(self) -> int:
        """How many of them a trip reads."""

    @property
    def trips(self) -> int:
        return pl.cdiv(self.width, self.depth)

    @abc.abstractmethod
    def of(self, i, outputs) -> Iterable[tuple[Any, list[Any]]]:
        """Blocks ``x [rows, n]`` of trip i and, for each of ``outputs``, ``[columns, n]`` to multiply it with."""

    def nothing(self):
        """What products are added to, zeros of the shape of ``product``."""
        return jnp.zeros((self.tiling.rows, self.tiling.columns), jnp.float32)

    def product(self, x, weight):
        return dot(x, weight, trans_b=True)

    def by_row(self, total):
        """``[rows, columns]`` of a sum of products."""
        return total

    def mask(self, real, ids, n: int):
        """Which of ``[n, m]`` numbers there are, if ``real [n]`` says which rows there are, and ``ids [m]`` are features.

        None stands for all, for ``real`` and for the result."""
        shape = n, ids.shape[0]
        rows = None if real is None else each(real, ids.shape[0])
        if self.width % self.depth == 0:
            return rows
        columns = jnp.broadcast_to((ids < self.width)[None, :], shape)
        return columns if rows is None else rows & columns


class _Plain(_Operands):
    """A weight of one number for each input feature."""

    @property
    def depth(self) -> int:
        return min(self.tiling.depth, max(pl.next_power_of_2(self.width), 16))

    def of(self, i, outputs):
        ids, ref = block_ids(i, self.depth), self.stacked.weight
        x = _load(self.x_ref.at[grid(self.row, ids)], self.mask(self.tile.real, ids, self.tiling.rows))
        mask = self.mask(self.inside, ids, self.tiling.columns)
        weights = [_load_weight(ref.at[self.tile.expert, *grid(output, ids)], mask, x.dtype) for output in outputs]
        return [(x, weights)]


class _Packed(_Operands):
    """A weight in MXFP4, whose groups of input features are multiplied one after the other."""

    @property
    def pairs(self) -> int:
        """Of how many pairs of groups a trip reads. They divide those of a row, so that no trip passes its end."""
        of_a_row, most = num_pairs(self.width), max(self.tiling.depth // PAIR, 1)
        return max(pairs for pairs in range(1, most + 1) if of_a_row % pairs == 0)

    @property
    def depth(self) -> int:
        return self.pairs * PAIR

    def of(self, i, outputs):
        for pair in (i * self.pairs + j for j in range(self.pairs)):
            both = zip(*(self._groups(pair, output) for output in outputs), strict=True)
            for half, weights in enumerate(both):
                x = self._x(block_ids(2 * pair + half, GROUP))
                yield x, [weight.astype(x.dtype) for weight in weights]

    def _groups(self, pair, output):
        """The weights of the two groups of a pair, bfloat16 ``[columns, 32]`` each."""
        weight_ref: Any = self.stacked.weight
        scale_ref: Any = self.stacked.scale
        at = weight_ref.at[pair, self.tile.expert, *grid(output, block_ids(0, GROUP))]
        byte = _load(at, None if self.inside is None else each(self.inside, GROUP))
        return unpacked(byte, _load(scale_ref.at[pair, self.tile.expert, output], self.inside))

    def _x(self, ids):
        """Features ``ids [n]`` of the rows, ``[n, rows]`` if weights come first, else ``[rows, n]``."""
        mask: Any = self.mask(self.tile.real, ids, self.tiling.rows)
        row, feature = grid(self.row, ids)
        if self._weights_first:
            row, feature, mask = row.T, feature.T, mask.T
        return _load(self.x_ref.at[row, feature], mask)

    @property
    def _weights_first(self) -> bool:
        """Whether weights are the left operand.

        In a product of few rows that takes fewer instructions: registers hold weights in the order in which they were
        unpacked. A product of many rows reads its right operand from shared memory in any case."""
        return self.tiling.rows <= 32

    def nothing(self):
        nothing = super().nothing()
        return nothing.T if self._weights_first else nothing

    def product(self, x, weight):
        return dot(weight, x) if self._weights_first else super().product(x, weight)

    def by_row(self, total):
        return total.T if self._weights_first else total


def _load_weight(at, mask, dtype):
    """In a kernel: a block of a weight in ``dtype``, 0 where ``mask`` is false."""
    if jnp.issubdtype(at.dtype, jnp.integer) or at.dtype == dtype:
        return _load(at, mask).astype(dtype)
    weight = pltriton.load(at, mask=mask).astype(dtype)  # Triton has no fp8 literal for ``other``
    return weight if mask is None else jnp.where(mask, weight, jnp.zeros((), dtype))


def _load(at, mask):
    """In a kernel: a block, 0 where ``mask`` is false; with None all of it, which takes fewer instructions."""
    return pltriton.load(at) if mask is None else pltriton.load(at, mask=mask, other=0)
