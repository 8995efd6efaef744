"""The MLP of experts whose weights are quantised, in Pallas' Mosaic GPU lowering, for Hopper GPUs.

Each of the program instances, one for each multiprocessor, multiplies some output features of one tile of assignments after
the other, as in ``jspec.pallas.matmul.few_tokens_sm90``: weights are the left operand of the tensor cores' instruction and
become bfloat16 in registers. That instruction multiplies 64 lines at once. An instance has two times 64 lines of an expert
at a time, which different warpgroups multiply: of gate and of up, or 128 output features of down. Tiles come from
``jspec.pallas.moe.gather_tiles``.

No GPU has run these kernels yet, so nothing but ``benchmarks.kernels.experts --ways mosaic`` uses them: models have those of
``jspec.pallas.moe.grouped_mlp`` until times say otherwise. jax 0.11 lowers them; 0.12 finds no layouts for the product of
down."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.matmul.sm90_memory import SharedMemory, load, scales_of
from jspec.pallas.matmul.sm90_sums import sums_of_tile
from jspec.pallas.matmul.sm90_tiling import DEPTH_UNIT, LINES, LOAD_REGISTERS, MULTIPROCESSORS, SHARED, MosaicTiling
from jspec.pallas.moe.activation import gated
from jspec.pallas.moe.gather_tiles import GatheredTiles, gather_tiles_kernel
from jspec.pallas.moe.router_reference import Routed
from jspec.pallas.moe.tiles import ExpertWeights
from jspec.quantization.codes import BLOCK
from jspec.quantization.groups import group_of

BESIDE = 2  # warpgroups that multiply other lines of an expert
_TILE_SIZES = (4, 8), (12, 16), (24, 32)  # the most assignments of an expert on average, and the size of a tile then
_PER_TOKEN: Any = plgpu.Layout.WGMMA.reduce(0)  # the layout of one number for each token


def tile_size(A: int, X: int) -> int | None:
    """How many assignments a tile has room for, of A to X experts; None if weights were converted too often."""
    return next((size for most, size in _TILE_SIZES if most * X >= A), None)


def suits_sm90(weights: ExpertWeights, inputs: int) -> bool:
    """Whether the kernels multiply such weights of so many input features.

    They know eight bits with scales of channels or of blocks of 128, integers of four bits in groups of 64 or more, and
    NVFP4. Biases they do not know."""
    scale = weights.scale
    if scale is None or weights.bias is not None or weights.is_mxfp4 or weights.is_linear_mxfp4:
        return False
    if weights.of_codes and weights.channel_scale is None:
        grouped = group_of(inputs, scale.shape[2]) >= DEPTH_UNIT
    else:
        grouped = not weights.in_groups or (scale.ndim == 3 and group_of(inputs, scale.shape[2]) == BLOCK)
    return grouped and inputs % BLOCK == weights.num_outputs % (BESIDE * LINES) == 0


def grouped_tiling(size: int, inputs: int, bits: int, gated: bool) -> MosaicTiling:
    """The tiling for tiles of ``size`` lines, a multiple of 8, and weights of so many bits.

    A line of a copy has 128 bytes if these divide ``inputs``, and two warpgroups take turns."""
    depth = next(depth for depth in (1024 // bits, BLOCK) if inputs % depth == 0)
    tiling = MosaicTiling(LINES, size, depth, 0, side_by_side=BESIDE, in_turns=2)
    exchanged = 4 * LINES * size if gated else 0
    fits = [
        stages
        for stages in range(2, 17, 2)
        if tiling._replace(num_stages=stages).shared_bytes(inputs, bits / 8, 2) + exchanged <= SHARED
    ]
    return tiling._replace(num_stages=max(fits))


def grouped_mlp_sm90_kernel(
    x,
    routed: Routed,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    size: int,
    clamp: float | None = None,
    activation: str = "silu",
    instances: int = MULTIPROCESSORS,
    interpret=None,
) -> jax.Array:
    """``grouped_mlp_reference`` as three kernels, in tiles of ``size`` assignments, for weights that all have eight bits or
    four, and x in bfloat16."""
    (M, Y), Fe, bits = routed.expert.shape, gate_up.num_outputs // 2, 4 if gate_up.of_codes else 8
    how = {"instances": instances, "interpret": interpret}
    tiles = gather_tiles_kernel(x, routed, size, interpret=interpret is not None)
    up_tiling, down_tiling = grouped_tiling(size, x.shape[1], bits, True), grouped_tiling(size, Fe, bits, False)
    hidden = hidden_of_tiles_kernel(tiles, gate_up, up_tiling, clamp=clamp, activation=activation, **how)
    return made_of_tiles_kernel(hidden, tiles, down, M * Y, down_tiling, **how).reshape(M, Y, -1)


class _Exchange(NamedTuple):
    """In shared memory: the products of up ``[64, tokens]``, float32, for the warpgroup that has those of gate."""

    up: Any
    here: Any
    read: Any

    @classmethod
    def types(cls, tokens: int) -> "_Exchange":
        return cls(plgpu.SMEM((LINES, tokens), jnp.float32), plgpu.Barrier(), plgpu.Barrier())


class _Gate(NamedTuple):
    """How gate and up become hidden features: ``clamp`` and ``activation`` of ``gated``."""

    clamp: float | None
    activation: str


@functools.partial(jax.jit, static_argnames=("tiling", "clamp", "activation", "instances", "interpret"))
def hidden_of_tiles_kernel(
    tiles: GatheredTiles,
    gate_up: ExpertWeights,
    tiling: MosaicTiling,
    *,
    clamp: float | None = None,
    activation: str = "silu",
    instances: int = MULTIPROCESSORS,
    interpret=None,
) -> jax.Array:
    """``gated`` of all tiles, ``[tiles n, Fe]``; lines without an assignment may hold anything.

    ``gate_up`` are those of ``grouped_mlp_reference``, of eight or four bits, where Fe is a multiple of 64."""
    shape = jax.ShapeDtypeStruct((len(tiles.x), gate_up.num_outputs // 2), tiles.x.dtype)
    return _run(tiles.x, tiles, gate_up, shape, tiling, _Gate(clamp, activation), instances, interpret)


@functools.partial(jax.jit, static_argnames=("tiling", "assignments", "instances", "interpret"))
def made_of_tiles_kernel(
    hidden,
    tiles: GatheredTiles,
    down: ExpertWeights,
    assignments: int,
    tiling: MosaicTiling,
    *,
    instances: int = MULTIPROCESSORS,
    interpret=None,
) -> jax.Array:
    """The weighted outputs of experts ``[assignments, D]`` from the result of ``hidden_of_tiles_kernel``, in the order of
    assignments; D is a multiple of 128."""
    shape = jax.ShapeDtypeStruct((assignments, down.num_outputs), hidden.dtype)
    return _run(hidden, tiles, down, shape, tiling, None, instances, interpret)


def _run(x, tiles: GatheredTiles, weights: ExpertWeights, out, tiling, gate: _Gate | None, instances, interpret):
    assert suits_sm90(weights, x.shape[1]), jax.tree.map(jnp.shape, weights)
    X, lines, width = weights.weight.shape
    scale: Any = weights.scale
    channel_scale = weights.channel_scale
    if channel_scale is not None:  # four scales are a word
        scale = lax.bitcast_convert_type(scale.reshape(X * lines, -1, 4), jnp.int32)
        channel_scale = channel_scale.reshape(X * lines, 2)
    else:
        scale = scale.reshape(X * lines, *scale.shape[2:])
    blocks = out.shape[1] // (LINES if gate else BESIDE * LINES)
    instances = min(instances, len(tiles.expert) * blocks)
    weight = weights.weight.reshape(X * lines, width)
    shared, exchange = SharedMemory.types(tiling, weight, x, x.dtype), _Exchange.types(tiling.tokens)
    here = plgpu.Barrier(num_arrivals=BESIDE + 1, num_barriers=tiling.num_stages)  # parts of the weight, and x
    return plgpu.kernel(
        functools.partial(
            _multiply_tiles, tiling=tiling, lines=lines, gate=gate, instances=instances, interpret=interpret
        ),
        out_type=out,
        grid=(instances,),
        grid_names=("instance",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=(*shared._replace(here=here), *(exchange if gate else ())),
        interpret=interpret,
        kernel_name="jspec_grouped_hidden" if gate else "jspec_grouped_down",
    )(x, weight, scale, channel_scale, tiles.total, tiles.expert, tiles.assignment, tiles.factor)


class _Place(NamedTuple):
    """A tile and a block of its output features."""

    tile: Any
    block: Any


def _multiply_tiles(
    x_ref,
    weight_ref,
    scale_ref,
    channel_scale_ref,
    total_ref,
    expert_ref,
    assignment_ref,
    factor_ref,
    out_ref,
    *memory,
    tiling: MosaicTiling,
    lines: int,
    gate: _Gate | None,
    instances: int,
    interpret,
):
    """In a kernel: all that a program instance multiplies. ``lines`` are those of an expert's weight."""
    fields = len(SharedMemory._fields)
    shared, exchange = SharedMemory(*memory[:fields]), _Exchange(*memory[fields:]) if gate else None
    warpgroup, instance = lax.axis_index("warpgroup"), lax.axis_index("instance")
    inputs, last_tile = x_ref.shape[1], expert_ref.shape[0] - 1
    blocks, trips = out_ref.shape[1] // (LINES if gate else BESIDE * LINES), tiling.trips(inputs)
    own = (total_ref[0] * blocks - instance + instances - 1) // instances  # tiles times blocks
    stride, between = (LINES, lines // 2) if gate else (BESIDE * LINES, LINES)  # of blocks, and of lines side by side

    def place(i) -> _Place:
        item = instance + i * instances
        return _Place(item // blocks, lax.rem(item, jnp.int32(blocks)))

    def expert_of(i):
        return expert_ref[jnp.minimum(place(i).tile, last_tile)]

    def first_line(i, expert, beside):
        """The first of the 64 lines of the weight that a warpgroup multiplies."""
        return expert * lines + place(i).block * stride + beside * between

    def each(body):
        """Call ``body`` with the number of each of the instance's items, and its expert, which was looked up before."""

        def step(i, expert):
            following = expert_of(i + 1)
            body(i, expert)
            return following

        lax.fori_loop(0, own, step, expert_of(0))

    @pl.when(warpgroup == tiling.warpgroups)
    def _load():
        if not interpret:
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
        each(functools.partial(_load_item, x_ref, weight_ref, shared, tiling, trips, place, first_line))
        copies = own * trips * tiling.in_turns

        @pl.loop(jnp.maximum(copies - tiling.num_stages, 0), copies)
        def _(count):  # so that every phase of a barrier has been awaited
            plgpu.barrier_wait(shared.read.at[lax.rem(count, jnp.int32(tiling.num_stages))])

    @pl.when(warpgroup < tiling.warpgroups)
    def _compute():
        if not interpret:
            plgpu.set_max_registers(tiling.registers(), action="increase")
        beside, turn = lax.rem(warpgroup, jnp.int32(BESIDE)), warpgroup // BESIDE

        def multiply(i, expert):
            def await_operands(trip):
                count = (i * trips + trip) * tiling.in_turns + turn
                stage = lax.rem(count, jnp.int32(tiling.num_stages))
                plgpu.barrier_wait(shared.here.at[stage])
                weight = shared.weight.at[stage, pl.ds(beside * LINES, LINES)]
                return stage, weight, shared.x.at[stage].transpose((1, 0))

            line = first_line(i, expert, beside)
            scales = scales_of(weight_ref, scale_ref, channel_scale_ref, line, 0, turn, inputs, tiling)
            sums = sums_of_tile(await_operands, shared, scales, trips, beside, turn, i, tiling, interpret)
            first, (tile, block) = turn == 0, place(i)
            lines_of_tile = pl.ds(tile * tiling.tokens, tiling.tokens)
            if exchange is None or gate is None:
                output = block * stride + beside * between
                at = factor_ref.at[lines_of_tile], assignment_ref.at[lines_of_tile]
                pl.when(first)(functools.partial(_store_made, sums, shared.y.at[beside], *at, out_ref, output))
            else:
                pl.when(first & (beside == 1))(functools.partial(_give_up, exchange, sums, i))
                there = out_ref.at[lines_of_tile, pl.ds(block * LINES, LINES)]
                pl.when(first & (beside == 0))(
                    functools.partial(_store_hidden, exchange, gate, sums, shared.y.at[0], there)
                )

        each(multiply)
        if exchange is not None:  # the last phases, too, are awaited
            pl.when((warpgroup == 1) & (own > 0))(functools.partial(plgpu.barrier_wait, exchange.read))
        pl.when((turn > 0) & (own > 0))(lambda: plgpu.barrier_wait(shared.summed))
        plgpu.wait_smem_to_gmem(0)


def _load_item(x_ref, weight_ref, shared: SharedMemory, tiling: MosaicTiling, trips: int, place, first_line, i, expert):
    """Copy the lines of the expert's weight and the tile's x into shared memory, as it becomes free."""
    token, line = place(i).tile * tiling.tokens, shared.weight.shape[2]

    @pl.loop(0, trips * tiling.in_turns)
    def _(step):
        count = i * trips * tiling.in_turns + step
        stage = lax.rem(count, jnp.int32(tiling.num_stages))
        pl.when(count >= tiling.num_stages)(lambda: plgpu.barrier_wait(shared.read.at[stage]))
        for beside in range(BESIDE):
            of_weight = weight_ref.at[pl.ds(first_line(i, expert, beside), LINES), pl.ds(step * line, line)]
            there = shared.weight.at[stage, pl.ds(beside * LINES, LINES)]
            plgpu.copy_gmem_to_smem(of_weight, there, shared.here.at[stage])
        of_x = x_ref.at[pl.ds(token, tiling.tokens), pl.ds(step * tiling.inputs, tiling.inputs)]
        plgpu.copy_gmem_to_smem(of_x, shared.x.at[stage], shared.here.at[stage])


def _give_up(exchange: _Exchange, sums, i):
    """Hand over the products of up of the instance's i-th item."""
    pl.when(i > 0)(lambda: plgpu.barrier_wait(exchange.read))
    exchange.up[...] = sums
    plgpu.barrier_arrive(exchange.here)


def _store_hidden(exchange: _Exchange, gate: _Gate, sums, y, there):
    """Store hidden features ``[tokens, 64]`` of the products of gate ``[64, tokens]``, and of up, when they are there."""
    plgpu.barrier_wait(exchange.here)
    up = load(exchange.up, plgpu.Layout.WGMMA)
    plgpu.barrier_arrive(exchange.read)
    plgpu.copy_smem_to_gmem(_in_shared(y, gated(sums, up, gate.clamp, gate.activation)), there)


def _store_made(sums, y, factor_ref, assignment_ref, out_ref, output):
    """Store the products of down ``[64, tokens]``, times the factors of tokens, from an output feature on.

    Each line that has an assignment goes to its place in the order of assignments."""
    factor = lax.broadcast_in_dim(load(factor_ref, _PER_TOKEN), sums.shape, [1])
    y = _in_shared(y, sums * factor)
    for j in range(y.shape[0]):
        assignment = assignment_ref[j]

        @pl.when(assignment < out_ref.shape[0])
        def _(j=j, assignment=assignment):
            plgpu.copy_smem_to_gmem(y.at[pl.ds(j, 1)], out_ref.at[pl.ds(assignment, 1), pl.ds(output, LINES)])


def _in_shared(y, results):
    """``y [tokens, 64]`` with results ``[64, tokens]``, which wait until the last ones have left."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    y.transpose((1, 0))[...] = results.astype(y.dtype)
    plgpu.commit_smem()
    return y
