"""The only caller of Pallas' Triton lowering: how a kernel is called, and how it reads blocks and tiles of arrays.

Three rules of this lowering shape the kernels. Every array inside a kernel has a power of two of elements, so a long
axis is read in blocks, and a block that passes the end is masked. Arguments are entire arrays: a kernel indexes them by
the ids of its program instance. And a maximum or minimum of floats drops NaN: ``jnp.maximum(x, nan)`` is x, and
``jnp.max`` is NaN only if all numbers are. So a NaN has to reach the result of a kernel by another way, for example by a
sum of ``exp(x - peak)``, or the kernel takes its maximum with ``maximum`` or ``largest_magnitude``."""

import contextvars
import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

LOG2_E = math.log2(math.e)
MMA_SIZE = 16  # the smallest side of a matrix that tensor cores multiply
_interpreted = contextvars.ContextVar("interpreted", default=False)


def kernel_call(
    function,
    *args,
    grid,
    out_shape,
    num_warps: int,
    interpret: bool,
    num_stages: int | None = None,
    aliases=None,
    **static,
):
    """The outputs of a kernel that runs ``function(*arg_refs, *out_refs, **static)`` once per program instance.

    Args:
      function: the kernel; its name, behind ``jspec``, is that of the launch.
      args: arrays, which the kernel gets as refs; or trees of arrays, which it gets as the same trees of refs.
      grid: how many program instances there are along each axis; the first axis runs fastest.
      out_shape: one ``jax.ShapeDtypeStruct``, or a list of them.
      num_warps: warps of 32 threads that run one instance.
      interpret: run on any platform, slowly, instead of lowering for a GPU.
      num_stages: how many trips of a loop have their loads under way at once.
      aliases: maps the number of an array in ``args`` to that of the output which takes its place in memory.
      static: Python values that the kernel gets by name.
    """
    # jax 0.11 announces the end of this lowering whenever it is used; the move away from it will happen in this file.
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    call = pl.pallas_call(
        functools.partial(function, **static),
        grid=grid,
        out_shape=out_shape,
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        input_output_aliases=aliases or {},
        interpret=interpret,
        name="jspec" + function.__name__,
    )
    outer = _interpreted.set(interpret)  # the call traces the function
    try:
        # Weak types do not lower where literals meet them.
        return call(*jax.tree.map(lambda array: jnp.asarray(array, array.dtype), args))
    finally:
        _interpreted.reset(outer)


def block_size(width: int, largest: int) -> int:
    """How many elements a block of an axis of ``width`` elements covers: a power of two, at most ``largest``."""
    return min(largest, pl.next_power_of_2(width))


def block_ids(block, size: int):
    """The ids of a block's elements, int32 ``[size]``."""
    return block * size + jnp.arange(size, dtype=jnp.int32)


def load_block(ref, before, block, ids, width: int, *, when=True, other=-jnp.inf):
    """``ref[*before, ids]``, and ``other`` where an id is past ``width`` or not ``when``.

    Args:
      before: indices of all axes of ``ref`` but the last.
      block: the number of a block of the last axis, an int or a traced int32.
      ids: ``block_ids(block, size)``.
      width: how many elements the last axis has.
    """
    return pltriton.load(ref.at[(*before, _span(block, ids, width))], mask=(ids < width) & when, other=other)


def store_block(ref, before, block, ids, width: int, x, *, when=True):
    """``ref[*before, ids] = x``, where an id is within ``width``, and ``when``; arguments as for ``load_block``."""
    pltriton.store(ref.at[(*before, _span(block, ids, width))], x, mask=(ids < width) & when)


def _span(block, ids, width: int):
    """The indices of a block on the last axis: a slice, or ``ids`` themselves where the block is known to pass the end.

    A masked load or store may pass the end of an array. Since 0.12, jax refuses a slice that does so if it can tell when
    it traces, which is if ``block`` is an int; indices are never refused."""
    size = ids.shape[0]
    if isinstance(block, int) and (block + 1) * size > width:
        return ids
    return pl.ds(block * size, size)


def load_tile(ref: Any, line, column, step: int):
    """In a kernel: ``ref[line, column]``, 0 past the ends of ``ref``, where fp8 may hold any number.

    Args:
      ref: ``[lines, columns]``.
      line, column: int32 ``[n]`` and ``[m]``.
      step: so many columns are read by all program instances together in a trip of theirs. No mask is computed where
        such steps fill the columns of ``ref``, and blocks of ``line`` its lines.

    Returns:
      ``[n, m]``.
    """
    lines, columns = ref.shape
    at = ref.at[tile_indices(line, column)]
    if lines % line.shape[0] == 0 and columns % step == 0:
        return pltriton.load(at)
    mask = tile_mask(line, lines, column, columns)
    if ref.dtype != jnp.float8_e4m3fn:
        return pltriton.load(at, mask=mask, other=0)
    # Triton has no fp8 literal for ``other``. Its instructions make a finite number of any fp8, and x is 0 there.
    tile = pltriton.load(at, mask=mask)
    return jnp.where(mask, tile, jnp.zeros((), tile.dtype)) if is_interpreted() else tile


