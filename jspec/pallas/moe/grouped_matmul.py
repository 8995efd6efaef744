"""The matmul of a tile of assignments (``jspec.pallas.moe.tiles``) with the weights of its expert."""

import abc
import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.matmul.mxfp4 import unpack_groups
from jspec.pallas.matmul.unpack import SHRINK, to_mma_order, unpack_eight_bits, unpack_four_bits
from jspec.pallas.moe.tiles import ExpertTile, ExpertTiling, ExpertWeights
from jspec.pallas.triton import block_ids, broadcast_columns, dot, is_interpreted, tile_indices
from jspec.quantization.codes import HALF
from jspec.quantization.groups import GROUP as BLOCK
from jspec.quantization.groups import group_of
from jspec.quantization.mxfp4 import GROUP, PAIR, num_pairs

_FEW = 32  # assignments of a tile, up to which unpacked weights are the left operand


def grouped_matmul(
    x_ref,
    line,
    tile: ExpertTile,
    expert_weights: ExpertWeights,
    outputs,
    output_mask,
    tiling: ExpertTiling,
    inputs: int,
) -> list[Any]:
    """In a kernel: some output features of the tile's expert for lines of ``x_ref``.

    Args:
      x_ref: ``[lines, in]``; where weights are codes of four bits, the results of ``in_code_order`` side by side.
      line: int32 ``[assignments]``.
      expert_weights: refs.
      outputs: int32 ``[outputs]`` each, the output features of each product.
      output_mask: bool ``[outputs]``, which of these there are; None for all.
      inputs: how many input features there are.

    Returns:
      float32 ``[assignments, outputs]`` for each of ``outputs``.
    """
    make = _operands_of(expert_weights)
    in_groups = make is not _PlainOperands  # whose scales are in the products
    operands = make(x_ref, line, tile, expert_weights, output_mask, tiling, inputs)

    def add(i, sums):
        for x, weights in operands.of(i, outputs):
            sums = tuple(total + operands.product(x, weight) for total, weight in zip(sums, weights, strict=True))
        return sums

    sums = jax.lax.fori_loop(0, operands.trips, add, (operands.zeros(),) * len(outputs))
    sums = [operands.by_assignment(total) for total in sums]

    def of_outputs(ref):
        return (_load(ref.at[tile.expert, output], output_mask) for output in outputs)

    if expert_weights.scale is not None and not in_groups:
        sums = (total * scale[None, :] for total, scale in zip(sums, of_outputs(expert_weights.scale), strict=True))
    if expert_weights.bias is not None:
        sums = (
            total + bias.astype(jnp.float32)[None, :]
            for total, bias in zip(sums, of_outputs(expert_weights.bias), strict=True)
        )
    return list(sums)


def _operands_of(weights: ExpertWeights) -> "type[_Operands]":
    if weights.is_mxfp4:
        return _MXFP4Operands
    if weights.of_codes:
        return _CodeOperands
    return _BlockOperands if weights.in_blocks else _PlainOperands


@dataclasses.dataclass(frozen=True)
class _Operands(abc.ABC):
    """In a kernel: the operands of each trip of the loop over input features. Fields are those of ``grouped_matmul``."""

    x_ref: Any
    line: Any
    tile: ExpertTile
    expert_weights: ExpertWeights
    output_mask: Any
    tiling: ExpertTiling
    inputs: int

    @property
    def width(self) -> int:
        """How many input features ``x_ref`` has."""
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
        """Blocks ``x [assignments, n]`` of trip i and, for each of ``outputs``, ``[outputs, n]`` to multiply it with."""

    @property
    def weights_first(self) -> bool:
        """Whether weights are the left operand.

        Of weights that are unpacked, a product of few assignments takes fewer instructions then: registers hold them in
        the order in which they were unpacked. A product of many reads its right operand from shared memory in any case."""
        return False

    def zeros(self):
        """The initial sum, of the shape of ``product``."""
        zeros = jnp.zeros((self.tiling.assignments, self.tiling.outputs), jnp.float32)
        return zeros.T if self.weights_first else zeros

    def product(self, x, weight):
        return dot(x, weight, trans_b=True)

    def by_assignment(self, total):
        """``[assignments, outputs]`` of a sum of products."""
        return total.T if self.weights_first else total

    def mask(self, real, ids, n: int):
        """Which of ``[n, m]`` numbers there are, if ``real [n]`` says which lines there are, and ``ids [m]`` are
        features.

        None stands for all, for ``real`` and for the result."""
        shape = n, ids.shape[0]
        line_mask = None if real is None else broadcast_columns(real, ids.shape[0])
        if self.width % self.depth == 0:
            return line_mask
        feature_mask = jnp.broadcast_to((ids < self.width)[None, :], shape)
        return feature_mask if line_mask is None else line_mask & feature_mask


