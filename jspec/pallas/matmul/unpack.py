"""Unpacks weights of eight or of four bits to the bfloat16 numbers that tensor cores multiply, inside kernels and
outside.

The lowest 256 numbers of bfloat16 from 0 on, subnormal ones included, are equally spaced: as bits, an integer n below
256 is n times 2^-133. So the bits of a weight need only be moved to their place. One instruction then corrects this by a
factor, for two numbers at once, and also subtracts 128 or 8. Some factors would be too large for bfloat16, so a kernel
divides all of its numbers by ``SHRINK``, and multiplies its sums by that. A power of two changes no rounding.

Codes of four bits are those of ``jspec.quantization.int4``."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import is_interpreted
from jspec.quantization.int4 import HALF, ZERO

ORDER_INPUTS = 64  # inputs that ``to_mma_order`` permutes among each other
SHRINK = 2.0**20
LARGEST_SCALE = 2**19  # of four bits: the magnitudes below it have factors


def to_mma_order(tile):
    """In a kernel: a tile ``[lines, inputs]`` with the inputs of each 64 in the order in which tensor cores read them
    fastest.

    Both operands of a product may have their inputs in another order. Of 16 inputs that tensor cores multiply at once, a
    thread has the pairs i and 4 + i of the left operand, i = 0 .. 3. In this order those of four such products are 16
    inputs side by side, which it reads at once from shared memory, and not in pairs."""
    lines, inputs = tile.shape
    parts = tile.reshape(
        lines, inputs // ORDER_INPUTS, 4, 4, 2, 2
    )  # threads, products, pairs of a thread in a product, a pair
    return parts.transpose(0, 1, 3, 4, 2, 5).reshape(lines, inputs)


def input_indices(inputs: int, step: int, ordered: bool):
    """In a kernel: indices of inputs that are read 64 at a time, of which the first are ``step`` apart, int32
    ``[inputs]``.

    If ``ordered``, those of each 64 are in the order of ``to_mma_order``. The compiler sees that two of them lie side by
    side, but only if it finds every quotient to be one of numbers that count up."""
    number = jnp.arange(inputs, dtype=jnp.int32)
    first = _quotient(number, ORDER_INPUTS) * step
    if not ordered:
        return first + _remainder(number, ORDER_INPUTS)
    thread, product = _remainder(_quotient(number, 2), 4), _remainder(_quotient(number, 16), 4)
    return first + (16 * thread + 4 * product + 2 * _remainder(_quotient(number, 8), 2)) + _remainder(number, 2)


def _quotient(x, y: int):
    return jax.lax.div(x, jnp.int32(y))


def _remainder(x, y: int):
    return jax.lax.rem(x, jnp.int32(y))


def unpack_eight_bits(tile):
    """In a kernel: int8 or float8_e4m3fn numbers, divided by ``SHRINK``, in bfloat16. NaN becomes 480."""
    if is_interpreted():
        return (tile.astype(jnp.float32) / SHRINK).astype(jnp.bfloat16)
    return _unpack(INT8 if tile.dtype == jnp.int8 else FP8, tile)


def unpack_four_bits(packed, scale):
    """In a kernel: the numbers of the low halves of bytes and those of the high halves, divided by ``SHRINK``, in
    bfloat16.

    Each is (code - 8) times its scale, rounded once.

    Args:
      packed: uint8 ``[channels, 64 groups]``.
      scale: bfloat16 ``[channels, groups]``, of magnitudes below ``LARGEST_SCALE``.
    """
    channels, groups = scale.shape

    def to_bytes(x):  # [channels, groups] -> [channels, 64 groups]
        return jnp.broadcast_to(x[:, :, None], (channels, groups, HALF)).reshape(channels, groups * HALF)

    if is_interpreted():
        numbers = (code.astype(jnp.float32) - ZERO for code in (packed & 15, packed >> 4))
        scales = to_bytes(scale.astype(jnp.float32)) / SHRINK
        return [(number * scales).astype(jnp.bfloat16) for number in numbers]
    factor = to_bytes(scale * jnp.asarray(2.0**129 / SHRINK, jnp.bfloat16))  # a code is moved to bit 4
    zero = to_bytes(scale * jnp.asarray(-ZERO / SHRINK, jnp.bfloat16))
    return [_unpack(asm, packed, factor, zero) for asm in (LOW, HIGH)]


def _unpack(asm: str, tile, *numbers):
    """In a kernel: the results of instructions on four bytes of ``tile``, and on the four of each of ``numbers`` beside
    them."""
    [unpacked] = pltriton.elementwise_inline_asm(
        asm,
        args=[tile, *numbers],
        constraints=",".join(["=r", "=r", "r", *["r", "r"] * len(numbers)]),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(tile.shape, jnp.bfloat16)],
    )
    return unpacked


def _twice(number: float) -> str:
    """The bits of a bfloat16 number, twice in a word."""
    return f"0x{2 * np.array(number, ml_dtypes.bfloat16).tobytes()[::-1].hex()}"


# $0 and $1 are two numbers of bfloat16 each, made of the four bytes of $2, or of the two low bytes of $2 and of $3. A
# permutation (prmt) takes bytes of its first operand by the digits 0 to 3, of its second or zero by 4 to 7, and by 8 more
# their sign in all bits.
_TWO_AND_TWO = "prmt.b32 a, bytes, 0, 0x4140; prmt.b32 b, bytes, 0, 0x4342;"
INT8, INT8_PAIRS = (  # n + 128 is moved to bit 0
    f"{{ .reg .b32 bytes, a, b, factor, zero; mov.b32 factor, {_twice(2.0**133 / SHRINK)};"
    f" mov.b32 zero, {_twice(-128 / SHRINK)}; {move} xor.b32 bytes, bytes, 0x80808080; {_TWO_AND_TWO}"
    " fma.rn.bf16x2 $0, a, factor, zero; fma.rn.bf16x2 $1, b, factor, zero; }"
    for move in ("mov.b32 bytes, $2;", "prmt.b32 bytes, $2, $3, 0x5410;")
)
FP8, FP8_PAIRS = (
    # becomes a sign, 0000, four bits of exponent, three of mantissa, 0000: 2^-120 of the number. -0 changes no sign
    f"{{ .reg .b32 a, b, factor, zero; mov.b32 factor, {_twice(2.0**120 / SHRINK)}; mov.b32 zero, {_twice(-0.0)};"
    f" prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, {second}; shl.b32 a, a, 4; shl.b32 b, b, 4;"
    " and.b32 a, a, 0x87F087F0; and.b32 b, b, 0x87F087F0;"
    " fma.rn.bf16x2 $0, a, factor, zero; fma.rn.bf16x2 $1, b, factor, zero; }"
    for second in ("$2, 0, 0xB3A2", "$3, 0, 0x9180")
)
LOW, HIGH = (  # $3 and $4 are factors, and $5 and $6 what is added
    f"{{ .reg .b32 bytes, a, b; {move} and.b32 bytes, bytes, 0xF0F0F0F0; {_TWO_AND_TWO}"
    " fma.rn.bf16x2 $0, a, $3, $5; fma.rn.bf16x2 $1, b, $4, $6; }"
    for move in ("shl.b32 bytes, $2, 4;", "mov.b32 bytes, $2;")
)
