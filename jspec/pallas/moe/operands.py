"""What a tile of assignments multiplies in each trip over the inputs, for experts of every format: x, and the numbers of
weights, unpacked."""

import abc
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.moe.tiles import ExpertMap, ExpertTile, ExpertTiling
from jspec.pallas.triton import block_ids, broadcast_columns, dot, is_interpreted, tile_indices
from jspec.pallas.weights.mxfp4_pairs import unpack_groups
from jspec.pallas.weights.tiles import load_group, load_or_zero, load_packed, shrink_of, unpack_half
from jspec.pallas.weights.unpack import ORDER_INPUTS, SHRINK, to_mma_order, unpack_eight_bits, unpack_mxfp8
from jspec.quantization.codes import HALF
from jspec.quantization.formats import GROUP as BLOCK
from jspec.quantization.formats import Format
from jspec.quantization.mxfp4_pairs import GROUP, PAIR, num_pairs
from jspec.quantization.weight import Weight

_ALTERNATING = 4  # groups of a block, of which more have bytes of codes that are not side by side
_FEW = 32  # assignments of a tile, up to which unpacked weights of ``mxfp4_pairs`` are the left operand


def read_in_order(weight: Weight, dtype) -> bool:
    """Whether products with x of ``dtype`` read inputs in the order of ``to_mma_order``: those of a trip are whole 64."""
    in_blocks = weight.in_groups and not weight.in_pairs and dtype == jnp.bfloat16
    return in_blocks and (weight.kind != "int8_groups" or (weight.group or BLOCK) % ORDER_INPUTS == 0)


def operands_of(form: Format | None) -> "type[Operands]":
    """The class of operands of weights in a format, or without one if that is None."""
    if form is None or form.per_channel:
        return _PlainOperands
    if form.kind == "mxfp4_pairs":
        return _PairOperands
    if form.scales_numbers:
        return _E2M1Operands if form.packed else _MXFP8Operands
    return _CodeOperands if form.packed else _GroupOperands


@dataclasses.dataclass(frozen=True)
class Operands(abc.ABC):
    """In a kernel: the operands of each trip of the loop over input features. Fields are those of
    ``jspec.pallas.moe.grouped_matmul.grouped_matmul``."""

    x_ref: Any
    line: Any
    tile: ExpertTile
    expert_map: ExpertMap
    output_mask: Any
    tiling: ExpertTiling
    ordered: bool

    @property
    def weight(self) -> Weight:
        return self.expert_map.weight

    @property
    def form(self) -> Format:
        """The format of a weight that is quantised."""
        assert self.weight.form is not None
        return self.weight.form

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
        """Whether weights are the left operand. Of weights that are unpacked, a product takes fewer instructions then:
        registers hold them in the order in which they were unpacked."""
        return False

    def zeros(self, output):
        """The initial sum for these output channels, of the shape of ``product``."""
        zeros = jnp.zeros((self.tiling.assignments, output.shape[0]), jnp.float32)
        return zeros.T if self.weights_first else zeros

    def added(self, total, x, weight):
        """``total`` plus the product of what ``of`` gave."""
        return total + self.product(x, weight)

    def product(self, x, weight):
        if self.weights_first:
            return dot(weight, x, trans_b=True)
        return dot(x, weight, trans_b=True)

    def finished(self, total, output):
        """``[assignments, outputs]`` of a sum of products: times the scales of output channels, plus their biases."""
        total = total.T if self.weights_first else total
        scale, bias = self.channel_scale(output), self.expert_map.bias
        if scale is not None:
            total *= scale[None, :]
        return total if bias is None else total + self.load_of(bias, output).astype(jnp.float32)[None, :]

    def channel_scale(self, output) -> Any:
        """What multiplies the sums of the output channels ``output``, float32 ``[outputs]``; None for nothing."""
        del output
        return None

    def load_of(self, ref, output, *which):
        """What ``ref [X, out, ...]`` has for the output channels ``output`` of the expert, ``[outputs]``; ``which`` is an
        index of further axes. It is 0 for channels that there are not."""
        return load_or_zero(ref.at[(self.tile.expert, output, *which)], self.output_mask)

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


