"""What a kernel of few tokens does whose weights stream from memory to the tensor cores as they are stored: its tiling, its
launch, and its sums. ``jspec.pallas.matmul.w8a8`` and ``jspec.pallas.matmul.bf16`` are made of it."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import SMALLEST
from jspec.pallas.matmul.weight_only import inside, load_tile
from jspec.pallas.moe.tiles import grid
from jspec.pallas.triton import block_ids, kernel_call

_PROGRAMS = 120  # parts are made until there are so many programs, about one for each multiprocessor
_FEWEST_TRIPS = 4  # of a program that has a part


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a product is cut up.

    Attributes:
      outputs: output features of a program, a power of two, at least 16.
      tokens: tokens of a program, a power of two, at least 16.
      inputs: input features that a program reads at a time, a power of two, at least 32.
      num_warps: warps of a program.
      num_stages: how many reads are under way at once, and one more.
      weight_first: whether the weight is the left operand, of which four warps multiply 64 rows at once. If not, the tokens
        are, and ``outputs`` may be fewer.
      parts: how many programs share the inputs of the same results. Each of them gives a part of the sums.
    """

    outputs: int
    tokens: int
    inputs: int
    num_warps: int
    num_stages: int
    weight_first: bool
    parts: int = 1

    @classmethod
    def of(cls, tokens: int, outputs: int, inputs: int, in_parts: bool = False, itemsize: int = 1) -> "Tiling":
        """The tiling for ``tokens`` and a weight ``[outputs, inputs]`` of so many bytes a number, in several parts only with
        ``in_parts``."""
        of_tokens = 64 if tokens > 128 else max(SMALLEST, pl.next_power_of_2(tokens))
        tiles = pl.cdiv(tokens, of_tokens)
        if tiles * pl.cdiv(outputs, 128) >= (200 if tokens > 64 else _PROGRAMS):
            deep = of_tokens <= 32
            depth, stages = (256 if deep else 128) // itemsize, 3 if deep or tokens > 64 else 4
            return cls(128, of_tokens, depth, 4 if deep else 8, stages, True)
        one = cls(64, of_tokens, (256 if tokens <= 64 else 128) // itemsize, 4, 5 if tokens <= 64 else 4, True)
        # A program of few outputs, which has at least 64 tokens, reads all of x for them.
        few = cls(32, max(of_tokens, 64), 256 // itemsize, 4, 6 if of_tokens <= 64 else 4, False)
        if in_parts:
            one = few if of_tokens == 64 and tiles == 1 else one
            programs, trips = tiles * pl.cdiv(outputs, one.outputs), pl.cdiv(inputs, one.inputs)
            parts = 1
            while programs * parts < _PROGRAMS and trips % (2 * parts) == 0 and trips // (2 * parts) >= _FEWEST_TRIPS:
                parts *= 2
            return dataclasses.replace(one, parts=parts)
        return few if tiles * pl.cdiv(outputs, 64) < 80 and tokens <= 128 else one

    def step(self, inputs: int) -> int:
        """How many of the inputs belong to a part."""
        return pl.cdiv(pl.cdiv(inputs, self.inputs), self.parts) * self.inputs


def launch(kernel, x, weight, *scales, tiling: Tiling, dtype, interpret: bool) -> jax.Array:
    """What programs of ``kernel(x_ref, weight_ref, *scale_refs, products_ref, tiling=)`` store: ``[M, out]`` of ``dtype``,
    or ``[M, parts, out]`` if the tiling has several parts.

    Args:
      kernel: multiplies by ``sums_of``, and stores by ``store_products``.
      x: ``[M, in]``.
      weight: ``[out, in]`` of the same dtype.
      scales: what else the kernel reads.
    """
    M, outputs = x.shape[0], weight.shape[0]
    products = kernel_call(
        kernel,
        *(x, weight, *scales),
        # Programs that read the same weights for other tokens run side by side, and find them in the L2 cache.
        grid=(pl.cdiv(M, tiling.tokens), pl.cdiv(outputs, tiling.outputs), tiling.parts),
        out_shape=jax.ShapeDtypeStruct((M, tiling.parts, outputs), dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
    )
    return products if tiling.parts > 1 else products[:, 0]


def sums_of(x_ref, weight_ref, tiling: Tiling):
    """In a kernel: the products of a program ``[tokens, outputs]`` in float32, its tokens and its output features. Those of
    integers are added up as integers."""
    token, output = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    trips = pl.cdiv(pl.cdiv(x_ref.shape[1], tiling.inputs), tiling.parts)
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
    """In a kernel: store what a program has for its part, rounded."""
    (M, _, outputs), (row, column) = products_ref.shape, grid(token, output)
    at = row, jnp.full(row.shape, pl.program_id(2)), column
    pltriton.store(products_ref.at[at], products.astype(products_ref.dtype), mask=inside(token, M, output, outputs))
