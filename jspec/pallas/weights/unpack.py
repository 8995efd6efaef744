"""Unpacks weights of eight or of four bits to the bfloat16 numbers that tensor cores multiply, inside kernels and
outside.

The lowest 256 numbers of bfloat16 from 0 on, subnormal ones included, are equally spaced: as bits, an integer n below
256 is n times 2^-133. So the bits of a weight need only be moved to their place. One instruction then corrects this by a
factor, for two numbers at once, and also subtracts 128 or the zero. Some factors would be too large for bfloat16, so a
kernel divides all of its numbers by ``SHRINK``, and multiplies its sums by that. A power of two changes no rounding.

Codes of four bits are those of ``jspec.quantization.codes``. MXFP4 has a divisor of its own, ``MXFP4_SHRINK``: with it, the
least number of the format is the least one of bfloat16, and the factor of its largest scale is a number of bfloat16."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import broadcast_columns, is_interpreted
from jspec.quantization.codes import ZERO

ORDER_INPUTS = 64  # inputs that ``to_mma_order`` permutes among each other
SHRINK = 2.0**20
CODE_SHRINK = 2.0**40  # of codes times their scales, which may be anything from 2^-80 to 2^34
MXFP4_SHRINK = 2.0**5


def to_mma_order(tile):
    """In a kernel: a tile ``[lines, inputs]`` with the inputs of each 64 in the order in which tensor cores read them
    fastest.

    Both operands of a product may have their inputs in another order. Of 16 inputs that tensor cores multiply at once, a
    thread has the pairs i and 4 + i of the left operand, i = 0 .. 3. In this order those of four such products are 16
    inputs side by side, which it reads at once from shared memory, and not in pairs. A tile whose inputs are no whole 64
    stays as it is."""
    lines, inputs = tile.shape
    if inputs % ORDER_INPUTS:
        return tile
    # Threads, products, pairs of a thread in a product, a pair.
    parts = tile.reshape(lines, inputs // ORDER_INPUTS, 4, 4, 2, 2)
    return parts.transpose(0, 1, 3, 4, 2, 5).reshape(lines, inputs)


def place_in_mma_order(i):
    """Where input i of a line is in the order of ``to_mma_order``; int32."""
    return (i >> 6 << 6) + ((i >> 2 & 3) << 4) + ((i >> 1 & 1) << 3) + ((i >> 4 & 3) << 1) + (i & 1)


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


def unpack_mxfp8(tile, scale):
    """In a kernel: float8_e4m3fn numbers times their scales, in bfloat16, exactly, subnormal numbers included.

    Args:
      tile: ``[channels, n]``. NaN becomes 480 times the scale.
      scale: uint8 ``[channels, n / 32]``, at most ``Format.largest_power``, of each 32 inputs.
    """
    # 2^120 times the scale, because the bits of a number, moved to their place, stand for 2^-120 of it.
    factors = jax.lax.bitcast_convert_type((scale.astype(jnp.int32) + 120) << 23, jnp.float32)
    factors = jnp.broadcast_to(factors[:, :, None], (*scale.shape, tile.shape[1] // scale.shape[1])).reshape(tile.shape)
    if is_interpreted():  # with a factor in two parts, of which neither makes a subnormal number
        return (tile.astype(jnp.float32) * 2.0**-60 * (factors * 2.0**-60)).astype(jnp.bfloat16)
    return _unpack(FP8_TIMES, tile, factors.astype(jnp.bfloat16))


def unpack_four_bits(packed, high: bool, zero=None):
    """In a kernel: the codes in the low or the high halves of bytes, less their zero and divided by ``SHRINK``: integers in
    bfloat16, exactly.

    Args:
      packed: uint8 ``[channels, n]``.
      high: which halves, which are of one group.
      zero: bfloat16 ``[channels]``, integers; None for 8.
    """
    if is_interpreted():
        zeros = ZERO if zero is None else broadcast_columns(zero.astype(jnp.float32), packed.shape[1])
        code = packed >> 4 if high else packed & 15
        return ((code.astype(jnp.float32) - zeros) / SHRINK).astype(jnp.bfloat16)
    if zero is None:
        return _unpack(HIGH if high else LOW, packed)
    added = broadcast_columns(zero * jnp.asarray(-1 / SHRINK, jnp.bfloat16), packed.shape[1])
    return _unpack(HIGH_LESS_ZEROS if high else LOW_LESS_ZEROS, packed, added)


def unpack_scaled_codes(packed, high: bool, scale, zero=None):
    """In a kernel: the same times their scales, rounded to bfloat16 once, and divided by ``CODE_SHRINK``. ``scale`` and
    ``zero``, integers or None for 8, are float32 ``[channels, n]``."""
    if is_interpreted():
        code = (packed >> 4 if high else packed & 15).astype(jnp.float32)
        number = (code - (ZERO if zero is None else zero)) * scale.astype(jnp.bfloat16).astype(jnp.float32)
        return (number / CODE_SHRINK).astype(jnp.bfloat16)
    if zero is None:
        factors = ((scale * (by / CODE_SHRINK)).astype(jnp.bfloat16) for by in (2.0**129, -float(ZERO)))
        return _unpack(HIGH_SCALED if high else LOW_SCALED, packed, *factors)
    added = (zero * (-1 / CODE_SHRINK)).astype(jnp.bfloat16)
    return _unpack(HIGH_LESS_ZEROS_SCALED if high else LOW_LESS_ZEROS_SCALED, packed, added, scale.astype(jnp.bfloat16))


def times_plus(number, scale, offset):
    """In a kernel: ``number * scale + offset`` of bfloat16, rounded once."""
    if is_interpreted():
        wide = (x.astype(jnp.float32) for x in (number, scale, offset))
        product = next(wide) * next(wide)
        return (product + next(wide)).astype(jnp.bfloat16)
    [sum_] = pltriton.elementwise_inline_asm(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        args=[number, scale, offset],
        constraints="=r,r,r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(number.shape, jnp.bfloat16)],
    )
    return sum_


def unpack_nvfp4(packed, high: bool, scale):
    """In a kernel: the numbers of the codes in the low or the high halves of bytes, times their scales and divided by
    ``SHRINK``: in bfloat16, exactly.

    Args:
      packed: uint8 ``[channels, n]``, codes of NVFP4.
      high: which halves.
      scale: uint8 ``[channels, n / 8]``, the bits of float8_e4m3fn, none negative, of each 16 inputs.
    """
    scales = numbers_of_e4m3(scale)
    if is_interpreted():
        number = numbers_of_e2m1(packed >> 4 if high else packed & 15) / SHRINK
        return (number * _of_bytes(scales)).astype(jnp.bfloat16)
    factors = _of_bytes((scales * (2.0**126 / SHRINK)).astype(jnp.bfloat16))
    return _unpack(HIGH_E2M1 if high else LOW_E2M1, packed, factors)


def unpack_mxfp4(packed, high: bool, scale):
    """In a kernel: the numbers of the codes in the low or the high halves of bytes, times their scales and divided by
    ``MXFP4_SHRINK``: in bfloat16, exactly, subnormal numbers included.

    Args:
      packed: uint8 ``[channels, n]``, codes of MXFP4 (``jspec.quantization.mxfp4``).
      high: which halves.
      scale: uint8 ``[channels, n / 16]``, at most ``LARGEST_SCALE``, of each 32 inputs.
    """
    # 2^121 times the scale: exponents of floats have the same bias as scales.
    factors = jax.lax.bitcast_convert_type((scale.astype(jnp.int32) + 121) << 23, jnp.float32)
    factors = jnp.broadcast_to(factors[:, :, None], (*scale.shape, 16)).reshape(packed.shape)
    if is_interpreted():  # with the divisor in two parts, of which neither makes a subnormal number
        number = numbers_of_e2m1(packed >> 4 if high else packed & 15)
        return (number * 2.0**-60 * (factors * (2.0**-61 / MXFP4_SHRINK))).astype(jnp.bfloat16)
    return _unpack(HIGH_E2M1 if high else LOW_E2M1, packed, factors.astype(jnp.bfloat16))


def _of_bytes(x):
    """In a kernel: numbers of 16 inputs each, ``[channels, groups]``, for the bytes of their codes ``[channels, 8 groups]``.

    Bytes of two groups alternate (``jspec.quantization.codes``)."""
    channels, groups = x.shape
    pairs = x.reshape(channels, groups // 2, 1, 2)
    return jnp.broadcast_to(pairs, (channels, groups // 2, 8, 2)).reshape(channels, groups * 8)


def numbers_of_e2m1(code):
    """In a kernel or outside: the numbers of codes of NVFP4 and MXFP4, in float32, computed without a table."""
    code = code.astype(jnp.int32)
    magnitude = code & 7
    normal = jnp.exp2((magnitude >> 1) - 1.0) * (1 + 0.5 * (magnitude & 1))
    number = jnp.where(magnitude < 2, magnitude * 0.5, normal)
    return jnp.where(code < 8, number, -number)


def numbers_of_e4m3(bits):
    """In a kernel or outside: the numbers whose bits as float8_e4m3fn these are, none negative, in float32."""
    bits = bits.astype(jnp.int32)
    normal = jax.lax.bitcast_convert_type((bits << 20) + (120 << 23), jnp.float32)
    return jnp.where(bits < 8, bits.astype(jnp.float32) * 2.0**-9, normal)


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


def twice(number: float) -> str:
    """The bits of a bfloat16 number, twice in a word."""
    return f"0x{2 * np.array(number, ml_dtypes.bfloat16).tobytes()[::-1].hex()}"


# $0 and $1 are two numbers of bfloat16 each, made of the four bytes of $2, or of the two low bytes of $2 and of $3. A
# permutation (prmt) takes bytes of its first operand by the digits 0 to 3, of its second or zero by 4 to 7, and by 8 more
# their sign in all bits.
_TWO_AND_TWO = "prmt.b32 a, bytes, 0, 0x4140; prmt.b32 b, bytes, 0, 0x4342;"
INT8, INT8_PAIRS = (  # n + 128 is moved to bit 0
    f"{{ .reg .b32 bytes, a, b, factor, zero; mov.b32 factor, {twice(2.0**133 / SHRINK)};"
    f" mov.b32 zero, {twice(-128 / SHRINK)}; {move} xor.b32 bytes, bytes, 0x80808080; {_TWO_AND_TWO}"
    " fma.rn.bf16x2 $0, a, factor, zero; fma.rn.bf16x2 $1, b, factor, zero; }"
    for move in ("mov.b32 bytes, $2;", "prmt.b32 bytes, $2, $3, 0x5410;")
)
# The same of two pairs times a factor in $4, 2^133 times a scale, and plus $5, -128 times it.
INT8_PAIRS_TIMES = (
    "{ .reg .b32 bytes, a, b; prmt.b32 bytes, $2, $3, 0x5410; xor.b32 bytes, bytes, 0x80808080;"
    f" {_TWO_AND_TWO} fma.rn.bf16x2 $0, a, $4, $5; fma.rn.bf16x2 $1, b, $4, $5; }}"
)
_TWO_OF_FP8, _ONE_AND_ONE_OF_FP8 = (
    # becomes a sign, 0000, four bits of exponent, three of mantissa, 0000: 2^-120 of the number
    f" prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, {second}; shl.b32 a, a, 4; shl.b32 b, b, 4;"
    " and.b32 a, a, 0x87F087F0; and.b32 b, b, 0x87F087F0;"
    for second in ("$2, 0, 0xB3A2", "$3, 0, 0x9180")
)
FP8, FP8_PAIRS = (  # -0 changes no sign
    f"{{ .reg .b32 a, b, factor, zero; mov.b32 factor, {twice(2.0**120 / SHRINK)}; mov.b32 zero, {twice(-0.0)};{move}"
    " fma.rn.bf16x2 $0, a, factor, zero; fma.rn.bf16x2 $1, b, factor, zero; }"
    for move in (_TWO_OF_FP8, _ONE_AND_ONE_OF_FP8)
)
FP8_TIMES, FP8_PAIRS_TIMES = (  # by factors in $3 and $4, or by the one that is twice in $4
    f"{{ .reg .b32 a, b;{move} mul.rn.bf16x2 $0, a, {factor}; mul.rn.bf16x2 $1, b, $4; }}"
    for move, factor in ((_TWO_OF_FP8, "$3"), (_ONE_AND_ONE_OF_FP8, "$4"))
)


def _of_halves(factors: tuple[str, str], added: tuple[str, str], shrink: float, times: tuple[str, ...] = ()):
    """The instructions that make numbers of the low and of the high halves of bytes: a code, moved to bit 4, times one of
    ``factors``, plus one of ``added``, for each of the two pairs; then ``times`` that."""
    low, high = (
        f"{{ .reg .b32 bytes, a, b, factor, zero; mov.b32 factor, {twice(2.0**129 / shrink)};"
        f" mov.b32 zero, {twice(-ZERO / shrink)}; {move} and.b32 bytes, bytes, 0xF0F0F0F0; {_TWO_AND_TWO}"
        f" fma.rn.bf16x2 $0, a, {factors[0]}, {added[0]}; fma.rn.bf16x2 $1, b, {factors[1]}, {added[1]};"
        + "".join(f" mul.rn.bf16x2 ${i}, ${i}, {factor};" for i, factor in enumerate(times))
        + " }"
        for move in ("shl.b32 bytes, $2, 4;", "mov.b32 bytes, $2;")
    )
    return low, high


_FACTOR = "factor", "factor"
LOW, HIGH = _of_halves(_FACTOR, ("zero", "zero"), SHRINK)
LOW_LESS_ZEROS, HIGH_LESS_ZEROS = _of_halves(_FACTOR, ("$3", "$4"), SHRINK)
LOW_SCALED, HIGH_SCALED = _of_halves(("$3", "$4"), ("$5", "$6"), CODE_SHRINK)
LOW_LESS_ZEROS_SCALED, HIGH_LESS_ZEROS_SCALED = _of_halves(_FACTOR, ("$3", "$4"), CODE_SHRINK, ("$5", "$6"))
LOW_E2M1, HIGH_E2M1 = (
    # A code becomes a sign, seven bits of 0, two of exponent, one of mantissa and six of 0: 2^-126 of the number. $3 and $4
    # are factors.
    f"{{ .reg .b32 a, b, sign; {_TWO_AND_TWO.replace('bytes', '$2')}"
    f" shl.b32 sign, a, {to_sign}; shl.b32 a, a, {to_rest}; and.b32 a, a, 0x01C001C0;"
    " lop3.b32 a, sign, 0x80008000, a, 0xea; mul.rn.bf16x2 $0, a, $3;"
    f" shl.b32 sign, b, {to_sign}; shl.b32 b, b, {to_rest}; and.b32 b, b, 0x01C001C0;"
    " lop3.b32 b, sign, 0x80008000, b, 0xea; mul.rn.bf16x2 $1, b, $4; }"
    for to_sign, to_rest in ((12, 6), (8, 2))
)


def _nvfp4_word(first: int) -> str:
    """The instructions that make four pairs of $4, a word of ``jspec.quantization.codes``: those of two times 16 inputs,
    whose scales are the bytes ``first`` and ``first + 1`` of $5.

    The bits of a scale, moved to their place, are 2^-120 of it. Its factor needs two steps, as 2^226 is no bfloat16."""
    steps = [f"mov.b32 widen, {twice(2.0**120)}; mov.b32 shrink, {twice(2.0**126 / SHRINK)};"]
    for name, byte in (("low", first), ("high", first + 1)):
        steps.append(f"prmt.b32 {name}, $5, 0, 0x4{byte}4{byte}; shl.b32 {name}, {name}, 4;")
        steps += [f"mul.rn.bf16x2 {name}, {name}, {by};" for by in ("widen", "shrink")]
    for i, name in enumerate(("low", "low", "high", "high")):
        move = f"shl.b32 rest, $4, {6 - 4 * i};" if i < 2 else f"shr.b32 rest, $4, {4 * i - 6};"
        steps.append(
            f"shl.b32 sign, $4, {12 - 4 * i}; {move} and.b32 rest, rest, 0x01C001C0;"
            f" lop3.b32 rest, sign, 0x80008000, rest, 0xEA; mul.rn.bf16x2 ${i}, rest, {name};"
        )
    return f"{{ .reg .b32 sign, rest, low, high, widen, shrink; {' '.join(steps)} }}"


NVFP4_WORDS = _nvfp4_word(0), _nvfp4_word(2)  # of 64 inputs


def _of_word(pair) -> str:
    """The instructions that make four pairs of $4, a word of ``jspec.quantization.codes``, each of four bits and those 16
    bits above; ``pair(i, code)`` are those of pair i, whose codes are in the lowest bits of both halves of ``code``, or four
    bits higher if i is odd."""
    steps = ["shr.b32 word, $4, 8;"]
    for i, word in enumerate(("$4", "$4", "word", "word")):
        steps += [f"and.b32 code, {word}, {'0x00F000F0' if i % 2 else '0x000F000F'};", pair(i, "code")]
    return f"{{ .reg .b32 code, word, low, high, other; {' '.join(steps)} }}"


@functools.cache
def word_of_codes(bits: int, part: int) -> str:
    """The instructions that make four pairs of $4, times their scales and rounded once. In their places codes are subnormal
    numbers, whose factors are 2^133 times the scale, or 2^129 times where they lie four bits higher.

    Args:
      bits: 4, whose operands are, of the first two pairs and of the others, these factors and what is added: $5 to $7 and $8
        to $10; or 5 or 6, of which $5 is the word with the other bits, and operands are the first factor and what is added.
      part: which of the words that share $5 this one is.
    """

    def pair(i: int, code: str) -> str:
        if bits == 4:
            first = 5 + 3 * (i // 2)
            return f"fma.rn.bf16x2 ${i}, {code}, ${first + i % 2}, ${first + 2};"
        first, shift = 6 + 2 * (i // 2), (4 * part + i) * (bits - 4) - 4
        move = f"shr.b32 other, $5, {shift};" if shift >= 0 else f"shl.b32 other, $5, {-shift};"
        mask = f"0x{0x00010001 * (((1 << bits - 4) - 1) << 4):08X}"
        down = f"shr.b32 {code}, {code}, 4; " * (i % 2)
        joined = f"{move} lop3.b32 {code}, other, {mask}, {code}, 0xEA;"
        return f"{down}{joined} fma.rn.bf16x2 ${i}, {code}, ${first}, ${first + 1};"

    return _of_word(pair)


def _difference(i: int, code: str) -> str:
    first, factor = 5 + 2 * (i // 2), "high" if i % 2 else "low"
    return f"fma.rn.bf16x2 ${i}, {code}, {factor}, ${first}; mul.rn.bf16x2 ${i}, ${i}, ${first + 1};"


# Codes less a zero, exactly, times a scale. Of the first two pairs $5 is the zero's negative divided by ``CODE_SHRINK``, and
# $6 the scale; of the others $7 and $8 are.
DIFFERENCES = _of_word(_difference).replace(
    "shr.b32 word",
    f"mov.b32 low, {twice(2.0**133 / CODE_SHRINK)}; mov.b32 high, {twice(2.0**129 / CODE_SHRINK)}; shr.b32 word",
)
