"""What a warpgroup of ``jspec.pallas.matmul.few_tokens_sm90`` multiplies: the sums of a tile's trips over the input
features, which are scaled, and added up where warpgroups take turns."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.matmul.sm90_memory import Scales, ScalesOfNumbers, SharedMemory, load
from jspec.pallas.matmul.sm90_registers import MULTIPLIED, in_order, load_bfloat16, rounded_times
from jspec.pallas.matmul.sm90_tiling import MosaicTiling

_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def sums_of_tile(
    await_operands,
    shared: SharedMemory,
    scales: Scales,
    first,
    beside,
    turn,
    i,
    tiling: MosaicTiling,
    trips: int,
    interpret,
):
    """In a kernel: the products of a warpgroup's tile ``[outputs, tokens]``, scaled, float32.

    Parts are rounded and added one after the other, in whichever way. Where warpgroups take turns, the first one has the
    whole sums, and the others have their own part.

    Args:
      await_operands: gives the stage, the weight ``[outputs, inputs]`` and x ``[inputs, tokens]`` of the warpgroup's n-th
        copy for this tile when they have arrived.
      shared: whose ``read`` is told when a stage's weights are multiplied.
      first: the number of its first copy among those of all inputs.
      beside, turn: the place of this warpgroup among those side by side, and among those in turn.
      i: how many tiles the program instance has multiplied before.
      trips: how many copies a part of the inputs has.
    """

    def of_part(part):
        begin = part * trips

        def operands(trip):
            return await_operands(begin + trip)

        def of_trip(trip):
            copy = first + begin + trip
            return (
                scales.interpreted(copy) if interpret and isinstance(scales, ScalesOfNumbers) else scales.of_copy(copy)
            )

        how = shared.read, scales, trips, tiling, interpret
        sums_of: Any = _sums_of_scaled if isinstance(scales, ScalesOfNumbers) else _sums
        sums = sums_of(operands, of_trip, *how)
        return _scaled(sums, scales, of_outputs, interpret)

    of_outputs = scales.of_outputs() if scales.by_output else None  # on their way while the tile is multiplied

    if tiling.in_sequence <= 2:  # a loop would keep zeros beside the sums of a single part
        sums = of_part(0) if tiling.in_sequence == 1 else of_part(0) + of_part(1)
    else:
        zeros = jnp.zeros((tiling.outputs, tiling.tokens), jnp.float32)
        zeros = zeros if interpret else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, tiling.in_sequence, lambda part, sums: sums + of_part(part), zeros)
    return _add_turns(sums, shared, beside, turn, i) if tiling.in_turns > 1 else sums


def _scaled(sums, scales: Scales, of_outputs, interpret):
    """The sums of a part as they are added to those of others: rounded, wherever the others come from."""
    if interpret:
        return sums if of_outputs is None else sums * lax.broadcast_in_dim(of_outputs, sums.shape, [0])
    return sums if of_outputs is None and scales.shrink == 1 else rounded_times(sums, scales.shrink, of_outputs)


def _sums(operands, of_trip, read, scales: Scales, trips: int, tiling: MosaicTiling, interpret):
    """The sums of a part of the inputs ``[outputs, tokens]``, float32, divided by ``scales.shrink``; scaled only where each
    copy has other scales."""
    shape, is_plain = (tiling.outputs, tiling.tokens), scales.weight.is_plain

    def multiply(acc, weight, x):
        """Begin to add the products of a copy."""
        for j in range(0, tiling.inputs, MULTIPLIED):  # some inputs are converted while others are multiplied
            plgpu.wgmma(acc, load_bfloat16(weight, j, MULTIPLIED, tiling.ordered), x.at[pl.ds(j, MULTIPLIED)])

    def product(weight, x):
        """That of a copy alone."""

        def one(acc):
            multiply(acc, weight, x)
            return acc[...]

        if not interpret:
            return pl.run_scoped(one, _ACC(shape, jnp.float32))
        numbers = weight[...] if is_plain else in_order(weight[...], tiling.ordered)
        return jnp.dot(numbers, x[...], preferred_element_type=jnp.float32)

    def add_scaled(trip, carry):
        total, scale = carry
        following = of_trip(trip + 1)  # looked up a trip ahead, or the products would wait for it
        stage, weight, x = operands(trip)
        total += product(weight, x) * (lax.broadcast_in_dim(scale, shape, [0]) if scale.ndim else scale)
        plgpu.barrier_arrive(read.at[stage])
        return total, following

    def all_trips(acc):
        @pl.loop(0, trips)
        def _(trip):
            stage, weight, x = operands(trip)
            multiply(acc, weight, x)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(read.at[stage])

        return acc[...]

    def all_plain_trips(acc):
        def add(trip, before):
            stage, weight, x = operands(trip)
            plgpu.wgmma(acc, weight, x)
            plgpu.wgmma_wait(1)  # those of the copy before are multiplied while these are
            pl.when(trip > 0)(lambda: plgpu.barrier_arrive(read.at[before]))
            return stage

        last = lax.fori_loop(0, trips, add, jnp.int32(0))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(read.at[last])
        return acc[...]

    if interpret or scales.in_groups:
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, trips, add_scaled, (zeros, of_trip(0)))[0]
    return pl.run_scoped(all_plain_trips if is_plain else all_trips, _ACC(shape, jnp.float32))


def _sums_of_scaled(operands, of_trip, read, scales: ScalesOfNumbers, trips: int, tiling: MosaicTiling, interpret):
    """``_sums`` of a weight whose numbers are multiplied by scales, without the numbers of output channels."""
    shape = tiling.outputs, tiling.tokens

    def all_trips(acc):
        def add(trip, of_inputs):
            following = of_trip(trip + 1)  # looked up a trip ahead, or the products would wait for it
            stage, weight, x = operands(trip)
            own = scales.prepared(of_inputs)
            for i in range(0, tiling.inputs, MULTIPLIED):  # some inputs are converted while others are multiplied
                plgpu.wgmma(acc, scales.load_numbers(weight, i, own), x.at[pl.ds(i, MULTIPLIED)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(read.at[stage])
            return following

        lax.fori_loop(0, trips, add, of_trip(0))
        return acc[...]

    def add_interpreted(trip, total):
        stage, weight, x = operands(trip)
        numbers = scales.numbers_of(weight[...], of_trip(trip))
        total += jnp.dot(numbers, x[...].astype(numbers.dtype), preferred_element_type=jnp.float32)
        plgpu.barrier_arrive(read.at[stage])
        return total

    if interpret:
        return lax.fori_loop(0, trips, add_interpreted, jnp.zeros(shape, jnp.float32))
    return pl.run_scoped(all_trips, _ACC(shape, jnp.float32))


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
