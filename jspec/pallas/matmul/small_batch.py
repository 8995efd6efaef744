"""Tilings, launch and accumulation of the small-batch matmul kernels in ``jspec.pallas.matmul.w8a8`` and
``jspec.pallas.matmul.bf16``, whose weights reach the tensor cores as they are stored."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import differentiable
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.tiling import MatmulTiling
from jspec.pallas.triton import MMA_SIZE, block_ids, kernel_call, load_tile, tile_indices, tile_mask

_INSTANCES = 120  # split-K makes so many program instances, about one for each multiprocessor
_MIN_TRIPS = 4  # of an instance, with split-K


def small_batch_tiling(
    tokens: int, outputs: int, inputs: int, allow_partial_sums: bool = False, itemsize: int = 1
) -> MatmulTiling:
    """The tiling for ``tokens`` and a weight ``[outputs, inputs]`` of ``itemsize`` bytes a number, with split-K only if
    ``allow_partial_sums``."""
    tile_tokens = 64 if tokens > 128 else max(MMA_SIZE, pl.next_power_of_2(tokens))
    tiles = pl.cdiv(tokens, tile_tokens)
    if tiles * pl.cdiv(outputs, 128) >= (200 if tokens > 64 else _INSTANCES):
        deep = tile_tokens <= 32
        depth, stages = (256 if deep else 128) // itemsize, 3 if deep or tokens > 64 else 4
        return MatmulTiling(128, tile_tokens, depth, 4 if deep else 8, stages)
    large = MatmulTiling(64, tile_tokens, (256 if tokens <= 64 else 128) // itemsize, 4, 5 if tokens <= 64 else 4)
    # An instance of few outputs, which has at least 64 tokens, reads all of x for them.
    small = MatmulTiling(32, max(tile_tokens, 64), 256 // itemsize, 4, 6 if tile_tokens <= 64 else 4, False)
    if allow_partial_sums:
        tiling = small if tile_tokens == 64 and tiles == 1 else large
        instances, trips = tiles * pl.cdiv(outputs, tiling.outputs), pl.cdiv(inputs, tiling.inputs)
        splits = 1
        while instances * splits < _INSTANCES and trips % (2 * splits) == 0 and trips // (2 * splits) >= _MIN_TRIPS:
            splits *= 2
        return dataclasses.replace(tiling, num_splits=splits)
    return small if tiles * pl.cdiv(outputs, 64) < 80 and tokens <= 128 else large


def run_by_platform(
    kernel: Callable, reference: Callable, x, weight, *scale, allow_partial_sums: bool
) -> jax.Array | PartialSums:
    """``kernel(x, weight, *scale, tiling=)`` in a program for an NVIDIA GPU, and in any other ``reference`` with the
    ``split_inputs`` of the same tiling."""
    (outputs, inputs), tokens = weight.shape, math.prod(x.shape[:-1])
    tiling = small_batch_tiling(tokens, outputs, inputs, allow_partial_sums, weight.dtype.itemsize)
    kernel = functools.partial(kernel, tiling=tiling)
    reference = functools.partial(reference, split_inputs=tiling.split_inputs(inputs))
    return differentiable(kernel, reference, x, weight, *scale)


def run_matmul(kernel, x, weight, *scales, tiling: MatmulTiling, dtype, interpret: bool) -> jax.Array | PartialSums:
    """The products ``[..., out]`` of ``dtype`` that ``kernel(x_ref, weight_ref, *scale_refs, products_ref, tiling=)``
    stores, or their partial sums if the tiling has several splits.

    Args:
      kernel: multiplies by ``multiply_tile``, and stores by ``store_products``.
      x: ``[..., in]``.
      weight: ``[out, in]`` of the same dtype.
      scales: further arguments of the kernel, which gets them with a single axis.
    """
    before, tokens, outputs = x.shape[:-1], x.reshape(-1, x.shape[-1]), weight.shape[0]
    products = kernel_call(
        kernel,
        *(tokens, weight, *(scale.reshape(-1) for scale in scales)),
        grid=tiling.grid(len(tokens), outputs),
        out_shape=jax.ShapeDtypeStruct((len(tokens), tiling.num_splits, outputs), dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
    )
    if tiling.num_splits > 1:
        return PartialSums(products.reshape(*before, *products.shape[1:]))
    return products[:, 0].reshape(*before, outputs)


def multiply_tile(x_ref, weight_ref, tiling: MatmulTiling):
    """In a kernel: the products of a program instance ``[tokens, outputs]`` in float32, its tokens and its output
    features. Those of integers are added up as integers."""
    token, output = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    trips = pl.cdiv(pl.cdiv(x_ref.shape[1], tiling.inputs), tiling.num_splits)
    first = pl.program_id(2) * trips
    sum_dtype = jnp.int32 if x_ref.dtype == jnp.int8 else jnp.float32

    def add(i, total):
        column = block_ids(first + i, tiling.inputs)
        weight = load_tile(weight_ref, output, column, tiling.inputs * tiling.num_splits)
        x = load_tile(x_ref, token, column, tiling.inputs * tiling.num_splits)
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
