"""The shared memory of a program instance of ``jspec.pallas.matmul.few_tokens_sm90``, and the scales of its tiles."""

import abc
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.matmul.sm90_codes import load_codes
from jspec.pallas.matmul.sm90_copy_scales import CopyScales, load_words
from jspec.pallas.matmul.sm90_registers import (
    MULTIPLIED,
    PER_LINE,
    load_mxfp8,
    load_nvfp4,
    numbers_of_mxfp8,
    numbers_of_nvfp4,
    transforms,
)
from jspec.pallas.matmul.sm90_tiling import BLOCK, LINES, MosaicTiling
from jspec.pallas.weights.table_codes import numbers_of
from jspec.pallas.weights.unpack import CODE_SHRINK, SHRINK
from jspec.quantization.codes import SHARING, unpack_codes
from jspec.quantization.formats import Format
from jspec.quantization.levels import unpack_levels
from jspec.quantization.tables import TABLES
from jspec.quantization.weight import Weight, rounded_product


def load(ref, layout):
    """In a kernel: all numbers of a ref, in a layout that may read them one by one."""
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]  # which is of jax 0.10


class SharedMemory(NamedTuple):
    """Shared memory of a program instance. A barrier with a number of stages has one part for each of them.

    Attributes:
      weight: ``[stages, outputs of a tile, inputs]``, or the bytes of their codes.
      x: ``[stages, tokens, inputs]``, or all parts of x.
      y: ``[warpgroups side by side, stored tokens, 64]``, results on their way out.
      sums: ``[warpgroups but the first in turn, side by side, outputs, tokens]``, float32.
      here: the weights of a stage have arrived, and so has x if it is copied with them.
      x_here: a part of x has arrived, if it stays.
      read: the weights of a stage are multiplied, and its memory is free.
      added, summed: the sums of the other warpgroups are there, and are read.
    """

    weight: Any
    x: Any
    y: Any
    sums: Any
    here: Any
    x_here: Any
    read: Any
    added: Any
    summed: Any

    @classmethod
    def types(cls, tiling: MosaicTiling, weight: Weight, x, dtype) -> "SharedMemory":
        swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        parts = tiling.copies(x.shape[1]) if tiling.keep_x else tiling.num_stages
        bits = weight.form.bits if weight.packed and weight.form else 8
        line = tiling.inputs * bits // 8
        others = max(1, tiling.in_turns - 1)
        sums = (others, tiling.side_by_side, tiling.outputs, tiling.tokens) if tiling.in_turns > 1 else (1, 1, 8, 16)
        return cls(
            weight=plgpu.SMEM(
                (tiling.num_stages, tiling.tile_outputs, line),
                weight.numbers.dtype,
                transforms=() if bits in SHARING else swizzled if weight.is_plain else transforms(line),
            ),
            x=plgpu.SMEM((parts, tiling.tokens, tiling.inputs), x.dtype, transforms=swizzled),
            y=plgpu.SMEM((tiling.side_by_side, tiling.stored_tokens, LINES), dtype),
            sums=plgpu.SMEM(sums, jnp.float32),
            here=plgpu.Barrier(num_arrivals=1 if tiling.keep_x else 2, num_barriers=tiling.num_stages),
            x_here=plgpu.Barrier(num_barriers=parts),
            read=plgpu.Barrier(num_arrivals=tiling.side_by_side, num_barriers=tiling.num_stages),
            added=plgpu.Barrier(num_arrivals=others * tiling.side_by_side),
            summed=plgpu.Barrier(num_arrivals=tiling.side_by_side),
        )


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of a warpgroup's tile, which multiply sums: those of output channels, or of FP8 in blocks.

    Attributes:
      weight: the weight of refs.
      output: the first output of the tile.
      tiling: of the product.
    """

    weight: Weight
    output: Any
    tiling: MosaicTiling

    @property
    def by_output(self) -> bool:
        """Whether each output channel has one."""
        return self.weight.per_channel

    @property
    def in_groups(self) -> bool:
        """Whether each copy has others."""
        return not (self.weight.is_plain or self.weight.per_channel)

    @property
    def shrink(self) -> float:
        """What the numbers that are multiplied are divided by besides."""
        return 1.0 if self.weight.is_plain else SHRINK

    def of_copy(self, copy) -> Any:
        """Those of a copy of inputs, a number or float32 ``[outputs]``; 1 where all copies have the same."""
        if not self.in_groups:
            return jnp.float32(1)
        [column] = self._columns(copy, 1)
        ref = self.weight.scale
        return self.of_outputs(column) if ref.shape[0] == self.weight.shape[0] else ref[self.output // BLOCK, column]

    def of_outputs(self, *at):
        """Those of the tile's outputs, float32 ``[outputs]``, at an index of the further axes of the scales."""
        return self._load(self.weight.scale, *at).astype(jnp.float32)

    def _columns(self, copy, count: int) -> Iterator[Any]:
        """The columns of scales of a copy that has ``count`` of them, none past the last."""
        return (jnp.minimum(copy * count + i, self.weight.scale.shape[1] - 1) for i in range(count))

    def _load(self, ref, *at):
        return load(ref.at[(pl.ds(self.output, self.tiling.outputs), *at)], PER_LINE)


