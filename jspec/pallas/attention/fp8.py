"""Keys and values in eight bits: how they are rounded when they are written, and how they are read.

A number x with the scale s is stored as the e4m3 number nearest to x / s, which is at most 448, and stands for that
number times s. Every reader multiplies by the stored number, which is exact in bfloat16, and then by the scale in
float32: products of queries and keys by the key's, weights of the softmax, or sums of values, by the value's. So an
attention function never sees a number that was not rounded, whoever wrote it, and when.

There are two kinds of scales. Those of heads come with a checkpoint. A *scale of a token* and head is the least power of
two that leaves all of its numbers within 448; dividing by a power of two changes no digit of a number.

The latent and the rotated key of a token (``jspec.models.mla``) are rounded as the key of a single KV head, with one scale
for both parts. That costs no digits unless one part is thousands of times as large as the other: e4m3 numbers have four
significant bits from 448 down to 2^-6.

What is NaN or infinite is stored as NaN, and so is the scale of its token. A cache holds bytes and not floats, because
XLA widens floats of eight bits in operations that it has no instructions for, and Triton cannot fill what it masks with
one."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import divide, is_interpreted, largest_magnitude

STORED = jnp.uint8  # the bits of float8_e4m3fn
LARGEST = 448
_BITS_OF_LARGEST = 0x43E00000  # of the float32
_BITS_OF_INFINITY = 0x7F800000
_BITS_OF_NAN = 0x7FC00000
_NAN = 0x7F
_LEAST_EXPONENT = 127 - 6  # of normal e4m3 numbers, as float32 has it; smaller ones have the same spacing
_LEAST_SCALE = 127 - 64  # the exponent of the least scale of a token, whose reciprocal no GPU takes for zero


class KVScales(NamedTuple):
    """The scales of keys and of values.

    Attributes:
      k, v: float32 ``[G]``, of heads; or those of tokens, ``[G, pages, P]`` in a pool and ``[G, B, S]`` of rows. Those of
        latents are ``k``, and ``v`` is None.
    """

    k: Any
    v: Any

    @property
    def of_tokens(self) -> bool:
        """Whether each token has scales of its own."""
        return len(self.k.shape) > 1

    @property
    def of_both(self) -> "KVScales":
        """Those of latents as scales of keys and of values, which latents are both."""
        return KVScales(self.k, self.k)


def token_scales(*parts) -> jax.Array:
    """The scale of each token and head, whose numbers come in ``parts`` ``[..., n]``: float32 ``[..., 1]``; in kernels and
    outside. It is NaN if one of the numbers is none, or infinite.

    448 is 1.75 x 2^8. So the scale of a magnitude 1.75 x 2^e is 2^(e - 8), and of the next larger one 2^(e - 7)."""
    peaks = (largest_magnitude(part.astype(jnp.float32), part.ndim - 1) for part in parts)
    bits = functools.reduce(jnp.maximum, (jax.lax.bitcast_convert_type(peak, jnp.int32) for peak in peaks))
    exponent = jnp.maximum((bits + jnp.int32(0x1FFFFF) >> 23) - 8, jnp.int32(_LEAST_SCALE))
    bits = jnp.where(bits >= jnp.int32(_BITS_OF_INFINITY), jnp.int32(_BITS_OF_NAN), exponent << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def encode(quotients) -> jax.Array:
    """The bytes of float32 numbers that were divided by their scales; in kernels and outside.

    The sum of a magnitude and 2^20 times the least power of two in reach of it is spaced like e4m3 numbers around that
    magnitude, so adding rounds it to nearest even; its last bits say how many spacings it has."""
    bits = jax.lax.bitcast_convert_type(quotients, jnp.int32)
    magnitude = bits & jnp.int32(0x7FFFFFFF)
    bounded = jnp.minimum(magnitude, jnp.int32(_BITS_OF_LARGEST))
    exponent = jnp.maximum(bounded >> 23, jnp.int32(_LEAST_EXPONENT))
    spaced = (exponent + 20) << 23
    total = jax.lax.bitcast_convert_type(bounded, jnp.float32) + jax.lax.bitcast_convert_type(spaced, jnp.float32)
    code = ((exponent - _LEAST_EXPONENT) << 3) + jax.lax.bitcast_convert_type(total, jnp.int32) - spaced
    code = jnp.where(magnitude >= jnp.int32(_BITS_OF_INFINITY), jnp.int32(_NAN), code)
    return (code | (bits >> 24 & jnp.int32(0x80))).astype(STORED)


def decode(codes, dtype) -> jax.Array:
    """The e4m3 numbers of bytes, exact in every ``dtype`` of models."""
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(dtype)


def decode_latents(codes, scale, dtype) -> jax.Array:
    """What the bytes of latents ``[..., H]`` stand for, rounded to ``dtype``; ``scale`` broadcasts to ``[...]``."""
    return (decode(codes, jnp.float32) * jnp.broadcast_to(scale, codes.shape[:-1])[..., None]).astype(dtype)


def rounded(x, head_scales) -> tuple[jax.Array, jax.Array | None]:
    """The bytes of keys or values ``[B, T, G, H]``, and the scales of tokens ``[B, T, G]`` if they have some.

    Args:
      x: rotated, in the dtype of the model.
      head_scales: float32 ``[G]``; None takes those of tokens.
    """
    x = x.astype(jnp.float32)
    if head_scales is not None:
        return encode(x / head_scales[None, None, :, None]), None
    scales = token_scales(x)
    return encode(x / scales), scales[..., 0]


def encode_in_kernel(x, scale) -> jax.Array:
    """In a kernel: the bytes of numbers ``x``, of a shape to which their scales were broadcast."""
    return encode(divide(x.astype(jnp.float32), scale))


def decode_in_kernel(codes, dtype, nan: bool = True, as_loaded: bool = False) -> jax.Array:
    """In a kernel: ``decode`` of a tile, four bytes at a time.

    Args:
      codes: the bytes.
      dtype: of the numbers.
      nan: whether NaN stays NaN. If not, it becomes 480, which takes a third fewer instructions; this is for bytes with
        scales of tokens, which are NaN themselves then.
      as_loaded: whether bytes that come from memory become numbers in the layout in which they are loaded.
    """
    if is_interpreted():
        numbers = decode(codes, dtype)
        return numbers if nan else jnp.where(jnp.isnan(numbers), jnp.asarray(480, dtype), numbers)
    operands = [codes]
    if as_loaded:
        # Triton moves a change of layout from the results of an operation with one operand to the operand, and the load
        # then reads byte by byte. It leaves that of an operation with two where it is, and 16 bytes are loaded at once.
        zero = jax.lax.broadcasted_iota(jnp.int32, codes.shape, 1) >> 20  # not a constant, which has any layout
        operands.append(zero.astype(codes.dtype))
    [numbers] = pltriton.elementwise_inline_asm(
        _DECODE if nan else _DECODE_FINITE,
        args=operands,
        constraints="=r,=r" + ",r" * len(operands),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.bfloat16)],
    )
    return numbers.astype(dtype)


# A byte becomes a sign, 0000, four bits of exponent, three of mantissa, 0000: 2^-120 of the number, in bfloat16. A
# permutation (prmt) takes bytes of its first operand by the digits 0 to 3, zero by 4, and by 8 more their sign in all
# bits. NaN is the byte whose last seven bits overflow when 1 is added; its exponent is filled with ones.
_DECODE_FINITE = (
    "{ .reg .b32 a, b, factor, zero; mov.b32 factor, 0x7B807B80; mov.b32 zero, 0x80008000;"
    " prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, $2, 0, 0xB3A2; shl.b32 a, a, 4; shl.b32 b, b, 4;"
    " and.b32 a, a, 0x87F087F0; and.b32 b, b, 0x87F087F0;"
    " fma.rn.bf16x2 $0, a, factor, zero; fma.rn.bf16x2 $1, b, factor, zero; }"
)
_DECODE = (
    "{ .reg .b32 a, b, c, d, nan, factor, zero; mov.b32 factor, 0x7B807B80; mov.b32 zero, 0x80008000;"
    " and.b32 nan, $2, 0x7F7F7F7F; add.u32 nan, nan, 0x01010101;"
    " prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, $2, 0, 0xB3A2; prmt.b32 c, nan, 0, 0x9484; prmt.b32 d, nan, 0, 0xB4A4;"
    " shl.b32 a, a, 4; shl.b32 b, b, 4; lop3.b32 a, a, 0x87F087F0, c, 0xEA; lop3.b32 b, b, 0x87F087F0, d, 0xEA;"
    " fma.rn.bf16x2 $0, a, factor, zero; fma.rn.bf16x2 $1, b, factor, zero; }"
)
