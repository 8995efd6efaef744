"""Weight-only quantised matmul (W8A16, W4A16): weights of eight or four bits become bfloat16 in registers.

Numbers of eight bits are multiplied as they are, integers or FP8: the products of inputs that share a scale, those of an
output channel or of 128 inputs of FP8 in blocks, are added up in float32 and then multiplied by it. Numbers of four bits,
and of MXFP8, are multiplied by their scales first, in bfloat16 (``Weight.multiplied``): products of integers and of numbers
of a table are rounded there, by about a 100th of what a code of four bits rounds, and all others are exact."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import differentiable
from jspec.pallas.matmul.reference import matmul_reference, per_feature
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.triton import (
    MMA_SIZE,
    block_ids,
    broadcast_columns,
    dot,
    kernel_call,
    load_tile,
    tile_indices,
    tile_mask,
)
from jspec.pallas.weights.tiles import (
    load_channel_factor,
    load_group,
    load_packed,
    shrink_of,
    unpack_half,
    with_bits_of_scales,
)
from jspec.pallas.weights.unpack import (
    ORDER_INPUTS,
    SHRINK,
    input_indices,
    times_plus,
    to_mma_order,
    unpack_eight_bits,
    unpack_mxfp8,
)
from jspec.quantization.codes import BLOCK, HALF, in_code_order
from jspec.quantization.formats import GROUP, Format
from jspec.quantization.weight import Weight

_FEW_TOKENS = 32  # their sums are small: split-K makes several program instances for each multiprocessor
_INSTANCES, _MULTIPROCESSORS = 190, 132  # the fewest program instances, for few tokens and for more
_SMALL = 32  # inputs whose bytes of codes are by themselves: those of smaller groups alternate
_MIN_TRIPS = 2  # of an instance, with split-K
_PARTIAL_SUMS = 4  # float32 partial sums have at most one in this many of the bytes of the weight


def weight_only_tiling(tokens: int, outputs: int, inputs: int, bits: int, in_blocks: bool = False) -> MatmulTiling:
    """The tiling for ``tokens`` and a weight ``[outputs, inputs]`` of four or eight bits.

    With ``in_blocks`` a trip has whole groups of inputs that share a scale, which is so of all weights of four bits."""
    tile_tokens = min(max(MMA_SIZE, pl.next_power_of_2(tokens)), 128)
    few, min_depth = tile_tokens <= _FEW_TOKENS, GROUP if bits == 4 or in_blocks else ORDER_INPUTS
    depth = max(min(256 if few or bits == 4 else 128, pl.next_power_of_2(inputs)), min_depth)

    def of_outputs(tile_outputs: int) -> MatmulTiling:
        tiling = MatmulTiling(
            outputs=tile_outputs,
            tokens=tile_tokens,
            inputs=min(depth, 128) if tile_tokens > tile_outputs else depth,  # sums leave few registers for weights
            num_warps=4 if tile_tokens <= 64 else tile_outputs // 16,
            num_stages=4 if few else 3,
            ordered=few and bits == 8,
        )
        instances, splits, trips = math.prod(tiling.grid(tokens, outputs)), 1, pl.cdiv(inputs, tiling.inputs)
        max_splits = min(trips // _MIN_TRIPS, inputs * bits // (8 * _PARTIAL_SUMS * 4 * tokens))
        while instances * splits < (_INSTANCES if few else _MULTIPROCESSORS) and 2 * splits <= max_splits:
            splits *= 2
        return dataclasses.replace(tiling, num_splits=splits)

    # With 128 outputs x is read half as often, but there are half as many instances.
    tiling = of_outputs(64 if few and bits == 8 else 128)
    return tiling if math.prod(tiling.grid(tokens, outputs)) >= _MULTIPROCESSORS else of_outputs(64)


def weight_only_matmul(x, weight: Weight, dtype=jnp.float32):
    """``weight_only_matmul_reference``, and on an NVIDIA GPU the kernel, for x of bfloat16."""
    return differentiable(weight_only_matmul_kernel, weight_only_matmul_reference, x, weight, dtype=dtype)


def weight_only_matmul_reference(x, weight: Weight, dtype=jnp.float32):
    """The linear map of a quantised weight, ``[..., in], [out, in] -> [..., out]``, added up in float32 and rounded to
    ``dtype``; of x of bfloat16, or of float32, which is multiplied in full."""
    if not weight.per_channel:
        wide = weight.multiplied() if x.dtype == jnp.bfloat16 else weight.dequantize()
        return matmul_reference(x.astype(jnp.float32), wide).astype(dtype)
    return (matmul_reference(x, weight.numbers.astype(x.dtype)) * per_feature(weight.scale, x)).astype(dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "tiling", "interpret"))  # layers share one trace
def weight_only_matmul_kernel(
    x, weight: Weight, dtype=jnp.float32, *, tiling: MatmulTiling | None = None, interpret=False
):
    """``weight_only_matmul_reference`` of bfloat16 as a kernel."""
    tokens = x.reshape(-1, x.shape[-1])
    (M, inputs), outputs = tokens.shape, weight.shape[0]
    tiling = tiling or weight_only_tiling(M, outputs, inputs, 4 if weight.packed else 8, not weight.per_channel)
    xs = in_code_order(tokens) if weight.packed else (tokens,)
    sums = kernel_call(
        _weight_only_matmul,
        *(xs, with_bits_of_scales(dataclasses.replace(weight, order=None))),
        grid=tiling.grid(M, outputs),
        out_shape=jax.ShapeDtypeStruct(
            (tiling.num_splits, M, outputs), dtype if tiling.num_splits == 1 else jnp.float32
        ),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
    )
    sums = sums.reshape(M, outputs) if tiling.num_splits == 1 else jnp.sum(sums, axis=0).astype(dtype)
    return sums.reshape(*x.shape[:-1], outputs)


def _weight_only_matmul(x_refs, weight: Weight, sums_ref, *, tiling: MatmulTiling):
    """In a kernel: ``weight`` has refs."""
    M, (outputs, _) = x_refs[0].shape[0], weight.shape
    token, output = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    operands, x_is_ordered = _operands_of(weight.form), tiling.ordered and not weight.packed
    trips = pl.cdiv(weight.inputs, tiling.inputs)
    split_trips = pl.cdiv(trips, tiling.num_splits)
    first = pl.program_id(2) * split_trips
    uneven = trips % tiling.num_splits != 0

    def add(i, total):
        for tiles, scale in operands(x_refs, weight, token, output, first + i, tiling):
            products = [
                dot(to_mma_order(weights), x if x_is_ordered else to_mma_order(x), trans_b=True) for weights, x in tiles
            ]
            product = functools.reduce(jnp.add, products)
            total += product if scale is None else broadcast_columns(scale, tiling.tokens) * product
        return total

    end = jnp.clip(trips - first, 0, split_trips) if uneven else split_trips
    total = jax.lax.fori_loop(0, end, add, jnp.zeros((tiling.outputs, tiling.tokens), jnp.float32))
    if weight.packed:
        total *= shrink_of(weight.form)
    elif weight.kind != "mxfp8":
        total *= SHRINK
    if weight.per_channel:
        scale = pltriton.load(weight.scale.at[output], mask=output < outputs, other=0.0)
        total *= broadcast_columns(scale, tiling.tokens)
    if weight.channel_scale is not None:
        total *= broadcast_columns(load_channel_factor(weight.channel_scale, output, output < outputs), tiling.tokens)
    at = jnp.full((tiling.tokens, tiling.outputs), pl.program_id(2)), *tile_indices(token, output)
    pltriton.store(sums_ref.at[at], total.T.astype(sums_ref.dtype), mask=tile_mask(token, M, output, outputs))


def _operands_of(form: Format | None):
    """The operands of a trip, a function of the arguments of ``_eight_bit_operands``."""
    if form is not None and form.packed:
        return _e2m1_operands if form.e2m1 else _four_bit_operands
    return _eight_bit_operands


def _eight_bit_operands(x_refs, weight: Weight, token, output, trip, tiling: MatmulTiling):
    """In a kernel: what a trip multiplies, as pairs of a list of tiles and a scale, None or float32 ``[outputs]``, that
    multiplies the sum of their products. Tiles are weights ``[outputs, inputs]`` and ``x [tokens, inputs]`` in bfloat16. In
    blocks, they are of one group of inputs each."""
    [x_ref] = x_refs
    if not weight.scales_sums:
        return [([_eight_bit_tiles(x_ref, weight, token, output, trip, tiling.inputs, tiling)], None)]
    in_one = weight.group is None or weight.group >= weight.inputs
    size = GROUP if in_one else weight.group or GROUP
    operands, count = [], tiling.inputs // size
    for block in (trip * count + i for i in range(count)):
        scale, zero, _ = _scale_and_zero(weight, output, 0 if in_one else block)
        weights, x = _eight_bit_tiles(x_ref, weight, token, output, block, size, tiling)
        if zero is not None:
            weights -= broadcast_columns(zero * jnp.asarray(1 / SHRINK, jnp.bfloat16), size)
        if weight.form is not None and weight.form.rounds_products:
            weights, scale = weights * broadcast_columns(scale.astype(jnp.bfloat16), size), None
        operands.append(([(weights, x)], scale))
    return operands


def _eight_bit_tiles(x_ref, weight: Weight, token, output, block, size: int, tiling: MatmulTiling):
    """In a kernel: the weights ``[outputs, size]`` and ``x [tokens, size]`` of a block of ``size`` inputs, in bfloat16.
    Numbers of MXFP8 are multiplied by their scales."""
    numbers = load_tile(weight.numbers, output, block_ids(block, size), tiling.inputs)
    at = block * size + input_indices(size, ORDER_INPUTS, tiling.ordered and size % ORDER_INPUTS == 0)
    x = load_tile(x_ref, token, at, tiling.inputs)
    if weight.kind != "mxfp8" or not weight.group:
        return unpack_eight_bits(numbers), x
    group = block_ids(block, size // weight.group)
    return unpack_mxfp8(numbers, load_tile(weight.scale, output, group, tiling.inputs // weight.group)), x


def _four_bit_operands(x_refs, weight: Weight, token, output, trip, tiling: MatmulTiling):
    """In a kernel: the same of codes, which are multiplied by their scales; ``x_refs`` are ``in_code_order``. A tile has the
    low or the high halves of a group's bytes, or of a block's if a group has more inputs."""
    size, in_one = tiling.inputs // 2, weight.group is None
    form, group = weight.form, weight.group or BLOCK
    width = HALF if in_one else max(min(group, BLOCK), _SMALL) // 2
    operands = []

    def load(place):
        return load_tile(weight.numbers, output, place, size * (form.block_bytes if form else HALF) // HALF)

    for start in range(0, size, width):
        at = trip * size + start + jnp.arange(width, dtype=jnp.int32)
        packed, other = load_packed(form, load, at)
        place = 0 if in_one else trip * (tiling.inputs // group) + 2 * start // group
        scale, zero, offset = _of_bytes(weight, output, place, width)
        xs = (load_tile(x_ref, token, at, size) for x_ref in x_refs)
        halves = (unpack_half(form, packed, high, zero=zero, other=other) for high in (False, True))
        if offset is None:
            halves = (half * scale for half in halves)
        else:
            halves = (times_plus(half, scale, offset) for half in halves)
        operands.append((list(zip(halves, xs, strict=True)), None))
    return operands


def _of_bytes(weight: Weight, output, group, width: int) -> tuple[Any, Any, Any]:
    """In a kernel: of the codes in ``width`` bytes the scales, bfloat16 ``[outputs, width]``, the zeros, bfloat16
    ``[outputs]`` or None, and the offsets divided by ``SHRINK`` as the scales are, or None. Bytes of two small groups
    alternate (``jspec.quantization.codes``)."""
    scale, zero, offset = _scale_and_zero(weight, output, group)
    of_group = [scale, *(() if offset is None else (offset,))]
    tiles = [broadcast_columns(one, width) for one in of_group]
    if (weight.group or BLOCK) < _SMALL:
        next_scale, _, next_offset = _scale_and_zero(weight, output, group + 1)
        odd = broadcast_columns(jnp.arange(width, dtype=jnp.int32) % 2 == 1, len(output)).T
        others = (broadcast_columns(one, width) for one in (next_scale, next_offset) if one is not None)
        tiles = [jnp.where(odd, other, tile) for tile, other in zip(tiles, others, strict=True)]
    scale, offset = (*(tile.astype(jnp.bfloat16) for tile in tiles), None)[:2]
    return scale, zero, offset


def _scale_and_zero(weight: Weight, output, group) -> tuple[Any, Any, Any]:
    """In a kernel: of a group of codes the scales, float32 ``[outputs]``, the zeros, bfloat16 ``[outputs]`` or None, and the
    offsets divided by ``SHRINK``, float32 ``[outputs]`` or None; 0 past the ends."""
    scale_ref, (outputs, count) = weight.scale, weight.scale.shape[:2]

    def load(first, *which):
        mask = (output < outputs) & (first < count)
        none = 0 if jnp.issubdtype(scale_ref.dtype, jnp.integer) else 0.0
        return pltriton.load(scale_ref.at[(output, first, *which)], mask=mask, other=none)

    scale, zero, offset = load_group(
        weight.form, load, jnp.int32(group), weight.form is not None and weight.form.rounds_products
    )
    return scale, zero if zero is None else zero.astype(jnp.bfloat16), offset if offset is None else offset / SHRINK


def _e2m1_operands(x_refs, weight: Weight, token, output, trip, tiling: MatmulTiling):
    """In a kernel: the same of NVFP4 and MXFP4. A tile has the low or the high halves of the bytes of a block: numbers that
    are multiplied by their scales."""
    count, groups = tiling.inputs // BLOCK, BLOCK // (weight.group or BLOCK)
    operands = []
    for block in (trip * count + i for i in range(count)):
        at = block_ids(block, HALF)
        packed = load_tile(weight.numbers, output, at, count * HALF)
        scale = load_tile(weight.scale, output, block_ids(block, groups), count * groups)
        for high, x_ref in zip((False, True), x_refs, strict=True):
            x = load_tile(x_ref, token, at, count * HALF)
            operands.append(([(unpack_half(weight.form, packed, high, scale), x)], None))
    return operands