class ScalesOfNumbers(Scales, abc.ABC):
    """The scales of a warpgroup's tile, by which its numbers are multiplied before they are multiplied by x."""

    @abc.abstractmethod
    def of_copy(self, copy) -> list[Any]:
        """Those of each 64 inputs of a copy, or of all of it."""

    def prepared(self, scales: list[Any]) -> list[Any]:
        """What all inputs of a copy need that has these."""
        return scales

    def interpreted(self, copy) -> Any:
        """Those of a copy for ``numbers_of``."""
        return self.of_copy(copy)

    @abc.abstractmethod
    def load_numbers(self, weight, first: int, scales) -> Any:
        """The numbers of 64 inputs of a copy ``weight``, the first of which is ``first``, as an operand in registers."""

    @abc.abstractmethod
    def numbers_of(self, weight, scales: Any) -> Any:
        """Those of a copy, not divided by ``shrink``: for interpreters."""


class CodeScales(ScalesOfNumbers):
    """Those of a tile in codes of integers or of a table, and their zeros or offsets."""

    @property
    def form(self) -> Format:
        assert self.weight.form is not None
        return self.weight.form

    @property
    def shrink(self) -> float:
        return CODE_SHRINK / (TABLES[self.form.table].factor if self.form.table else 1.0)

    @property
    def _copies(self) -> CopyScales:
        return CopyScales(self.form, self.tiling.inputs, in_words=self.weight.scale.dtype == jnp.int32)

    def of_copy(self, copy) -> list[Any]:
        """What four threads have of each line: words of the scales of a copy, or all of its numbers."""
        copies = self._copies
        if not copies.in_words:
            return [number for group in self._groups(copy) for number in group]
        ref = self.weight.scale.at[pl.ds(self.output, self.tiling.outputs)]
        if not self.form.levels:
            count = copies.words
            first = jnp.minimum(copy * count, self.weight.scale.shape[1] - count)  # none past the last
            return load_words(ref.at[:, pl.ds(first, count)], range(count))
        super_, word = self._place(copy)
        integers = ref.at[:, super_, pl.ds(1 + word, copies.places[-1] + 1)]
        return [self._load(self.weight.scale, super_, 0), *load_words(integers, copies.places)]

    def prepared(self, scales: list[Any]) -> list[Any]:
        return self._copies.prepared(scales)

    def load_numbers(self, weight, first: int, scales):
        return load_codes(weight, first, scales, self._copies)

    def interpreted(self, copy) -> tuple[Any, Any]:
        """The scales of a copy's groups and their zeros or offsets, or zeros, float32 ``[outputs, groups]``."""
        if not self.form.levels:
            scale, *beside = (jnp.stack(numbers, axis=1) for numbers in zip(*self._groups(copy), strict=True))
            return scale, beside[0] if beside else jnp.zeros_like(scale)
        super_, word = self._place(copy)
        count, words = self._copies.groups // 4, self._copies.groups_of_super // 4
        starts = (1 + word, *((1 + words + word,) if self.form.offsets else ()))
        at = [0, *(start + i for start in starts for i in range(count))]
        own = jnp.stack([self._load(self.weight.scale, super_, place) for place in at], axis=-1)
        scale, offset = unpack_levels(lax.bitcast_convert_type(own, jnp.uint32)[:, None], self.form, rounded=True)
        return scale, jnp.zeros_like(scale) if offset is None else offset

    def numbers_of(self, weight, scales: Any):
        form, inputs = self.form, self.tiling.inputs
        scale, beside = (jnp.repeat(of, inputs // of.shape[1], axis=1) for of in scales)
        codes = unpack_codes(weight, inputs, form.bits) if form.packed else weight
        if form.table:
            table = TABLES[form.table]
            return rounded_product(numbers_of(table, codes).astype(jnp.float32), scale) * np.float32(1 / table.factor)
        numbers = codes.astype(jnp.float32) - (beside if form.zeros else form.middle)
        return rounded_product(numbers, scale, beside if form.offsets else None)

    def _groups(self, copy) -> list[list[Any]]:
        """The scale of each group of a copy, and its zero or offset, float32 ``[outputs]``."""
        which = ((0,), (1,)) if self.form.zeros or self.form.offsets else ((),)
        columns = self._columns(copy, self._copies.groups) if self.weight.group else [0]
        return [[self.of_outputs(column, *at) for at in which] for column in columns]

    def _place(self, copy) -> tuple[Any, Any]:
        """Of levels, which 256 inputs a copy is in, none past the last, and its first word of integers of scales there."""
        first, count = copy * self._copies.groups, self._copies.groups_of_super
        super_ = jnp.minimum(first // count, self.weight.scale.shape[1] - 1)
        return super_, lax.rem(first, jnp.int32(count)) // 4


class _BytesOfScales(ScalesOfNumbers):
    """Those of a tile as int32 ``[out, words]``, the bits of four in each word."""

    def of_copy(self, copy) -> list[Any]:
        """The words of each 64 inputs of a copy, int32 ``[outputs]`` each; two may be one, which has scales of both."""
        each = MULTIPLIED // (self.weight.group or MULTIPLIED)  # scales
        words = self._columns(copy, self.tiling.inputs // MULTIPLIED * each // 4)
        return [word for column in words for word in [self._load(self.weight.scale, column)] * (4 // each)]


class MXFP8Scales(_BytesOfScales):
    """Those of a tile in MXFP8, of which a word has the scales of 128 inputs."""

    @property
    def shrink(self) -> float:
        return 1.0

    def load_numbers(self, weight, first: int, scales):
        return load_mxfp8(weight, first, scales[first // MULTIPLIED])

    def numbers_of(self, weight, scales: Any):
        return numbers_of_mxfp8(weight, self.tiling.inputs, scales)


class NVFP4Scales(_BytesOfScales):
    """Those of a tile in NVFP4, of which a word has the scales of 64 inputs, and the numbers of its output channels."""

    @property
    def by_output(self) -> bool:
        return True

    def load_numbers(self, weight, first: int, scales):
        return load_nvfp4(weight, first, scales[first // MULTIPLIED])

    def numbers_of(self, weight, scales: Any):
        return numbers_of_nvfp4(weight, self.tiling.inputs, scales)

    def of_outputs(self, *at):
        """What multiplies the sums of the tile's outputs, float32 ``[outputs]``."""
        multiplies, divides = (self._load(self.weight.channel_scale, which) for which in (0, 1))
        return multiplies / divides


def scales_of(weight: Weight, output, tiling: MosaicTiling) -> Scales:
    """The scales of a warpgroup's tile, whose attributes the arguments are."""
    kinds = {"nvfp4": NVFP4Scales, "mxfp8": MXFP8Scales}
    codes = weight.form is not None and weight.form.rounds_products
    return (CodeScales if codes else kinds.get(weight.kind, Scales))(weight, output, tiling)
