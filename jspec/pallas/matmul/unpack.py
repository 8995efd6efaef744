"""Weights of eight or of four bits as the numbers of bfloat16 that tensor cores multiply, inside kernels and outside.

The lowest 256 numbers of bfloat16 from 0 on, subnormal ones included, are equally spaced: as bits, an integer n below 256 is
n times 2^-133. So the bits of a weight need only be moved to their place. One instruction then makes up for that, for two
numbers at once, by a factor, and also subtracts 128 or 8. Some factors would be too large for bfloat16, so a kernel divides
all of its numbers by ``SHRINK``, and multiplies its sums by that. A power of two changes no rounding.

Codes of four bits are those of ``jspec.quantization.int4``."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import is_interpreted
from jspec.quantization.int4 import HALF, ZERO

TOGETHER = 64  # inputs that are put in order together
SHRINK = 2.0**20
LARGEST_SCALE = 2**19  # of four bits: the magnitudes below it have factors


def in_order(tile):
    """In a kernel: the inputs of a tile ``[rows, inputs]`` in another order, the same for each 64 of them.

    Both operands of a product may have their inputs in another order. Of 16 inputs that tensor cores multiply at once, a
    thread has the pairs i and 4 + i of the left operand, i = 0 .. 3. In this order those of four such products are 16 inputs
    side by side, which it reads at once from shared memory, and not in pairs."""
    rows, inputs = tile.shape
    parts = tile.reshape(
        rows, inputs // TOGETHER, 4, 4, 2, 2
    )  # threads, products, pairs of a thread in a product, a pair
    return parts.transpose(0, 1, 3, 4, 2, 5).reshape(rows, inputs)


def places(inputs: int, step: int, ordered: bool):
    """In a kernel: where inputs are that are read 64 at a time, of which the first are ``step`` apart, int32 ``[inputs]``.

    If ``ordered``, those of each 64 are in the order of ``in_order``. The compiler sees that two of them lie side by side,
    but only if it finds every quotient to be one of numbers that count up."""
    number = jnp.arange(inputs, dtype=jnp.int32)
    first = _quotient(number, TOGETHER) * step
    if not ordered:
        return first + _rest(number, TOGETHER)
    thread, product = _rest(_quotient(number, 2), 4), _rest(_quotient(number, 16), 4)
    return first + (16 * thread + 4 * product + 2 * _rest(_quotient(number, 8), 2)) + _rest(number, 2)


def _quotient(x, y: int):
    return jax.lax.div(x, jnp.int32(y))


def _rest(x, y: int):
    return jax.lax.rem(x, jnp.int32(y))


def of_eight_bits(tile):
    """In a kernel: numbers of int8 or float8_e4m3fn, divided by ``SHRINK``, in bfloat16. NaN becomes 480."""
    if is_interpreted():
        return (tile.astype(jnp.float32) / SHRINK).astype(jnp.bfloat16)
    return _made(INT8 if tile.dtype == jnp.int8 else FP8, tile)


def of_four_bits(packed, scale):
    """In a kernel: the numbers of the low halves of bytes and those of the high halves, divided by ``SHRINK``, in bfloat16.

    Each is (code - 8) times its scale, rounded once.

    Args:
      packed: uint8 ``[rows, 64 groups]``.
      scale: bfloat16 ``[rows, groups]``, of magnitudes below ``LARGEST_SCALE``.
    """
    rows, groups = scale.shape

    def every(x):  # [rows, groups] -> [rows, 64 groups]
        return jnp.broadcast_to(x[:, :, None], (rows, groups, HALF)).reshape(rows, groups * HALF)

    if is_interpreted():
        numbers = (code.astype(jnp.float32) - ZERO for code in (packed & 15, packed >> 4))
        scales = every(scale.astype(jnp.float32)) / SHRINK
        return [(number * scales).astype(jnp.bfloat16) for number in numbers]
    factor = every(scale * jnp.asarray(2.0**129 / SHRINK, jnp.bfloat16))  # a code is moved to bit 4
    zero = every(scale * jnp.asarray(-ZERO / SHRINK, jnp.bfloat16))
    return [_made(asm, packed, factor, zero) for asm in (LOW, HIGH)]


def _made(asm: str, tile, *numbers):
    """In a kernel: what instructions make of four bytes of ``tile``, and of the four of each of ``numbers`` beside them."""
    [made] = pltriton.elementwise_inline_asm(
        asm,
        args=[tile, *numbers],
        constraints=",".join(["=r", "=r", "r", *["r", "r"] * len(numbers)]),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(tile.shape, jnp.bfloat16)],
    )
    return made


def _twice(number: float) -> str:
    """Two times the bits of a number of bfloat16."""
    return f"0x{2 * np.array(number, ml_dtypes.bfloat16).tobytes()[::-1].hex()}"


# $0 and $1 are two numbers of bfloat16 each, made of the four bytes of $2. A permutation (prmt) takes bytes of its first
# operand by the digits 0 to 3, zero by 4, and by 8 more their sign in all bits.
_TWO_AND_TWO = "prmt.b32 a, bytes, 0, 0x4140; prmt.b32 b, bytes, 0, 0x4342;"
INT8 = (  # n + 128 is moved to bit 0
    f"{{ .reg .b32 bytes, a, b, factor, zero; mov.b32 factor, {_twice(2.0**133 / SHRINK)};"
    f" mov.b32 zero, {_twice(-128 / SHRINK)}; xor.b32 bytes, $2, 0x80808080; {_TWO_AND_TWO}"
    " fma.rn.bf16x2 $0, a, factor, zero; fma.rn.bf16x2 $1, b, factor, zero; }"
)
FP8 = (  # becomes a sign, 0000, four bits of exponent, three of mantissa, 0000: 2^-120 of the number. -0 changes no sign
    f"{{ .reg .b32 a, b, factor, zero; mov.b32 factor, {_twice(2.0**120 / SHRINK)}; mov.b32 zero, {_twice(-0.0)};"
    " prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, $2, 0, 0xB3A2; shl.b32 a, a, 4; shl.b32 b, b, 4;"
    " and.b32 a, a, 0x87F087F0; and.b32 b, b, 0x87F087F0;"
    " fma.rn.bf16x2 $0, a, factor, zero; fma.rn.bf16x2 $1, b, factor, zero; }"
)
LOW, HIGH = (  # $3 and $4 are factors, and $5 and $6 what is added
    f"{{ .reg .b32 bytes, a, b; {move} and.b32 bytes, bytes, 0xF0F0F0F0; {_TWO_AND_TWO}"
    " fma.rn.bf16x2 $0, a, $3, $5; fma.rn.bf16x2 $1, b, $4, $6; }"
    for move in ("shl.b32 bytes, $2, 4;", "mov.b32 bytes, $2;")
)
