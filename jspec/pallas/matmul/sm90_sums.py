"""What a warpgroup of ``jspec.pallas.matmul.few_tokens_sm90`` multiplies: the sums of a tile's trips over the input
features, which are scaled, and added up where warpgroups take turns."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.matmul.sm90_memory import Scales, ScalesOfNumbers, SharedMemory, load
from jspec.pallas.matmul.sm90_registers import MULTIPLIED, differences_of, in_order, load_bfloat16, load_codes
from jspec.pallas.matmul.sm90_tiling import MosaicTiling
from jspec.pallas.weights.unpack import SHRINK
from jspec.quantization.tables import TABLES

_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
CONVERTED = 64  # inputs of a weight of few bits that become bfloat16 while others are multiplied


def sums_of_tile(
    await_operands,
    shared: SharedMemory,
    scales: Scales,
    trips: int,
    beside,
    turn,
    i,
    tiling: MosaicTiling,
    interpret,
):
    """In a kernel: the products of a warpgroup's tile ``[outputs, tokens]``, scaled, float32.

    Where warpgroups take turns, the first one has the whole sums, and the others have their own part.

    Args:
      await_operands: gives the stage, the weight ``[outputs, inputs]`` and x ``[inputs, tokens]`` of a trip when they have
        arrived.
      shared: whose ``read`` is told when a stage's weights are multiplied.
      trips: how many copies each warpgroup multiplies for a tile.
      beside, turn: the place of this warpgroup among those side by side, and among those in turn.
      i: how many tiles the program instance has multiplied before.
    """
    if isinstance(scales, ScalesOfNumbers):
        sums = _sums_of_scaled(await_operands, shared.read, scales, trips, tiling, interpret)
    else:
        sums = _sums(await_operands, shared.read, scales, trips, tiling, interpret)
    if tiling.in_turns > 1:
        sums = _add_turns(sums, shared, beside, turn, i)
    return sums * lax.broadcast_in_dim(scales.of_outputs(), sums.shape, [0]) if scales.by_output else sums


def _sums(await_operands, read, scales: Scales, trips: int, tiling: MosaicTiling, interpret):
    """The sums of a warpgroup's trips ``[outputs, tokens]``, float32; scaled only where groups of inputs have scales."""
    shape, group = (tiling.outputs, tiling.tokens), scales.group
    packed = scales.weight.packed
    form, shrunk = scales.weight.form, not (packed or scales.weight.is_plain)
    table = TABLES[form.table] if form is not None and form.table else None

    count = min(group, CONVERTED)  # inputs that are converted while others are multiplied

    def converted(weight, start: int, zero=None):
        """The numbers of ``count`` of a copy's inputs, the first of which is ``start``."""
        if packed:
            return load_codes(weight, start, count, zero, table)
        return load_bfloat16(weight, start, count, tiling.ordered)

    def multiply(acc, weight, x, start: int, zero=None, first=None):
        """Begin to add the products of a group of a copy's inputs, the first of which is ``start``, to ``acc``; ``first``
        are those of its numbers that are converted already, or None."""
        if weight.dtype == x.dtype:
            plgpu.wgmma(acc, weight, x)
            return
        for j in range(start, start + group, count):
            numbers = converted(weight, j, zero) if first is None or j > start else first
            plgpu.wgmma(acc, numbers, x.at[pl.ds(j, count)])

    def products(weight, x, start: int, zeros, first):
        """Those of a group alone, and the first numbers of the next one, which are converted meanwhile.

        ``zeros`` are those of both groups; the second is missing where there is no next one."""

        def one(acc):
            multiply(acc, weight, x, start, zeros[0], first)
            following = converted(weight, start + group, *zeros[1:]) if zeros[1:] and weight.dtype != x.dtype else None
            return acc[...], following

        if not interpret:
            return pl.run_scoped(one, _ACC(shape, jnp.float32))
        if packed:
            numbers = differences_of(weight[...], tiling.inputs, zeros[0], table)
        else:
            numbers = weight[...] if weight.dtype == x.dtype else in_order(weight[...], tiling.ordered)
        here = slice(start, start + group)
        return jnp.dot(numbers[:, here], x[...][here], preferred_element_type=jnp.float32), None

    def add_scaled(trip, carry):
        total, of_groups = carry
        following = scales.of_trip(trip + 1)  # looked up a trip ahead, or the products would wait for it
        stage, weight, x = await_operands(trip)
        zeros, first = [zero for _, zero in of_groups], None
        for i, (scale, _) in enumerate(of_groups):
            by = lax.broadcast_in_dim(scale, shape, [0]) if scale.ndim else scale
            product, first = products(weight, x, i * group, zeros[i : i + 2], first)
            total += product * by
        plgpu.barrier_arrive(read.at[stage])
        return total, following

    def add(acc, trip):
        stage, weight, x = await_operands(trip)
        multiply(acc, weight, x, 0)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(read.at[stage])

    def all_trips(acc):
        pl.loop(0, trips)(lambda trip: add(acc, trip))
        return acc[...]

    if interpret or scales.in_groups:
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, trips, add_scaled, (zeros, scales.of_trip(0)))[0]
    else:
        total = pl.run_scoped(all_trips, _ACC(shape, jnp.float32))
    if table is not None:
        return total * (1 / table.factor)
    return total * SHRINK if shrunk and not interpret else total


def _sums_of_scaled(await_operands, read, scales: ScalesOfNumbers, trips: int, tiling: MosaicTiling, interpret):
    """``_sums`` of a weight whose numbers are multiplied by scales, without the numbers of output channels."""
    shape = tiling.outputs, tiling.tokens

    def all_trips(acc):
        def add(trip, of_inputs):
            following = scales.of_trip(trip + 1)  # looked up a trip ahead, or the products would wait for it
            stage, weight, x = await_operands(trip)
            for i, words in enumerate(of_inputs):  # some inputs are converted while others are multiplied
                numbers = scales.load_numbers(weight, i * MULTIPLIED, words)
                plgpu.wgmma(acc, numbers, x.at[pl.ds(i * MULTIPLIED, MULTIPLIED)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(read.at[stage])
            return following

        lax.fori_loop(0, trips, add, scales.of_trip(0))
        return acc[...]

    def add_interpreted(trip, total):
        stage, weight, x = await_operands(trip)
        numbers = scales.numbers_of(weight[...], tiling.inputs, scales.of_trip(trip))
        total += jnp.dot(numbers, x[...], preferred_element_type=jnp.float32)
        plgpu.barrier_arrive(read.at[stage])
        return total

    if interpret:
        return lax.fori_loop(0, trips, add_interpreted, jnp.zeros(shape, jnp.float32))
    return pl.run_scoped(all_trips, _ACC(shape, jnp.float32)) * scales.shrink


def _add_turns(sums, shared: SharedMemory, beside, turn, i):
    """In the first warpgroup in turn, the sums of all of them."""

    @pl.when(turn > 0)
    def _():
        pl.when(i > 0)(lambda: plgpu.barrier_wait(shared.summed))
        shared.sums.at[turn - 1, beside][...] = sums
        plgpu.barrier_arrive(shared.added)

    def add():
        plgpu.barrier_wait(shared.added)
        total = sums
        for other in range(shared.sums.shape[0]):
            total += load(shared.sums.at[other, beside], plgpu.Layout.WGMMA)
        plgpu.barrier_arrive(shared.summed)
        return total

    return lax.cond(turn == 0, add, lambda: sums)
