"""Unpacks MXFP4 weights (``jspec.quantization.mxfp4_pairs``) to bfloat16 inside kernels."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import is_interpreted
from jspec.quantization.unpack_pairs import dequantize_groups


def unpack_groups(byte, factors):
    """In a kernel: ``dequantize_groups`` of pairs of some output features.

    A GPU makes two numbers of bfloat16 at once. It moves the bits of a code to the sign, the lowest two bits of the
    exponent and the highest of the mantissa. There they stand for 2^-126 of the code's number, subnormal numbers
    included. The product with a factor corrects that.

    Args:
      byte: uint8 ``[columns, 32]``.
      factors: uint32 ``[columns]``.
    """
    if is_interpreted():
        return dequantize_groups(byte, factors)
    byte_factors = jnp.broadcast_to(factors[:, None], byte.shape)
    out = [jax.ShapeDtypeStruct(byte.shape, jnp.bfloat16)]
    return [
        pltriton.elementwise_inline_asm(
            asm, args=[byte, byte_factors], constraints="=r,=r,r,r,r,r,r", pack=4, result_shape_dtypes=out
        )[0]
        for asm in (_FIRST, _SECOND)
    ]


def _four_numbers(factor: str, *twos: tuple[str, ...]) -> str:
    """Instructions that make the four numbers of a word that are in one group.

    $0 and $1 are two numbers each, and $2 is the word. $3 to $6 are the factors, the same four times.

    Args:
      factor: the bytes of $3 that are the group's factor, twice.
      twos: instructions that bring the bits of two codes into place: all at once, or first the signs and then the
        magnitudes.
    """
    lines = []
    for out, moves in enumerate(twos):
        lines.append(f"{moves[-1]} and.b32 rest, rest, {0x81C081C0 if len(moves) == 1 else 0x01C001C0};")
        if len(moves) == 2:  # rest = (sign & 0x80008000) | rest
            lines.append(f"{moves[0]} lop3.b32 rest, sign, 0x80008000, rest, 0xea;")
        lines.append(f"mul.rn.bf16x2 ${out}, rest, factor;")
    return f"{{ .reg .b32 sign, rest, factor; prmt.b32 factor, $3, 0, {factor}; {' '.join(lines)} }}"


# The compiler may make a multiplication of a shift to the left, which runs beside the other instructions.
_FIRST = _four_numbers("0x1010", ("mov.b32 rest, $2;",), ("shl.b32 rest, $2, 3;",))
_SECOND = _four_numbers(
    "0x3232",
    ("shl.b32 sign, $2, 1;", "shl.b32 rest, $2, 6;"),
    ("shl.b32 sign, $2, 2;", "shr.b32 rest, $2, 3;"),
)