class _PlainOperands(Operands):
    """Operands of a weight with one number for each input feature."""

    @property
    def depth(self) -> int:
        return min(self.tiling.inputs, max(pl.next_power_of_2(self.width), 16))

    def of(self, i, outputs) -> list[tuple[Any, list[Any]]]:
        ids, ref = block_ids(i, self.depth), self.weight.numbers
        x = load_or_zero(
            self.x_ref.at[tile_indices(self.line, ids)], self.mask(self.tile.real, ids, self.tiling.assignments)
        )
        masks = (self.mask(self.output_mask, ids, output.shape[0]) for output in outputs)
        weights = [
            self.load_weight(ref.at[self.tile.expert, *tile_indices(output, ids)], mask, x.dtype)
            for output, mask in zip(outputs, masks, strict=True)
        ]
        return [(x, weights)]

    def channel_scale(self, output):
        scale = self.weight.scale
        return None if scale is None else self.load_of(scale, output)

    def load_weight(self, at, mask, dtype):
        """A block of the weight in ``dtype``, 0 where ``mask`` is false."""
        if jnp.issubdtype(at.dtype, jnp.integer) or at.dtype == dtype:
            return load_or_zero(at, mask).astype(dtype)
        weight = pltriton.load(at, mask=mask).astype(dtype)  # Triton has no fp8 literal for ``other``
        return weight if mask is None else jnp.where(mask, weight, jnp.zeros((), dtype))


