"""A product of few tokens and a large weight as a kernel in Pallas' Mosaic GPU lowering, for Hopper GPUs.

``y[T, out] = x[T, in] @ weight[out, in]^T`` with the weight on the left of the tensor cores' instruction, which multiplies
64 lines at once: output features fill them, and tokens are padded to 8 only. There is a program instance for each
multiprocessor, which computes one tile of outputs after the other. One of its warpgroups (four warps) copies weights into
shared memory, many reads ahead of the others, which multiply. What is past the last output, token or input is read as
zero, and is not written.

A weight of eight or four bits passes through registers, where it becomes bfloat16. Sums are multiplied by the scales in
float32."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.matmul.sm90_copy_scales import scale_words
from jspec.pallas.matmul.sm90_memory import SharedMemory, scales_of
from jspec.pallas.matmul.sm90_registers import store_transposed
from jspec.pallas.matmul.sm90_sums import sums_of_tile
from jspec.pallas.matmul.sm90_tiling import (
    BLOCK,
    DEPTH_UNIT,
    LINES,
    LOAD_REGISTERS,
    MULTIPROCESSORS,
    TOKEN_UNIT,
    MosaicTiling,
    reads_past,
    whole_lines,
)
from jspec.quantization.weight import Weight


@functools.partial(jax.jit, static_argnames=("tiling", "dtype", "instances", "interpret"))  # products share one trace
def few_tokens_matmul_kernel(
    x,
    weight: Weight,
    dtype=jnp.bfloat16,
    *,
    tiling: MosaicTiling,
    instances: int = MULTIPROCESSORS,
    interpret=None,
) -> jax.Array:
    """The linear map ``[T, in], [out, in] -> [T, out]`` in ``dtype``; with split-K, ``[T, splits, out]`` in float32.

    Args:
      x: bfloat16. Of more than 8 tokens that are no multiple of 8, a copy with zeros is written first.
      weight: bfloat16 without a format; int8 or FP8, whose blocks may have scales ``[out / 128, in / 128]``, too; or
        packed codes but MXFP4.
      dtype: of the results.
      tiling: whose ``outputs`` divide those of the weight, unless it is bfloat16 and a copy ``reads_past`` its last one.
        Where groups of inputs have scales it has at most 128 outputs, and 128 inputs for FP8 or a multiple of them for
        codes.
      instances: how many program instances share the tiles.
      interpret: None, or how to run on any platform, slowly: ``InterpretGPUParams`` of jax 0.11 and later.
    """
    tokens, outputs = len(x), weight.shape[0]
    if tokens > TOKEN_UNIT and tokens % TOKEN_UNIT:  # a copy to shared memory reaches past the end of fewer alone
        x = jnp.pad(x, ((0, -tokens % TOKEN_UNIT), (0, 0)))
    T, inputs = x.shape
    assert outputs % tiling.outputs == 0 or (weight.is_plain and reads_past(outputs)), (outputs, tiling)
    assert inputs % min(tiling.inputs, 2 * DEPTH_UNIT) == 0, (inputs, tiling)
    assert tiling.num_stages % tiling.in_turns == 0, tiling
    # A warpgroup of plain weights reads one copy while it awaits its next.
    assert not weight.is_plain or tiling.num_stages >= 2 * tiling.in_turns, tiling
    if weight.kind in ("nvfp4", "mxfp8"):  # four scales are a word
        words = lax.bitcast_convert_type(weight.scale.reshape(outputs, -1, 4), jnp.int32)
        weight = dataclasses.replace(weight, scale=words)
    if weight.form is not None and weight.form.rounds_products and (weight.form.levels or not interpret):
        weight = scale_words(weight, tiling.inputs)  # interpreters read numbers one by one
    if not (weight.is_plain or weight.per_channel):
        assert tiling.inputs == BLOCK or (weight.packed and tiling.inputs % BLOCK == 0), tiling
        assert BLOCK % tiling.outputs == 0, tiling
    stored, instances = whole_lines(outputs), min(instances, tiling.tiles(T, outputs))
    assert tiling.num_splits == 1 or stored % tiling.tile_outputs == 0, (outputs, tiling)
    dtype = dtype if tiling.num_splits == 1 else jnp.float32
    y = plgpu.kernel(
        functools.partial(_multiply_tiles, tiling=tiling, dtype=dtype, instances=instances, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((T, tiling.num_splits * stored), dtype),
        grid=(instances,),
        grid_names=("instance",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=SharedMemory.types(tiling, weight, x, dtype),
        interpret=interpret,
        kernel_name="jspec_few_tokens_matmul",
    )(x, weight)
    y = y if tiling.num_splits == 1 else y.reshape(T, tiling.num_splits, stored)
    return y if (T, stored) == (tokens, outputs) else y[:tokens, ..., :outputs]


class _Place(NamedTuple):
    """Where a tile begins: its first output, its first token, and the split whose inputs it adds up."""

    output: Any
    token: Any
    split: Any


def _multiply_tiles(
    x_ref,
    weight: Weight,
    y_ref,
    *memory,
    tiling: MosaicTiling,
    dtype,
    instances: int,
    interpret,
):
    """In a kernel: ``weight`` is one of refs."""
    shared, warpgroup = SharedMemory(*memory), lax.axis_index("warpgroup")
    (T, inputs), outputs = x_ref.shape, weight.shape[0]
    stored = whole_lines(outputs)
    token_tiles, splits, trips = pl.cdiv(T, tiling.tokens), tiling.num_splits, tiling.trips(inputs)
    steps, in_turn = tiling.copies(inputs), trips * tiling.in_sequence  # of a tile, and of those one warpgroup's
    own = (tiling.tiles(T, outputs) - lax.axis_index("instance") + instances - 1) // instances  # tiles of this instance

    def place(i) -> _Place:  # of its i-th tile
        tile = lax.axis_index("instance") + i * instances
        token, other = lax.rem(tile, jnp.int32(token_tiles)), tile // token_tiles
        split, output = lax.rem(other, jnp.int32(splits)), other // splits
        return _Place(output * tiling.tile_outputs, token * tiling.tokens, split)

    def stage_of(count):
        return lax.rem(count, jnp.int32(tiling.num_stages))

    def copy_of(step):  # the place of a tile's copy among its inputs: warpgroups in turn have parts of these
        return lax.rem(step, jnp.int32(tiling.in_turns)) * in_turn + step // tiling.in_turns

    @pl.when(warpgroup == tiling.warpgroups)
    def _load():
        if not interpret:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

        @pl.loop(0, own * steps)
        def _(count):
            i, step = count // steps, lax.rem(count, jnp.int32(steps))
            (output, token, split), stage = place(i), stage_of(count)
            pl.when(count >= tiling.num_stages)(lambda: plgpu.barrier_wait(shared.read.at[stage]))
            own_copy, line = copy_of(step), shared.weight.shape[2]
            copy = split * steps + own_copy
            of_x = x_ref.at[pl.ds(token, tiling.tokens), pl.ds(copy * tiling.inputs, tiling.inputs)]
            of_weight = weight.numbers.at[pl.ds(output, tiling.tile_outputs), pl.ds(copy * line, line)]
            plgpu.copy_gmem_to_smem(of_weight, shared.weight.at[stage], shared.here.at[stage])
            if tiling.keep_x:
                pl.when(i == 0)(
                    lambda: plgpu.copy_gmem_to_smem(of_x, shared.x.at[own_copy], shared.x_here.at[own_copy])
                )
            else:
                plgpu.copy_gmem_to_smem(of_x, shared.x.at[stage], shared.here.at[stage])

        @pl.loop(jnp.maximum(own * steps - tiling.num_stages, 0), own * steps)
        def _(count):  # so that every phase of a barrier has been awaited
            plgpu.barrier_wait(shared.read.at[stage_of(count)])

    @pl.when(warpgroup < tiling.warpgroups)
    def _compute():
        if not interpret:
            plgpu.set_max_registers(tiling.registers(), action="increase")
        beside, turn = lax.rem(warpgroup, jnp.int32(tiling.side_by_side)), warpgroup // tiling.side_by_side

        @pl.loop(0, own)
        def _(i):
            output, token, split = place(i)
            output += beside * tiling.outputs

            def await_operands(number):
                """The stage, the weight and x of a copy of this warpgroup, which have arrived."""
                stage, own_copy = stage_of(i * steps + number * tiling.in_turns + turn), turn * in_turn + number
                if tiling.keep_x:
                    pl.when(i == 0)(lambda: plgpu.barrier_wait(shared.x_here.at[own_copy]))
                plgpu.barrier_wait(shared.here.at[stage])
                numbers = shared.weight.at[stage, pl.ds(beside * tiling.outputs, tiling.outputs)]
                return stage, numbers, shared.x.at[own_copy if tiling.keep_x else stage].transpose((1, 0))

            scales = scales_of(weight, jnp.minimum(output, outputs - tiling.outputs), tiling)  # not past the last one
            first = split * steps + turn * in_turn
            sums = sums_of_tile(await_operands, shared, scales, first, beside, turn, i, tiling, trips, interpret)

            @pl.when(turn == 0)
            def _store():
                for j in range(0, tiling.outputs, LINES):
                    for k in range(0, tiling.tokens, tiling.stored_tokens):
                        count = min(tiling.stored_tokens, tiling.tokens - k)
                        y = shared.y.at[beside, pl.ds(0, count)]
                        of_piece = sums[j : j + LINES, k : k + count]
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last results have left
                        if interpret or dtype != jnp.float32:
                            y.transpose((1, 0))[...] = of_piece.astype(dtype)
                        else:
                            store_transposed(y, of_piece)
                        plgpu.commit_smem()
                        there = pl.ds(token + k, count), pl.ds(split * stored + output + j, LINES)
                        plgpu.copy_smem_to_gmem(y, y_ref.at[there])

        if tiling.in_turns > 1:  # the last phase, too, is awaited
            pl.when((turn > 0) & (own > 0))(lambda: plgpu.barrier_wait(shared.summed))
        plgpu.wait_smem_to_gmem(0)
