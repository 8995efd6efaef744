"""Products of a few tokens with weights of eight or four bits, which are read once and become bfloat16 on their way to the
tensor cores."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import SMALLEST, dot, each
from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul.unpack import SHRINK, TOGETHER, in_order, of_eight_bits, of_four_bits, places
from jspec.pallas.moe.tiles import grid
from jspec.pallas.triton import block_ids, is_interpreted, kernel_call
from jspec.quantization import int4
from jspec.quantization.groups import GROUP
from jspec.quantization.int4 import HALF

MOST_TOKENS = 512  # that the kernel is for: every tile of tokens reads and widens the weights again
# Large weights of int8 have it, too, for several tokens. XLA's product is as fast with small weights, and faster with more
# tokens (benchmarks/log/quantised-products.md). That of fp8 was not compared.
_EIGHT_BIT_TOKENS, _EIGHT_BIT_NUMBERS = range(2, 65), 2**25

_FEW_TOKENS = 32  # their sums are small: programs may share outputs until there are several for each multiprocessor
_PROGRAMS, _MULTIPROCESSORS = 190, 132  # how many programs there should be at least, for few tokens and for more
_FEWEST_TRIPS = 2  # of a program that shares its outputs with others
_SHARE = 4  # what such programs write, in float32, are at most this part of the bytes of the weight


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut up.

    Attributes:
      outputs: output features of a program, a power of two; 64 are what four warps multiply at once.
      tokens: tokens of a program, a power of two, at least 16.
      inputs: input features that a program reads at a time, a power of two, at least 64, and 128 with four bits.
      splits: how many programs share the inputs of the same outputs. What each adds up is written, and added up by XLA.
      num_warps: warps of a program.
      num_stages: how many reads are under way at once, and one more.
      ordered: whether x is read from memory in the order in which it is multiplied, in pairs of inputs. Otherwise it is read
        in 16 bytes at a time and passes through shared memory twice.
    """

    outputs: int
    tokens: int
    inputs: int
    splits: int
    num_warps: int
    num_stages: int
    ordered: bool = False

    @classmethod
    def of(cls, tokens: int, outputs: int, inputs: int, bits: int) -> "Tiling":
        """The tiling for ``tokens`` and a weight ``[outputs, inputs]`` of four or eight bits."""
        of_tokens = min(max(SMALLEST, pl.next_power_of_2(tokens)), 128)
        few, least = of_tokens <= _FEW_TOKENS, GROUP if bits == 4 else TOGETHER
        depth = max(min(256 if few or bits == 4 else 128, pl.next_power_of_2(inputs)), least)

        def of_some(of_outputs: int) -> tuple[int, Tiling]:
            one = cls(
                outputs=of_outputs,
                tokens=of_tokens,
                inputs=min(depth, 128) if of_tokens > of_outputs else depth,  # sums leave few registers for weights
                splits=1,
                num_warps=4 if of_tokens <= 64 else of_outputs // 16,
                num_stages=4 if few else 3,
                ordered=few and bits == 8,
            )
            programs, splits, trips = one.programs(tokens, outputs), 1, pl.cdiv(inputs, one.inputs)
            most = min(trips // _FEWEST_TRIPS, inputs * bits // (8 * _SHARE * 4 * tokens))
            while programs * splits < (_PROGRAMS if few else _MULTIPROCESSORS) and 2 * splits <= most:
                splits *= 2
            return programs * splits, dataclasses.replace(one, splits=splits)

        # With 128 outputs x is read half as often, but there are half as many programs.
        programs, tiling = of_some(64 if few and bits == 8 else 128)
        return tiling if programs >= _MULTIPROCESSORS else of_some(64)[1]

    def programs(self, tokens: int, outputs: int) -> int:
        """How many there are for each part of the inputs."""
        return pl.cdiv(tokens, self.tokens) * pl.cdiv(outputs, self.outputs)


def has_kernel(x, weight) -> bool:
    """Whether a product has the kernel in a program for an NVIDIA GPU; arguments as for ``narrow_product_reference``."""
    tokens = x.size // x.shape[-1]
    if weight.dtype == jnp.uint8:
        served = tokens <= MOST_TOKENS
    else:
        served = weight.dtype == jnp.int8 and tokens in _EIGHT_BIT_TOKENS and weight.size >= _EIGHT_BIT_NUMBERS
    return served and x.dtype == jnp.bfloat16


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def narrow_product(x, weight, scale, dtype=jnp.float32):
    """``narrow_product_reference``, and on an NVIDIA GPU the kernel, if it is for this product."""
    kernel, reference = (functools.partial(f, dtype=dtype) for f in (narrow_product_kernel, narrow_product_reference))
    return by_platform(kernel if has_kernel(x, weight) else reference, reference, x, weight, scale)


@narrow_product.defjvp
def _(dtype, primals, tangents):
    return jax.jvp(functools.partial(narrow_product_reference, dtype=dtype), primals, tangents)


def narrow_product_reference(x, weight, scale, dtype=jnp.float32):
    """The linear map of a quantised weight, ``[..., in], [out, in] -> [..., out]``, added up in float32.

    Args:
      x: of bfloat16, or of float32, which is multiplied in full.
      weight: int8 or float8_e4m3fn ``[out, in]``, whose sums are multiplied by their scales; or codes of four bits, uint8
        ``[out, 64 groups]``, which are multiplied by theirs and rounded to x's dtype before they are added up.
      scale: float32 ``[out]``; of four bits, bfloat16 ``[out, groups]``.
      dtype: what the results are rounded to.
    """
    if weight.dtype == jnp.uint8:
        kept = jnp.finfo(x.dtype)  # each number is rounded, even where XLA would rather leave that out
        numbers = jax.lax.reduce_precision(int4.unpacked(weight, scale, x.shape[-1]), kept.nexp, kept.nmant)
        return product(x, numbers.astype(x.dtype)).astype(dtype)
    return (product(x, weight.astype(x.dtype)) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(dtype)


def product(x, weight, dtype=jnp.float32):
    """The linear map ``[..., in], [out, in] -> [..., out]`` of operands of one dtype, in ``dtype``, or in theirs if that is
    None. fp32 is multiplied in full fp32, never in TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("...i,oi->...o", x, weight, precision=precision, preferred_element_type=dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "tiling", "interpret"))  # layers share one trace
def narrow_product_kernel(x, weight, scale, dtype=jnp.float32, *, tiling: Tiling | None = None, interpret=False):
    """``narrow_product_reference`` of bfloat16 as a kernel. Scales of four bits are below 2^19 in magnitude."""
    of_rows = x.reshape(-1, x.shape[-1])
    (M, inputs), outputs = of_rows.shape, weight.shape[0]
    tiling = tiling or Tiling.of(M, outputs, inputs, 4 if weight.dtype == jnp.uint8 else 8)
    sums = kernel_call(
        _narrow_product,
        *(of_rows, weight, scale),
        # Programs that read the same weights for other tokens run side by side, and find them in the L2 cache.
        grid=(pl.cdiv(M, tiling.tokens), pl.cdiv(outputs, tiling.outputs), tiling.splits),
        out_shape=jax.ShapeDtypeStruct((tiling.splits, M, outputs), dtype if tiling.splits == 1 else jnp.float32),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
    )
    sums = sums.reshape(M, outputs) if tiling.splits == 1 else jnp.sum(sums, axis=0).astype(dtype)
    return sums.reshape(*x.shape[:-1], outputs)


def _narrow_product(x_ref, weight_ref, scale_ref, sums_ref, *, tiling: Tiling):
    (M, inputs), outputs = x_ref.shape, weight_ref.shape[0]
    token, output = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    in_four_bits = weight_ref.dtype == jnp.uint8
    operands = _four_bits if in_four_bits else _eight_bits
    trips = pl.cdiv(inputs, tiling.inputs)
    of_a_program = pl.cdiv(trips, tiling.splits)
    first = pl.program_id(2) * of_a_program
    uneven = trips % tiling.splits != 0

    def add(i, total):
        for weights, x in operands(x_ref, weight_ref, scale_ref, token, output, first + i, tiling):
            total += dot(in_order(weights), x if tiling.ordered else in_order(x), trans_b=True)
        return total

    end = jnp.clip(trips - first, 0, of_a_program) if uneven else of_a_program
    total = jax.lax.fori_loop(0, end, add, jnp.zeros((tiling.outputs, tiling.tokens), jnp.float32)) * SHRINK
    if not in_four_bits:
        total *= each(pltriton.load(scale_ref.at[output], mask=output < outputs, other=0.0), tiling.tokens)
    at = jnp.full((tiling.tokens, tiling.outputs), pl.program_id(2)), *grid(token, output)
    pltriton.store(sums_ref.at[at], total.T.astype(sums_ref.dtype), mask=inside(token, M, output, outputs))


def _eight_bits(x_ref, weight_ref, scale_ref, token, output, trip, tiling: Tiling):
    """In a kernel: the weights ``[outputs, inputs]`` and ``x [tokens, inputs]`` that a trip multiplies, in bfloat16."""
    depth = tiling.inputs
    weight = load_tile(weight_ref, output, block_ids(trip, depth), depth)
    return [
        (of_eight_bits(weight), load_tile(x_ref, token, trip * depth + places(depth, TOGETHER, tiling.ordered), depth))
    ]


def _four_bits(x_ref, weight_ref, scale_ref, token, output, trip, tiling: Tiling):
    """The same as two products: those of the inputs whose codes are in the low halves of bytes, and in the high ones."""
    depth, groups, size = tiling.inputs, tiling.inputs // GROUP, tiling.inputs // 2
    packed = load_tile(weight_ref, output, block_ids(trip, size), size)
    # What is past the end of an output channel adds nothing: its scales are zero, and so is x.
    scale = load_tile(scale_ref, output, block_ids(trip, groups), groups)
    column = trip * depth + places(size, GROUP, tiling.ordered)
    xs = (load_tile(x_ref, token, at, depth) for at in (column, column + HALF))
    return list(zip(of_four_bits(packed, scale), xs, strict=True))


def load_tile(ref: Any, row, column, step: int):
    """In a kernel: ``ref[row, column]``, 0 where there is no such row or column, in fp8 any number.

    Columns are read ``step`` at a time, from the first on. There is no mask where none is needed."""
    rows, columns = ref.shape
    at = ref.at[grid(row, column)]
    if rows % row.shape[0] == 0 and columns % step == 0:
        return pltriton.load(at)
    mask = inside(row, rows, column, columns)
    if ref.dtype != jnp.float8_e4m3fn:
        return pltriton.load(at, mask=mask, other=0)
    # Triton has no fp8 literal for ``other``. Whatever it reads, its instructions make a finite number, which x is 0 for.
    found = pltriton.load(at, mask=mask)
    return jnp.where(mask, found, jnp.zeros((), found.dtype)) if is_interpreted() else found


def inside(row, rows: int, column, columns: int):
    """In a kernel: which of ``[len(row), len(column)]`` elements there are."""
    shape = row.shape[0], column.shape[0]
    return each(row < rows, shape[1]) & jnp.broadcast_to((column < columns)[None], shape)