def tile_indices(line, column):
    """The two index arrays ``[n, m]`` of a tile: lines int32 ``[n]``, columns int32 ``[m]``."""
    shape = line.shape[0], column.shape[0]
    return jnp.broadcast_to(line[:, None], shape), jnp.broadcast_to(column[None, :], shape)


def tile_mask(line, lines: int, column, columns: int):
    """Which elements of a tile lie inside a matrix ``[lines, columns]``, bool ``[n, m]``; arguments as for
    ``load_tile``."""
    shape = line.shape[0], column.shape[0]
    return broadcast_columns(line < lines, shape[1]) & jnp.broadcast_to((column < columns)[None], shape)


def line_indices(line, width: int):
    """The two index arrays ``[n, width]`` of whole lines of a matrix, int32 ``[n]``.

    They read what ``ref[line, :]`` would. An interpreted kernel cannot mix indices and slices."""
    shape = line.shape[0], width
    return broadcast_columns(line, width), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def broadcast_columns(x, width: int):
    """Each number repeated along a line: ``[n] -> [n, width]``."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], width))


def dot(a, b, trans_b: bool = False):
    """In a kernel: the product in fp32. fp32 operands are multiplied in full fp32, never in TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pltriton.dot(a, b, trans_b=trans_b, precision=precision)


def is_interpreted() -> bool:
    """In a kernel: whether it is interpreted, so that instructions of a GPU cannot be used."""
    return _interpreted.get()


def exp2(x):
    """In a kernel: 2^x in one instruction, where ``jnp.exp2`` takes four.

    The relative error is at most 2e-7, and a result below 2^-126 is 0.
    """
    return jnp.exp2(x) if is_interpreted() else _instruction("ex2.approx.ftz.f32 $0, $1;", x)


def exp(x):
    """In a kernel: e^x by ``exp2``. The rounding of x * log2(e) adds a relative error of 1e-7 per unit of x."""
    return exp2(x * LOG2_E)


def sigmoid(x):
    """In a kernel: 1 / (1 + e^-x) in four instructions, where ``jax.nn.sigmoid`` takes about twenty.

    The relative error is that of ``exp``, and a result below 2^-126 is 0."""
    return jax.nn.sigmoid(x) if is_interpreted() else _instruction("rcp.approx.ftz.f32 $0, $1;", 1.0 + exp(-x))


def maximum(x, y):
    """In a kernel: the larger of two numbers in one instruction, NaN if one of them is NaN."""
    if is_interpreted():
        return jnp.where((x > y) | (x != x), x, y)
    return _instruction("max.NaN.f32 $0, $1, $2;", x, y)


def largest_magnitude(x, axis: int):
    """The largest magnitude of float32 numbers along ``axis``, which stays with one element; NaN if one of them is NaN.

    It works in kernels and outside. The bits of floats without a sign, as integers, have the order of the floats, and
    those of NaN come last. A maximum of integers drops nothing."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=axis, keepdims=True), jnp.float32)


def multiply_add(x, y, z):
    """In a kernel: x * y + z in one instruction, rounded once.

    The compiler may not merge a product and a sum by itself, because that changes the rounding.
    """
    return x * y + z if is_interpreted() else _instruction("fma.rn.f32 $0, $1, $2, $3;", x, y, z)


def reciprocal(x):
    """In a kernel: 1 / x in one instruction, off by one ulp at most."""
    return 1.0 / x if is_interpreted() else _instruction("rcp.approx.f32 $0, $1;", x)


def divide(x, y):
    """In a kernel: x / y, rounded to nearest. Triton's own division may be off by two ulps."""
    return x / y if is_interpreted() else _instruction("div.rn.f32 $0, $1, $2;", x, y)


def to_bfloat16(x):
    """In a kernel: float32 numbers rounded to bfloat16, two in one instruction.

    Triton makes that of ``x.astype(jnp.bfloat16)``, too, but one slow instruction for each number where what was rounded off
    is computed as well."""
    if is_interpreted():
        return x.astype(jnp.bfloat16)
    [result] = pltriton.elementwise_inline_asm(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        args=[x],
        constraints="=r,f,f",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)],
    )
    return result


def _instruction(asm: str, *args):
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in args))
    [result] = pltriton.elementwise_inline_asm(
        asm,
        args=[jnp.broadcast_to(jnp.asarray(x, jnp.float32), shape) for x in args],
        constraints="=f" + ",f" * len(args),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.float32)],
    )
    return result
