"""A product of few tokens and a large weight as a kernel in Pallas' Mosaic GPU lowering, for Hopper GPUs.

``y[T, out] = x[T, in] @ weight[out, in]^T`` with the weight on the left of the tensor cores' instruction, which multiplies
64 lines at once: output features fill them, and tokens are padded to 8 only. There is a program instance for each
multiprocessor, which computes one tile of outputs after the other. One of its warpgroups (four warps) copies weights into
shared memory, many reads ahead of the others, which multiply.

A weight of eight bits passes through registers, where it becomes bfloat16. Sums are multiplied by the scales in
float32."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.matmul.sm90_registers import in_order, load_bfloat16, transforms
from jspec.pallas.matmul.sm90_tiling import LOAD_REGISTERS, MosaicTiling
from jspec.pallas.matmul.unpack import SHRINK

MULTIPROCESSORS = 132
CONVERTED = 64  # inputs of a weight of eight bits that become bfloat16 while others are multiplied
LINES = 64  # of the left operand, which a warpgroup multiplies at once
BLOCK = 128  # outputs and inputs that share a scale, where these come in blocks
_PER_OUTPUT = plgpu.Layout.WGMMA.reduce(1)  # the layout of one number for each output feature


class _Memory(NamedTuple):
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
    def types(cls, tiling: MosaicTiling, weight, x, dtype, steps: int) -> "_Memory":
        swizzled = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        parts = steps if tiling.keep_x else tiling.num_stages
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


@functools.partial(jax.jit, static_argnames=("tiling", "dtype", "instances", "interpret"))  # products share one trace
def few_tokens_matmul_kernel(
    x,
    weight,
    scale=None,
    *,
    tiling: MosaicTiling,
    dtype=jnp.bfloat16,
    instances: int = MULTIPROCESSORS,
    interpret=None,
):
    """The product in ``dtype``, ``[T, out]``.

    Args:
      x: bfloat16 ``[T, in]``.
      weight: bfloat16, int8 or float8_e4m3fn ``[out, in]``.
      scale: None, float32 ``[out]``, or ``[out / 128, in / 128]`` for blocks.
      tiling: whose ``tile_outputs`` and ``inputs`` divide the weight.
      dtype: of the results.
      instances: how many program instances share the tiles.
      interpret: None, or how to run on any platform, slowly: ``InterpretGPUParams`` of jax 0.11 and later.
    """
    (T, inputs), outputs = x.shape, weight.shape[0]
    steps = inputs // tiling.inputs
    assert outputs % tiling.tile_outputs == 0, (outputs, tiling)
    assert inputs % (tiling.inputs * tiling.in_turns) == 0, (inputs, tiling)
    assert tiling.num_stages % tiling.in_turns == 0, tiling
    assert scale is None or scale.ndim == 1 or (tiling.inputs == BLOCK and BLOCK % tiling.outputs == 0), tiling
    return plgpu.kernel(
        functools.partial(_multiply_tiles, tiling=tiling, dtype=dtype, instances=instances, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((T, outputs), dtype),
        grid=(instances,),
        grid_names=("instance",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=_Memory.types(tiling, weight, x, dtype, steps),
        interpret=interpret,
        kernel_name="jspec_few_tokens_matmul",
    )(x, weight, scale)


def _multiply_tiles(
    x_ref, weight_ref, scale_ref, y_ref, *memory, tiling: MosaicTiling, dtype, instances: int, interpret
):
    shared, warpgroup = _Memory(*memory), lax.axis_index("warpgroup")
    token_tiles = pl.cdiv(x_ref.shape[0], tiling.tokens)
    steps = x_ref.shape[1] // tiling.inputs
    tiles = weight_ref.shape[0] // tiling.tile_outputs * token_tiles
    own = (tiles - lax.axis_index("instance") + instances - 1) // instances  # tiles of this instance

    def place(i):  # the first output and the first token of its i-th tile
        tile = lax.axis_index("instance") + i * instances
        return tile // token_tiles * tiling.tile_outputs, lax.rem(tile, jnp.int32(token_tiles)) * tiling.tokens

    def stage_of(count):
        return lax.rem(count, jnp.int32(tiling.num_stages))

    @pl.when(warpgroup == tiling.warpgroups)
    def _load():
        if not interpret:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

        @pl.loop(0, own * steps)
        def _(count):
            i, step = count // steps, lax.rem(count, jnp.int32(steps))
            (output, token), stage = place(i), stage_of(count)
            pl.when(count >= tiling.num_stages)(lambda: plgpu.barrier_wait(shared.read.at[stage]))
            here = pl.ds(step * tiling.inputs, tiling.inputs)
            of_x = x_ref.at[pl.ds(token, tiling.tokens), here]
            plgpu.copy_gmem_to_smem(
                weight_ref.at[pl.ds(output, tiling.tile_outputs), here], shared.weight.at[stage], shared.here.at[stage]
            )
            if tiling.keep_x:
                pl.when(i == 0)(lambda: plgpu.copy_gmem_to_smem(of_x, shared.x.at[step], shared.x_here.at[step]))
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
            output, token = place(i)
            output += beside * tiling.outputs

            def await_operands(trip):
                """The weight and x of a trip's stage, which have arrived."""
                step = trip * tiling.in_turns + turn
                stage = stage_of(i * steps + step)
                if tiling.keep_x:
                    pl.when(i == 0)(lambda: plgpu.barrier_wait(shared.x_here.at[step]))
                plgpu.barrier_wait(shared.here.at[stage])
                weight = shared.weight.at[stage, pl.ds(beside * tiling.outputs, tiling.outputs)]
                return stage, weight, shared.x.at[step if tiling.keep_x else stage].transpose((1, 0))

            trips = steps // tiling.in_turns
            sums = _sums(await_operands, shared.read, scale_ref, output, trips, turn, tiling, interpret)
            if tiling.in_turns > 1:
                sums = _add_turns(sums, shared, beside, turn, i)
            if scale_ref is not None and len(scale_ref.shape) == 1:
                scale = plgpu.load(scale_ref.at[pl.ds(output, tiling.outputs)], layout=_PER_OUTPUT, optimized=False)
                sums *= lax.broadcast_in_dim(scale, sums.shape, [0])

            @pl.when(turn == 0)
            def _store():
                y = shared.y.at[beside]
                for j in range(0, tiling.outputs, LINES):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last results have left
                    y.transpose((1, 0))[...] = sums[j : j + LINES].astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(y, y_ref.at[pl.ds(token, tiling.tokens), pl.ds(output + j, LINES)])

        if tiling.in_turns > 1:  # the last phase, too, is awaited
            pl.when((turn > 0) & (own > 0))(lambda: plgpu.barrier_wait(shared.summed))
        plgpu.wait_smem_to_gmem(0)


