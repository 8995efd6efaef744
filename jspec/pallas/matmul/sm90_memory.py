"""The shared memory of a program instance of ``jspec.pallas.matmul.few_tokens_sm90``, and the scales of its tiles."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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
from jspec.pallas.weights.unpack import SHRINK
from jspec.quantization.weight import Weight


def load(ref, layout):
    """In a kernel: all numbers of a ref, in a layout that may read them one by one."""
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]  # which is of jax 0.10


class SharedMemory(NamedTuple):
    """Shared memory of a program instance. A barrier with a number of stages has one part for each of them.

    Attributes:
      weight: ``[stages, outputs of a tile, inputs]``, or half as many bytes of codes.
      x: ``[stages, tokens, inputs]``, or all parts of x.
      y: ``[warpgroups side by side, tokens, 64]``, results on their way out.
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
        parts = tiling.trips(x.shape[1]) * tiling.in_turns if tiling.keep_x else tiling.num_stages
        line = tiling.inputs // 2 if weight.packed else tiling.inputs
        others = max(1, tiling.in_turns - 1)
        sums = (others, tiling.side_by_side, tiling.outputs, tiling.tokens) if tiling.in_turns > 1 else (1, 1, 8, 16)
        return cls(
            weight=plgpu.SMEM(
                (tiling.num_stages, tiling.tile_outputs, line),
                weight.numbers.dtype,
                transforms=swizzled if weight.is_plain else transforms(line),
            ),
            x=plgpu.SMEM((parts, tiling.tokens, tiling.inputs), x.dtype, transforms=swizzled),
            y=plgpu.SMEM((tiling.side_by_side, tiling.tokens, LINES), dtype),
            sums=plgpu.SMEM(sums, jnp.float32),
            here=plgpu.Barrier(num_arrivals=1 if tiling.keep_x else 2, num_barriers=tiling.num_stages),
            x_here=plgpu.Barrier(num_barriers=parts),
            read=plgpu.Barrier(num_arrivals=tiling.side_by_side, num_barriers=tiling.num_stages),
            added=plgpu.Barrier(num_arrivals=others * tiling.side_by_side),
            summed=plgpu.Barrier(num_arrivals=tiling.side_by_side),
        )


class GroupScale(NamedTuple):
    """What the products of a group of inputs are multiplied by, a number or float32 ``[outputs]``, and the zeros of its
    codes, float32 ``[outputs]`` or None."""

    scale: Any
    zero: Any = None


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of a warpgroup's tile.

    Attributes:
      weight: the weight of refs.
      output: the first output of the tile.
      first: the first trip of its split, and
      turn: of each, the copy that is multiplied.
    """

    weight: Weight
    output: Any
    first: Any
    turn: Any
    tiling: MosaicTiling

    @property
    def by_output(self) -> bool:
        return self.weight.per_channel

    @property
    def in_groups(self) -> bool:
        """Whether inputs have other scales than other inputs, or zeros."""
        return not (self.weight.is_plain or self.weight.per_channel)

    @property
    def group(self) -> int:
        """How many inputs of a copy share a scale."""
        return min(self.weight.group or self.tiling.inputs, self.tiling.inputs)

    def of_trip(self, trip) -> list[GroupScale]:
        """Those of the groups of a trip; 1 where there are none."""
        if not self.in_groups:
            return [GroupScale(jnp.float32(1))]
        return [self._of_group(column) for column in self._columns(trip, self.tiling.inputs // self.group)]

    def _columns(self, trip, count: int) -> Iterator[Any]:
        """The columns of scales of a trip that has ``count`` of them, none past the last."""
        start = ((self.first + trip) * self.tiling.in_turns + self.turn) * count
        return (jnp.minimum(start + i, self.weight.scale.shape[1] - 1) for i in range(count))

    def _of_group(self, column) -> GroupScale:
        ref = self.weight.scale
        if self.weight.zeros:
            return GroupScale(self.of_outputs(column, 0), self.of_outputs(column, 1))
        if ref.shape[0] == self.weight.shape[0]:
            return GroupScale(self.of_outputs(column))
        return GroupScale(ref[self.output // BLOCK, column])

    def of_outputs(self, *at):
        """Those of the tile's outputs, float32 ``[outputs]``, at an index of the further axes of the scales."""
        return self._load(self.weight.scale, *at).astype(jnp.float32)

    def _load(self, ref, *at):
        return load(ref.at[(pl.ds(self.output, self.tiling.outputs), *at)], PER_LINE)


class ScalesOfNumbers(Scales):
    """The scales of a warpgroup's tile, by which its numbers are multiplied before they are multiplied by x. They are int32
    ``[out, words]``, the bits of four in each word."""

    shrink: ClassVar[float]  # what the numbers are divided by besides
    load_numbers: ClassVar[Callable]  # ``load_nvfp4`` for example
    numbers_of: ClassVar[Callable]  # the same for interpreters: ``numbers_of_nvfp4``

    def of_trip(self, trip) -> list[Any]:
        """The words of each 64 inputs of a trip, int32 ``[outputs]`` each; two may be one, which has scales of both."""
        each = MULTIPLIED // (self.weight.group or MULTIPLIED)  # scales
        words = self._columns(trip, self.tiling.inputs // MULTIPLIED * each // 4)
        return [word for column in words for word in [self._load(self.weight.scale, column)] * (4 // each)]


class MXFP8Scales(ScalesOfNumbers):
    """Those of a tile in MXFP8, of which a word has the scales of 128 inputs."""

    shrink = 1.0
    load_numbers = staticmethod(load_mxfp8)
    numbers_of = staticmethod(numbers_of_mxfp8)


class NVFP4Scales(ScalesOfNumbers):
    """Those of a tile in NVFP4, of which a word has the scales of 64 inputs, and the numbers of its output channels."""

    shrink = SHRINK
    load_numbers = staticmethod(load_nvfp4)
    numbers_of = staticmethod(numbers_of_nvfp4)
    by_output = True  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]

    def of_outputs(self, *at):
        """What multiplies the sums of the tile's outputs, float32 ``[outputs]``."""
        multiplies, divides = (self._load(self.weight.channel_scale, which) for which in (0, 1))
        return multiplies / divides


def scales_of(weight: Weight, output, first, turn, tiling: MosaicTiling) -> Scales:
    """The scales of a warpgroup's tile, whose attributes the arguments are."""
    kind = {"nvfp4": NVFP4Scales, "mxfp8": MXFP8Scales}.get(weight.kind, Scales)
    return kind(weight, output, first, turn, tiling)