class _InBlocks(Operands):
    """A trip reads the inputs of one block. Weights that are unpacked for x of bfloat16 are the left operand."""

    @property
    def depth(self) -> int:
        return BLOCK

    @property
    def weights_first(self) -> bool:
        return self.x_ref.dtype == jnp.bfloat16

    def product(self, x, weight):
        if not self.weights_first:
            return super().product(x, weight)
        return super().product(x if self.ordered else to_mma_order(x), to_mma_order(weight))

    @property
    def in_one_group(self) -> bool:
        """Whether all inputs of an output channel share a scale."""
        return self.weight.group is None or self.weight.group >= self.width

    def scale_and_zero(self, output, group) -> tuple[Any, Any]:
        """The scales of a group, and its zeros or None, float32 ``[outputs]``."""
        load = functools.partial(self.load_of, self.weight.scale, output)
        return load_group(self.form, load, jnp.int32(group), self.rounds)[:2]

    @property
    def rounds(self) -> bool:
        """Whether products of numbers and scales are rounded to bfloat16."""
        return self.form.rounds_products and self.x_ref.dtype == jnp.bfloat16

    def load_bytes_of_scales(self, i, output):
        """The scales of a block that multiply its numbers, uint8 ``[outputs, groups]``."""
        scale_ref, group = self.weight.scale, block_ids(i, BLOCK // (self.form.group or BLOCK))
        real = jnp.broadcast_to((group < scale_ref.shape[2])[None, :], (output.shape[0], group.shape[0]))
        if self.output_mask is not None:
            real &= broadcast_columns(self.output_mask, group.shape[0])
        return pltriton.load(scale_ref.at[self.tile.expert, *tile_indices(output, group)], mask=real, other=0)


class _MXFP8Operands(_InBlocks, _PlainOperands):
    """Operands of MXFP8, whose numbers are multiplied by the scales of groups before they are multiplied by x."""

    def of(self, i, outputs) -> list[tuple[Any, list[Any]]]:
        [(x, tiles)] = super().of(i, outputs)
        scales = (self.load_bytes_of_scales(i, output) for output in outputs)
        numbers = [unpack_mxfp8(tile, scale) for tile, scale in zip(tiles, scales, strict=True)]
        return [(x, [number.astype(x.dtype) for number in numbers])]

    def load_weight(self, at, mask, dtype):
        del dtype
        return _load_fp8(at, mask)

    def channel_scale(self, output):
        del output
        return None


def _load_fp8(at, mask):
    """A block of numbers of eight bits, which may be any where ``mask`` is false: unpacked, all are finite, and x is 0."""
    weight = pltriton.load(at, mask=mask)
    if is_interpreted() and mask is not None:
        return jnp.where(mask, weight, jnp.zeros((), weight.dtype))
    return weight


class _GroupOperands(_InBlocks, _PlainOperands):
    """Operands of eight bits with scales for groups of inputs, of which a trip reads one: FP8 in blocks, and codes, whose
    zeros are subtracted. A weight is a pair: its numbers, and the scales that its products are multiplied by, float32
    ``[outputs]``."""

    @property
    def depth(self) -> int:
        return BLOCK if self.in_one_group else self.form.group or BLOCK

    def of(self, i, outputs) -> list[tuple[Any, list[Any]]]:
        [(x, numbers)] = super().of(i, outputs)
        pairs = (self.scale_and_zero(output, 0 if self.in_one_group else i) for output in outputs)
        weights = []
        for of_output, (scale, zero) in zip(numbers, pairs, strict=True):
            if zero is not None:
                shrunk = zero / SHRINK if x.dtype == jnp.bfloat16 else zero
                of_output -= broadcast_columns(shrunk.astype(x.dtype), self.depth)
            if self.rounds:
                of_output, scale = (
                    of_output * broadcast_columns(scale.astype(x.dtype), self.depth),
                    jnp.ones_like(scale),
                )
            weights.append((of_output, scale))
        return [(x, weights)]

    def channel_scale(self, output):
        del output  # the scales are in the products
        return None

    def load_weight(self, at, mask, dtype):
        if dtype != jnp.bfloat16:
            return super().load_weight(at, mask, dtype)
        return unpack_eight_bits(_load_fp8(at, mask))

    def product(self, x, weight):
        numbers, scale = weight
        scale = scale * SHRINK if x.dtype == jnp.bfloat16 else scale
        if self.weights_first:
            return super().product(x, numbers) * broadcast_columns(scale, x.shape[0])
        return super().product(x, numbers) * scale[None, :]


class _InHalves(_InBlocks):
    """Operands of codes of up to six bits: x of the low and of the high halves of bytes, and the numbers of these halves."""

    def load_x(self, at) -> list[Any]:
        """x of the low and of the high halves of bytes ``at [n]``, ``[assignments, n]`` each."""
        mask = self.mask(self.tile.real, at, self.tiling.assignments)
        return [
            load_or_zero(self.x_ref.at[tile_indices(self.line, self.width // 2 * high + at)], mask) for high in (0, 1)
        ]

    def load_bytes(self, output, at):
        """Bytes ``at [n]`` of the weight, ``[outputs, n]``."""
        mask = None if self.output_mask is None else broadcast_columns(self.output_mask, at.shape[0])
        return load_or_zero(self.weight.numbers.at[self.tile.expert, *tile_indices(output, at)], mask)

    def of(self, i, outputs) -> Iterable[tuple[Any, list[Any]]]:
        at = block_ids(i, HALF)
        yield self.load_x(at), [self._weights(i, output, at) for output in outputs]

    @abc.abstractmethod
    def _weights(self, i, output, at) -> list[Any]:
        """The numbers of the low and the high halves of bytes ``at``, those of block i, times their scales."""

    def added(self, total, x, weight):
        for of_x, half in zip(x, weight, strict=True):
            total = super().added(total, of_x, half)
        return total


class _CodeOperands(_InHalves):
    """Operands of codes of integers and of tables."""

    def _weights(self, i, output, at) -> list[Any]:
        packed, other = load_packed(self.form, functools.partial(self.load_bytes, output), at)
        scale, zero, offset = self._of_groups(i, output)
        how: Any = {"dtype": self.x_ref.dtype, "offset": offset, "other": other}
        return [unpack_half(self.form, packed, high, scale, zero, **how) for high in (False, True)]

    def _of_groups(self, i, output) -> list[Any]:
        """Of the group of each byte of block i its scale, zero and offset, float32 ``[outputs, HALF]`` or None."""
        count = 1 if self.in_one_group else max(BLOCK // (self.form.group or BLOCK), 1)
        group, ref = block_ids(0 if self.in_one_group else i, count), self.weight.scale

        def load(first, *which):
            mask = broadcast_columns(first < ref.shape[2], output.shape[0]).T
            mask = mask if self.output_mask is None else mask & broadcast_columns(self.output_mask, count)
            index = tile_indices(output, first)
            which = (broadcast_columns(at, output.shape[0]).T if jnp.ndim(at) else at for at in which)
            none = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
            return pltriton.load(ref.at[(self.tile.expert, *index, *which)], mask=mask, other=none)

        return [None if of is None else _of_bytes(of, count) for of in load_group(self.form, load, group, self.rounds)]

    def channel_scale(self, output):
        return jnp.full(output.shape, shrink_of(self.form, scaled=True), jnp.float32)


def _of_bytes(of_groups, count: int):
    """Numbers of the groups of a block, ``[outputs, count]``, for the bytes of their codes ``[outputs, HALF]``."""
    if count > _ALTERNATING:  # bytes of two groups alternate
        pairs = of_groups.reshape(-1, count // 2, 1, 2)
        return jnp.broadcast_to(pairs, (*pairs.shape[:2], HALF // count, 2)).reshape(-1, HALF)
    return jnp.broadcast_to(of_groups[:, :, None], (*of_groups.shape, HALF // count)).reshape(-1, HALF)


class _E2M1Operands(_InHalves):
    """Operands of NVFP4 and MXFP4."""

    def _weights(self, i, output, at) -> list[Any]:
        scale, packed = self.load_bytes_of_scales(i, output), self.load_bytes(output, at)
        return [unpack_half(self.form, packed, high, scale, None, self.x_ref.dtype) for high in (False, True)]

    def channel_scale(self, output):
        if not self.form.channel_numbers:
            return jnp.full(output.shape, shrink_of(self.form), jnp.float32)
        multiplies, divides = (self.load_of(self.weight.channel_scale, output, which) for which in (0, 1))
        return shrink_of(self.form) * multiplies / jnp.where(divides == 0, 1.0, divides)  # 0 is that of no channel


class _PairOperands(Operands):
    """Operands of MXFP4 as gpt-oss' experts have it, whose groups of inputs are multiplied one after the other."""

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
        weight_ref, scale_ref = self.weight.numbers, self.weight.scale
        at = weight_ref.at[pair, self.tile.expert, *tile_indices(output, block_ids(0, GROUP))]
        byte = load_or_zero(at, None if self.output_mask is None else broadcast_columns(self.output_mask, GROUP))
        return unpack_groups(byte, load_or_zero(scale_ref.at[pair, self.tile.expert, output], self.output_mask))

    def _x(self, ids):
        """Features ``ids [n]`` of the lines, ``[n, assignments]`` if weights come first, else ``[assignments, n]``."""
        mask: Any = self.mask(self.tile.real, ids, self.tiling.assignments)
        line, feature = tile_indices(self.line, ids)
        if self.weights_first:
            line, feature, mask = line.T, feature.T, mask.T
        return load_or_zero(self.x_ref.at[line, feature], mask)

    @property
    def weights_first(self) -> bool:
        return self.tiling.assignments <= _FEW

    def product(self, x, weight):
        return dot(weight, x) if self.weights_first else super().product(x, weight)