class _PlainOperands(_Operands):
    """Operands of a weight with one number for each input feature."""

    @property
    def depth(self) -> int:
        return min(self.tiling.inputs, max(pl.next_power_of_2(self.width), 16))

    def of(self, i, outputs) -> list[tuple[Any, list[Any]]]:
        ids, ref = block_ids(i, self.depth), self.expert_weights.weight
        x = _load(self.x_ref.at[tile_indices(self.line, ids)], self.mask(self.tile.real, ids, self.tiling.assignments))
        mask = self.mask(self.output_mask, ids, self.tiling.outputs)
        weights = [
            self.load_weight(ref.at[self.tile.expert, *tile_indices(output, ids)], mask, x.dtype) for output in outputs
        ]
        return [(x, weights)]

    def load_weight(self, at, mask, dtype):
        """A block of the weight in ``dtype``, 0 where ``mask`` is false."""
        if jnp.issubdtype(at.dtype, jnp.integer) or at.dtype == dtype:
            return _load(at, mask).astype(dtype)
        weight = pltriton.load(at, mask=mask).astype(dtype)  # Triton has no fp8 literal for ``other``
        return weight if mask is None else jnp.where(mask, weight, jnp.zeros((), dtype))


class _InBlocks(_Operands):
    """A trip reads the inputs of one block, and few assignments are the right operand of weights that were unpacked."""

    @property
    def depth(self) -> int:
        return BLOCK

    @property
    def weights_first(self) -> bool:
        return self.tiling.assignments <= _FEW and self.x_ref.dtype == jnp.bfloat16


class _BlockOperands(_InBlocks, _PlainOperands):
    """Operands of FP8 in blocks. A weight is a pair: its numbers, and the scales that its products are multiplied by,
    float32 ``[outputs]``."""

    def of(self, i, outputs) -> list[tuple[Any, list[Any]]]:
        scale_ref: Any = self.expert_weights.scale
        scales = (_load(scale_ref.at[self.tile.expert, output, i], self.output_mask) for output in outputs)
        [(x, weights)] = super().of(i, outputs)
        return [(x, list(zip(weights, scales, strict=True)))]

    def load_weight(self, at, mask, dtype):
        if dtype != jnp.bfloat16:
            return super().load_weight(at, mask, dtype)
        weight = pltriton.load(at, mask=mask)  # where there is none, any number becomes a finite one, and x is 0
        if is_interpreted() and mask is not None:
            weight = jnp.where(mask, weight, jnp.zeros((), weight.dtype))
        return unpack_eight_bits(weight)

    def product(self, x, weight):
        numbers, scale = weight
        scale = scale * SHRINK if x.dtype == jnp.bfloat16 else scale
        if self.weights_first:
            return dot(to_mma_order(numbers), to_mma_order(x), trans_b=True) * broadcast_columns(scale, x.shape[0])
        return dot(x, numbers, trans_b=True) * scale[None, :]


