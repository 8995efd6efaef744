"""Tiling, launch and accumulation of the small-batch matmul kernels in ``jspec.pallas.matmul.w8a8`` and
``jspec.pallas.matmul.bf16``, whose weights reach the tensor cores as they are stored."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import MMA_SIZE, block_ids, kernel_call, load_tile, tile_indices, tile_mask

_INSTANCES = 120  # split-K makes so many program instances, about one for each multiprocessor
_MIN_TRIPS = 4  # of an instance, with split-K


@dataclasses.dataclass(frozen=True)
class SmallBatchTiling:
    """The tile sizes of a small-batch matmul.

    Attributes:
      outputs: output features of a program instance, a power of two, at least 16.
      tokens: tokens of an instance, a power of two, at least 16.
      inputs: input features that an instance reads at a time, a power of two, at least 32.
      num_warps: warps of an instance.
      num_stages: how many reads are under way at once, and one more.
      weight_first: whether the weight is the left operand, of which four warps multiply 64 lines at once. Otherwise the
        tokens are, and ``outputs`` may be fewer.
      num_splits: split-K, how many instances share the inputs of the same results. Each of them stores partial sums.
    """

    outputs: int
    tokens: int
    inputs: int
    num_warps: int
    num_stages: int
    weight_first: bool
    num_splits: int = 1

    @classmethod
    def of(
        cls, tokens: int, outputs: int, inputs: int, allow_partial_sums: bool = False, itemsize: int = 1
    ) -> "SmallBatchTiling":
        """The tiling for ``tokens`` and a weight ``[outputs, inputs]`` of ``itemsize`` bytes a number, with split-K only
        if ``allow_partial_sums``."""
        tile_tokens = 64 if tokens > 128 else max(MMA_SIZE, pl.next_power_of_2(tokens))
        tiles = pl.cdiv(tokens, tile_tokens)
        if tiles * pl.cdiv(outputs, 128) >= (200 if tokens > 64 else _INSTANCES):
            deep = tile_tokens <= 32
            depth, stages = (256 if deep else 128) // itemsize, 3 if deep or tokens > 64 else 4
            return cls(128, tile_tokens, depth, 4 if deep else 8, stages, True)
        large = cls(64, tile_tokens, (256 if tokens <= 64 else 128) // itemsize, 4, 5 if tokens <= 64 else 4, True)
        # An instance of few outputs, which has at least 64 tokens, reads all of x for them.
        small = cls(32, max(tile_tokens, 64), 256 // itemsize, 4, 6 if tile_tokens <= 64 else 4, False)
        if allow_partial_sums:
            tiling = small if tile_tokens == 64 and tiles == 1 else large
            instances, trips = tiles * pl.cdiv(outputs, tiling.outputs), pl.cdiv(inputs, tiling.inputs)
            splits = 1
            while instances * splits < _INSTANCES and trips % (2 * splits) == 0 and trips // (2 * splits) >= _MIN_TRIPS:
                splits *= 2
            return dataclasses.replace(tiling, num_splits=splits)
        return small if tiles * pl.cdiv(outputs, 64) < 80 and tokens <= 128 else large

    def split_inputs(self, inputs: int) -> int:
        """How many of the inputs a split has."""
        return pl.cdiv(pl.cdiv(inputs, self.inputs), self.num_splits) * self.inputs


def run_matmul(kernel, x, weight, *scales, tiling: SmallBatchTiling, dtype, interpret: bool) -> jax.Array:
    """The products that ``kernel(x_ref, weight_ref, *scale_refs, products_ref, tiling=)`` stores: ``[M, out]`` of
    ``dtype``, or partial sums ``[M, splits, out]`` if the tiling has several splits.

    Args:
      kernel: multiplies by ``multiply_tile``, and stores by ``store_products``.
      x: ``[M, in]``.
      weight: ``[out, in]`` of the same dtype.
      scales: further arguments of the kernel.
    """
    M, outputs = x.shape[0], weight.shape[0]
    products = kernel_call(
        kernel,
        *(x, weight, *scales),
        # Instances that read the same weights for other tokens run side by side, and find them in the L2 cache.
        grid=(pl.cdiv(M, tiling.tokens), pl.cdiv(outputs, tiling.outputs), tiling.num_splits),
        out_shape=jax.ShapeDtypeStruct((M, tiling.num_splits, outputs), dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
    )
    return products if tiling.num_splits > 1 else products[:, 0]


def multiply_tile(x_ref, weight_ref, tiling: SmallBatchTiling):
    """In a kernel: the products of a program instance ``[tokens, outputs]`` in float32, its tokens and its output
    features. Those of integers are added up as integers."""
    token, output = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    trips = pl.cdiv(pl.cdiv(x_ref.shape[1], tiling.inputs), tiling.num_splits)
    first = pl.program_id(2) * trips
    sum_dtype = jnp.int32 if x_ref.dtype == jnp.int8 else jnp.float32

    def add(i, total):
        column = block_ids(first + i, tiling.inputs)
        weight = load_tile(weight_ref, output, column, tiling.inputs)
        x = load_tile(x_ref, token, column, tiling.inputs)
        a, b = (weight, x) if tiling.weight_first else (x, weight)
        precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
        contracted = ((1,), (1,)), ((), ())
        return total + jax.lax.dot_general(a, b, contracted, precision=precision, preferred_element_type=sum_dtype)

    shape = (tiling.outputs, tiling.tokens) if tiling.weight_first else (tiling.tokens, tiling.outputs)
    total = jax.lax.fori_loop(0, trips, add, jnp.zeros(shape, sum_dtype))
    return (total.T if tiling.weight_first else total).astype(jnp.float32), token, output


def store_products(products_ref, token, output, products):
    """In a kernel: store the products of an instance, rounded, for its split."""
    (M, _, outputs), (line, column) = products_ref.shape, tile_indices(token, output)
    at = line, jnp.full(line.shape, pl.program_id(2)), column
    pltriton.store(products_ref.at[at], products.astype(products_ref.dtype), mask=tile_mask(token, M, output, outputs))
