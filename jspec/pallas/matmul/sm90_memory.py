"""The shared memory of a program instance of ``jspec.pallas.matmul.few_tokens_sm90``, and the scales of its tiles."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.matmul.sm90_registers import transforms
from jspec.pallas.matmul.sm90_tiling import BLOCK, LINES, MosaicTiling

PER_OUTPUT = plgpu.Layout.WGMMA.reduce(1)  # the layout of one number for each output feature


def load(ref, layout):
    """In a kernel: all numbers of a ref, in a layout that may read them one by one."""
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]  # which is of jax 0.10


class SharedMemory(NamedTuple):
    """Shared memory of a program instance. A barrier with a number of stages has one part for each of them.

    Attributes:
      weight: ``[stages, outputs of a tile, inputs]``.
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
    def types(cls, tiling: MosaicTiling, weight, x, dtype) -> "SharedMemory":
        swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        parts = tiling.trips(x.shape[1]) * tiling.in_turns if tiling.keep_x else tiling.num_stages
        others = max(1, tiling.in_turns - 1)
        sums = (others, tiling.side_by_side, tiling.outputs, tiling.tokens) if tiling.in_turns > 1 else (1, 1, 8, 16)
        return cls(
            weight=plgpu.SMEM(
                (tiling.num_stages, tiling.tile_outputs, tiling.inputs),
                weight.dtype,
                transforms=swizzled if weight.dtype == x.dtype else transforms(tiling.inputs),
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


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of a warpgroup's tile.

    Attributes:
      ref: all scales, or None if there are none.
      output: the first output of the tile.
      first: the first trip of its split, and
      turn: of each, the copy that is multiplied.
      outputs: how many outputs all tiles have.
    """

    ref: Any
    output: Any
    first: Any
    turn: Any
    outputs: int
    tiling: MosaicTiling

    @property
    def by_output(self) -> bool:
        return self.ref is not None and len(self.ref.shape) == 1

    @property
    def in_blocks(self) -> bool:
        return self.ref is not None and len(self.ref.shape) == 2

    def of_outputs(self):
        return load(self.ref.at[pl.ds(self.output, self.tiling.outputs)], PER_OUTPUT)

    def of_trip(self, trip):
        """Those of a trip's block, a number or one for each output; 1 where there are no blocks."""
        if not self.in_blocks:
            return jnp.float32(1)
        rows, columns = self.ref.shape
        column = jnp.minimum((self.first + trip) * self.tiling.in_turns + self.turn, columns - 1)
        if rows == self.outputs:
            outputs = pl.ds(self.output, self.tiling.outputs)
            return load(self.ref.at[outputs, column], PER_OUTPUT)
        return self.ref[self.output // BLOCK, column]