class _CodeOperands(_InBlocks):
    """Operands of codes of four bits. What has a scale in common is multiplied together: x of low and of high halves, with
    the low halves, the high ones and the scale, float32 ``[outputs]``."""

    def of(self, i, outputs) -> Iterable[tuple[Any, list[Any]]]:
        scale_ref: Any = self.expert_weights.scale
        groups, half = scale_ref.shape[2], self.width // 2
        group = group_of(self.inputs, groups)
        width = min(group, BLOCK) // 2 if groups > 1 else HALF
        for start in range(0, HALF, width):
            at = i * HALF + start + jnp.arange(width, dtype=jnp.int32)
            mask = self.mask(self.tile.real, at, self.tiling.assignments)
            xs = [_load(self.x_ref.at[tile_indices(self.line, half * high + at)], mask) for high in (0, 1)]
            place = i * (BLOCK // group) + start // width if groups > 1 else 0
            yield xs, [self._weights(output, at, place) for output in outputs]

    def _weights(self, output, at, place):
        """The low and the high halves of bytes ``at``, and the scale of their group."""
        weight_ref: Any = self.expert_weights.weight
        scale_ref: Any = self.expert_weights.scale
        packed = _load(
            weight_ref.at[self.tile.expert, *tile_indices(output, at)],
            None if self.output_mask is None else broadcast_columns(self.output_mask, at.shape[0]),
        )

        def of_group(*which):
            return _load(scale_ref.at[(self.tile.expert, output, place, *which)], self.output_mask)

        if len(scale_ref.shape) == 3:
            scale, zero = of_group(), None
        else:
            scale, zero = of_group(0), of_group(1).astype(jnp.bfloat16)
        low, high = (unpack_four_bits(packed, high, zero).astype(self.x_ref.dtype) for high in (False, True))
        return low, high, scale.astype(jnp.float32) * SHRINK

    def product(self, x, weight):
        *halves, scale = weight
        if self.weights_first:
            products = [
                dot(to_mma_order(part), to_mma_order(of_x), trans_b=True) for part, of_x in zip(halves, x, strict=True)
            ]
            return (products[0] + products[1]) * broadcast_columns(scale, x[0].shape[0])
        return (dot(x[0], halves[0], trans_b=True) + dot(x[1], halves[1], trans_b=True)) * scale[None, :]


class _MXFP4Operands(_Operands):
    """Operands of a weight in MXFP4, whose groups of input features are multiplied one after the other."""

    @property
    def pairs(self) -> int:
        """How many pairs of groups a trip reads. They divide those of a line, so that no trip passes its end."""
        line_pairs, max_pairs = num_pairs(self.width), max(self.tiling.inputs // PAIR, 1)
        return max(pairs for pairs in range(1, max_pairs + 1) if line_pairs % pairs == 0)

    @property
    def depth(self) -> int:
        return self.pairs * PAIR

    def of(self, i, outputs):
        for pair in (i * self.pairs + j for j in range(self.pairs)):
            halves = zip(*(self._groups(pair, output) for output in outputs), strict=True)
            for half, weights in enumerate(halves):
                x = self._x(block_ids(2 * pair + half, GROUP))
                yield x, [weight.astype(x.dtype) for weight in weights]

    def _groups(self, pair, output):
        """The weights of the two groups of a pair, bfloat16 ``[columns, 32]`` each."""
        weight_ref: Any = self.expert_weights.weight
        scale_ref: Any = self.expert_weights.scale
        at = weight_ref.at[pair, self.tile.expert, *tile_indices(output, block_ids(0, GROUP))]
        byte = _load(at, None if self.output_mask is None else broadcast_columns(self.output_mask, GROUP))
        return unpack_groups(byte, _load(scale_ref.at[pair, self.tile.expert, output], self.output_mask))

    def _x(self, ids):
        """Features ``ids [n]`` of the lines, ``[n, assignments]`` if weights come first, else ``[assignments, n]``."""
        mask: Any = self.mask(self.tile.real, ids, self.tiling.assignments)
        line, feature = tile_indices(self.line, ids)
        if self.weights_first:
            line, feature, mask = line.T, feature.T, mask.T
        return _load(self.x_ref.at[line, feature], mask)

    @property
    def weights_first(self) -> bool:
        return self.tiling.assignments <= _FEW

    def product(self, x, weight):
        return dot(weight, x) if self.weights_first else super().product(x, weight)


def _load(at, mask):
    """In a kernel: a block, 0 where ``mask`` is false. Without a mask the load takes fewer instructions."""
    return pltriton.load(at) if mask is None else pltriton.load(at, mask=mask, other=0)
