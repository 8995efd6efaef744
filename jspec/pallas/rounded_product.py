"""Products of rounded tokens with weights of int8: integers all the way, which no conversion holds up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.expert_tiles import grid
from jspec.pallas.flash import SMALLEST, each
from jspec.pallas.narrow_product import inside, load_tile
from jspec.pallas.rounding import Rounded
from jspec.pallas.triton import block_ids, kernel_call

_PROGRAMS = 120  # parts are made until there are so many programs, about one for each multiprocessor
_FEWEST_TRIPS = 4  # of a program that has a part
MOST_TOKENS = 512  # that the kernel is for; XLA's product of more tokens is as fast


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
    def of(cls, tokens: int, outputs: int, inputs: int, in_parts: bool = False) -> "Tiling":
        """The tiling for ``tokens`` and a weight ``[outputs, inputs]``. It has several parts only with ``in_parts``."""
        of_tokens = 64 if tokens > 128 else max(SMALLEST, pl.next_power_of_2(tokens))
        tiles = pl.cdiv(tokens, of_tokens)
        if tiles * pl.cdiv(outputs, 128) >= (200 if tokens > 64 else _PROGRAMS):
            deep = of_tokens <= 32
            return cls(128, of_tokens, 256 if deep else 128, 4 if deep else 8, 3 if deep or tokens > 64 else 4, True)
        one = cls(64, of_tokens, 256 if tokens <= 64 else 128, 4, 5 if tokens <= 64 else 4, True)
        # A program of few outputs, which has at least 64 tokens, reads all of x for them.
        few = cls(32, max(of_tokens, 64), 256, 4, 6 if of_tokens <= 64 else 4, False)
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


def rounded_product(x: Rounded, weight, scale, in_parts: bool = False) -> jax.Array:
    """``rounded_product_reference``, and on an NVIDIA GPU the kernel, if it is for so many tokens.

    With ``in_parts`` results may be in parts, as many as the kernel's tiling has: ``[..., Y, out]``."""
    tokens = x.numbers.size // x.shape[-1]
    if tokens > MOST_TOKENS:
        return rounded_product_reference(x, weight, scale)
    tiling = Tiling.of(tokens, weight.shape[0], weight.shape[1], in_parts)
    kernel = functools.partial(rounded_product_kernel, tiling=tiling)
    step = tiling.step(x.shape[-1]) if tiling.parts > 1 else None
    return by_platform(kernel, functools.partial(rounded_product_reference, step=step), x, weight, scale)


def rounded_product_reference(x: Rounded, weight, scale, step: int | None = None) -> jax.Array:
    """The linear map ``[..., in], [out, in] -> [..., out]`` of rounded tokens, in the dtype that they had.

    Integers are added up in int32, which is exact for up to 132,104 inputs. Each sum is multiplied by the scales of its
    token and of its output channel in float32, and rounded once.

    Args:
      x: the tokens.
      weight: int8 ``[out, in]``.
      scale: float32 ``[out]``.
      step: how many inputs make a part of the results, ``[..., Y, out]``. Their sum is the result, but each part is rounded.
    """
    if step is not None:
        cuts = [slice(begin, begin + step) for begin in range(0, x.shape[-1], step)]
        some = (dataclasses.replace(x, numbers=x.numbers[..., cut]) for cut in cuts)
        parts = [rounded_product_reference(one, weight[:, cut], scale) for one, cut in zip(some, cuts, strict=True)]
        return jnp.stack(parts, axis=-2)
    sums = _integer_product(x.numbers.reshape(-1, x.shape[-1]), weight).astype(jnp.float32)
    scaled = sums * x.scale.reshape(-1, 1) * scale[None]
    return scaled.astype(x.dtype).reshape(*x.shape[:-1], len(weight))


def _integer_product(a, b):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def rounded_product_kernel(x: Rounded, weight, scale, *, tiling: Tiling | None = None, interpret=False) -> jax.Array:
    """``rounded_product_reference`` as a kernel, in parts if its tiling has several."""
    numbers = x.numbers.reshape(-1, x.shape[-1])
    (M, inputs), outputs = numbers.shape, weight.shape[0]
    tiling = tiling or Tiling.of(M, outputs, inputs)
    products = kernel_call(
        _rounded_product,
        *(numbers, x.scale.reshape(M), weight, scale),
        # Programs that read the same weights for other tokens run side by side, and find them in the L2 cache.
        grid=(pl.cdiv(M, tiling.tokens), pl.cdiv(outputs, tiling.outputs), tiling.parts),
        out_shape=jax.ShapeDtypeStruct((M, tiling.parts, outputs), x.dtype),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
    )
    return products.reshape(*x.shape[:-1], *((tiling.parts,) if tiling.parts > 1 else ()), outputs)


def _rounded_product(numbers_ref, x_scale_ref, weight_ref, scale_ref, products_ref, *, tiling: Tiling):
    (M, inputs), outputs = numbers_ref.shape, weight_ref.shape[0]
    token, output = block_ids(pl.program_id(0), tiling.tokens), block_ids(pl.program_id(1), tiling.outputs)
    part, trips = pl.program_id(2), pl.cdiv(pl.cdiv(inputs, tiling.inputs), tiling.parts)

    def add(i, total):
        column = block_ids(part * trips + i, tiling.inputs)
        weight = load_tile(weight_ref, output, column, tiling.inputs)
        x = load_tile(numbers_ref, token, column, tiling.inputs)
        return total + (_integer_product(weight, x) if tiling.weight_first else _integer_product(x, weight))

    shape = (tiling.outputs, tiling.tokens) if tiling.weight_first else (tiling.tokens, tiling.outputs)
    total = jax.lax.fori_loop(0, trips, add, jnp.zeros(shape, jnp.int32))
    sums = (total.T if tiling.weight_first else total).astype(jnp.float32)
    sums *= each(pltriton.load(x_scale_ref.at[token], mask=token < M, other=0.0), tiling.outputs)
    of_output = pltriton.load(scale_ref.at[output], mask=output < outputs, other=0.0)
    products = (sums * jnp.broadcast_to(of_output[None], sums.shape)).astype(products_ref.dtype)
    row, column = grid(token, output)
    at = row, jnp.full(row.shape, part), column
    pltriton.store(products_ref.at[at], products, mask=inside(token, M, output, outputs))
