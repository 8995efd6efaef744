"""Weight-only quantised matmul (W8A16, W4A16): weights of eight or four bits are dequantised to bfloat16 in
registers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul.reference import matmul
from jspec.pallas.matmul.unpack import (
    ORDER_INPUTS,
    SHRINK,
    input_indices,
    to_mma_order,
    unpack_eight_bits,
    unpack_four_bits,
)
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
from jspec.quantization import int4
from jspec.quantization.groups import GROUP
from jspec.quantization.int4 import HALF

MOST_TOKENS = 512  # that the kernel is for: every tile of tokens reads and dequantises the weights again
# The kernel is also for large int8 weights and several tokens. XLA's product is as fast with small weights, and faster with
# more tokens (benchmarks/log/quantised-products.md). That of fp8 was not compared.
_EIGHT_BIT_TOKENS, _EIGHT_BIT_NUMBERS = range(2, 65), 2**25

_FEW_TOKENS = 32  # their sums are small: split-K makes several program instances for each multiprocessor
_INSTANCES, _MULTIPROCESSORS = 190, 132  # the fewest program instances, for few tokens and for more
_MIN_TRIPS = 2  # of an instance, with split-K
_PARTIAL_SUMS = 4  # float32 partial sums have at most one in this many of the bytes of the weight


@dataclasses.dataclass(frozen=True)
class WeightOnlyTiling:
    """The tile sizes of a weight-only matmul.

    Attributes:
      outputs: output features of a program instance, a power of two; 64 are what four warps multiply at once.
      tokens: tokens of an instance, a power of two, at least 16.
      inputs: input features that an instance reads at a time, a power of two, at least 64, and 128 with four bits.
      num_splits: split-K, how many instances share the inputs of the same outputs. XLA adds up their partial sums.
      num_warps: warps of an instance.
      num_stages: how many reads are under way at once, and one more.
      ordered: whether x is read from memory in the order in which it is multiplied, in pairs of inputs. Otherwise it is
        read in 16 bytes at a time and passes through shared memory twice.
    """

    outputs: int
    tokens: int
    inputs: int
    num_splits: int
    num_warps: int
    num_stages: int
    ordered: bool = False

    @classmethod
    def of(cls, tokens: int, outputs: int, inputs: int, bits: int) -> "WeightOnlyTiling":
        """The tiling for ``tokens`` and a weight ``[outputs, inputs]`` of four or eight bits."""
        tile_tokens = min(max(MMA_SIZE, pl.next_power_of_2(tokens)), 128)
        few, min_depth = tile_tokens <= _FEW_TOKENS, GROUP if bits == 4 else ORDER_INPUTS
        depth = max(min(256 if few or bits == 4 else 128, pl.next_power_of_2(inputs)), min_depth)

        def of_outputs(tile_outputs: int) -> tuple[int, WeightOnlyTiling]:
            tiling = cls(
                outputs=tile_outputs,
                tokens=tile_tokens,
                inputs=min(depth, 128) if tile_tokens > tile_outputs else depth,  # sums leave few registers for weights
                num_splits=1,
                num_warps=4 if tile_tokens <= 64 else tile_outputs // 16,
                num_stages=4 if few else 3,
                ordered=few and bits == 8,
            )
            instances, splits, trips = tiling.instances(tokens, outputs), 1, pl.cdiv(inputs, tiling.inputs)
            max_splits = min(trips // _MIN_TRIPS, inputs * bits // (8 * _PARTIAL_SUMS * 4 * tokens))
            while instances * splits < (_INSTANCES if few else _MULTIPROCESSORS) and 2 * splits <= max_splits:
                splits *= 2
            return instances * splits, dataclasses.replace(tiling, num_splits=splits)

        # With 128 outputs x is read half as often, but there are half as many instances.
        instances, tiling = of_outputs(64 if few and bits == 8 else 128)
        return tiling if instances >= _MULTIPROCESSORS else of_outputs(64)[1]

    def instances(self, tokens: int, outputs: int) -> int:
        """How many program instances there are for each split."""
        return pl.cdiv(tokens, self.tokens) * pl.cdiv(outputs, self.outputs)


def has_weight_only_kernel(x, weight) -> bool:
    """Whether a product has the kernel in a program for an NVIDIA GPU; arguments as for
    ``weight_only_matmul_reference``."""
    tokens = x.size // x.shape[-1]
    if weight.dtype == jnp.uint8:
        supported = tokens <= MOST_TOKENS
    else:
        supported = weight.dtype == jnp.int8 and tokens in _EIGHT_BIT_TOKENS and weight.size >= _EIGHT_BIT_NUMBERS
    return supported and x.dtype == jnp.bfloat16


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def weight_only_matmul(x, weight, scale, dtype=jnp.float32):
    """``weight_only_matmul_reference``, and on an NVIDIA GPU the kernel, for products that have it."""
    kernel, reference = (
        functools.partial(f, dtype=dtype) for f in (weight_only_matmul_kernel, weight_only_matmul_reference)
    )
    return by_platform(kernel if has_weight_only_kernel(x, weight) else reference, reference, x, weight, scale)


@weight_only_matmul.defjvp
def _(dtype, primals, tangents):
    return jax.jvp(functools.partial(weight_only_matmul_reference, dtype=dtype), primals, tangents)


def weight_only_matmul_reference(x, weight, scale, dtype=jnp.float32):
    """The linear map of a quantised weight, ``[..., in], [out, in] -> [..., out]``, added up in float32.

    Args:
      x: of bfloat16, or of float32, which is multiplied in full.
      weight: int8 or float8_e4m3fn ``[out, in]``, whose sums are multiplied by their scales; or codes of four bits,
        uint8 ``[out, 64 groups]``, which are multiplied by theirs and rounded to x's dtype before they are added up.
      scale: float32 ``[out]``; of four bits, bfloat16 ``[out, groups]``.
      dtype: to which the results are rounded.
    """
    if weight.dtype == jnp.uint8:
        finfo = jnp.finfo(x.dtype)  # each number is rounded, even where XLA would rather leave that out
        numbers = jax.lax.reduce_precision(int4.dequantize(weight, scale, x.shape[-1]), finfo.nexp, finfo.nmant)
        return matmul(x, numbers.astype(x.dtype)).astype(dtype)
    return (matmul(x, weight.astype(x.dtype)) * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(dtype)


@functools.partial(jax.jit, static_argnames=("dtype", "tiling", "interpret"))  # layers share one trace
def weight_only_matmul_kernel(
    x, weight, scale, dtype=jnp.float32, *, tiling: WeightOnlyTiling | None = None, interpret=False
):
    """``weight_only_matmul_reference`` of bfloat16 as a kernel. Scales of four bits are below 2^19 in magnitude."""
    tokens = x.reshape(-1, x.shape[-1])
    (M, inputs), outputs = tokens.shape, weight.shape[0]
    tiling = tiling or WeightOnlyTiling.of(M, outputs, inputs, 4 if weight.dtype == jnp.uint8 else 8)
    sums = kernel_call(
        _weight_only_matmul,
        *(tokens, weight, scale),
        # Instances that read the same weights for other tokens run side by side, and find them in the L2 cache.
        grid=(pl.cdiv(M, tiling.tokens), pl.cdiv(outputs, tiling.outputs), tiling.num_splits),
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


def _weight_only_matmul(x_ref, weight_ref, scale_ref, sums_ref, *, tiling: WeightOnlyTiling):
    (M, inputs), outputs = x_ref.shape, weight_ref.shape[0]
    token, output = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    in_four_bits = weight_ref.dtype == jnp.uint8
    operands = _four_bit_operands if in_four_bits else _eight_bit_operands
    trips = pl.cdiv(inputs, tiling.inputs)
    split_trips = pl.cdiv(trips, tiling.num_splits)
    first = pl.program_id(2) * split_trips
    uneven = trips % tiling.num_splits != 0

    def add(i, total):
        for weights, x in operands(x_ref, weight_ref, scale_ref, token, output, first + i, tiling):
            total += dot(to_mma_order(weights), x if tiling.ordered else to_mma_order(x), trans_b=True)
        return total

    end = jnp.clip(trips - first, 0, split_trips) if uneven else split_trips
    total = jax.lax.fori_loop(0, end, add, jnp.zeros((tiling.outputs, tiling.tokens), jnp.float32)) * SHRINK
    if not in_four_bits:
        total *= broadcast_columns(pltriton.load(scale_ref.at[output], mask=output < outputs, other=0.0), tiling.tokens)
    at = jnp.full((tiling.tokens, tiling.outputs), pl.program_id(2)), *tile_indices(token, output)
    pltriton.store(sums_ref.at[at], total.T.astype(sums_ref.dtype), mask=tile_mask(token, M, output, outputs))


def _eight_bit_operands(x_ref, weight_ref, scale_ref, token, output, trip, tiling: WeightOnlyTiling):
    """In a kernel: the weights ``[outputs, inputs]`` and ``x [tokens, inputs]`` that a trip multiplies, in bfloat16."""
    depth = tiling.inputs
    weight = load_tile(weight_ref, output, block_ids(trip, depth), depth)
    return [
        (
            unpack_eight_bits(weight),
            load_tile(x_ref, token, trip * depth + input_indices(depth, ORDER_INPUTS, tiling.ordered), depth),
        )
    ]


def _four_bit_operands(x_ref, weight_ref, scale_ref, token, output, trip, tiling: WeightOnlyTiling):
    """In a kernel: the same as two products, of the inputs whose codes are in the low halves of bytes, and in the high
    ones."""
    depth, groups, size = tiling.inputs, tiling.inputs // GROUP, tiling.inputs // 2
    packed = load_tile(weight_ref, output, block_ids(trip, size), size)
    # Numbers past the end of an output channel add nothing: their scales are zero, and so is x.
    scale = load_tile(scale_ref, output, block_ids(trip, groups), groups)
    column = trip * depth + input_indices(size, GROUP, tiling.ordered)
    xs = (load_tile(x_ref, token, at, depth) for at in (column, column + HALF))
    return list(zip(unpack_four_bits(packed, scale), xs, strict=True))