def _sums(await_operands, read, scale_ref, output, trips: int, turn, tiling: MosaicTiling, interpret):
    """The sums of a warpgroup's trips ``[outputs, tokens]``, float32; scaled only where scales come in blocks."""
    shape = tiling.outputs, tiling.tokens

    def multiply(acc, trip):
        """Add the products of a trip to ``acc``."""
        stage, weight, x = await_operands(trip)
        if weight.dtype == x.dtype:
            plgpu.wgmma(acc, weight, x)
        else:  # some inputs are converted while others are multiplied
            for j in range(0, tiling.inputs, CONVERTED):
                plgpu.wgmma(acc, load_bfloat16(weight, j, CONVERTED, tiling.ordered), x.at[pl.ds(j, CONVERTED)])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(read.at[stage])

    def products(trip):
        """Those of a trip alone."""

        def one(acc):
            multiply(acc, trip)
            return acc[...]

        if not interpret:
            return pl.run_scoped(one, plgpu.ACC(shape, jnp.float32))
        stage, weight, x = await_operands(trip)
        weight = weight[...] if weight.dtype == x.dtype else in_order(weight[...], tiling.ordered)
        result = jnp.dot(weight, x[...], preferred_element_type=jnp.float32)
        plgpu.barrier_arrive(read.at[stage])
        return result

    def scale_of(trip):
        """That of a trip's block; 1 where there are no blocks."""
        if scale_ref is None or len(scale_ref.shape) == 1:
            return jnp.float32(1)
        return scale_ref[output // BLOCK, jnp.minimum(trip, trips - 1) * tiling.in_turns + turn]

    def add_scaled(trip, carry):
        total, scale = carry
        following = scale_of(trip + 1)  # looked up a trip ahead, or the products would wait for it
        return total + products(trip) * scale, following

    def all_trips(acc):
        pl.loop(0, trips)(lambda trip: multiply(acc, trip))
        return acc[...]

    if interpret or (scale_ref is not None and len(scale_ref.shape) == 2):
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        total = lax.fori_loop(0, trips, add_scaled, (zeros, scale_of(0)))[0]
    else:
        total = pl.run_scoped(all_trips, plgpu.ACC(shape, jnp.float32))
    return total if scale_ref is None or interpret else total * SHRINK


def _add_turns(sums, shared: _Memory, beside, turn, i):
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
            total += plgpu.load(shared.sums.at[other, beside], layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.barrier_arrive(shared.summed)
        return total

    return lax.cond(turn == 0, add, lambda: sums)
