"""Looks up the numbers of a table (``jspec.quantization.tables``) in registers: codes of four bits become bfloat16.

A permutation (prmt) looks up four codes of three bits at once in eight bytes: it takes the one of its first two operands
that a digit of the third names. A digit has four bits; where the highest is set, the result is the byte's sign in all bits,
which here is 0. So two permutations look up one of sixteen bytes: the lowest three bits of a code among those of codes 8 to
15, and all of its bits among what those of codes 0 to 7 have more. Low bytes are found so; high ones are the same for codes
k and k + 8. Each number, which is 2^-126 of that of the table, is then corrected by a factor."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import is_interpreted
from jspec.pallas.weights.unpack import CODE_SHRINK, twice
from jspec.quantization.tables import Table
from jspec.quantization.weight import rounded_product


def unpack_table(table: Table, packed, high: bool, dtype=jnp.bfloat16, scale=None):
    """In a kernel: the numbers of the codes in the low or the high halves of bytes times the table's ``factor``: rounded to
    bfloat16, or in float32, which takes more instructions. With a ``scale``, float32 ``[channels, n]``, they are multiplied
    by that in bfloat16 and divided by ``CODE_SHRINK``.

    Args:
      table: of the codes.
      packed: uint8 ``[channels, n]``.
      high: which halves.
      dtype: of the result.
    """
    if is_interpreted() or dtype != jnp.bfloat16:
        numbers = numbers_of(table, packed >> 4 if high else packed & 15, dtype)
        return numbers if scale is None else rounded_product(numbers, scale / CODE_SHRINK).astype(dtype)
    factors = () if scale is None else ((scale * (2.0**126 / CODE_SHRINK)).astype(jnp.bfloat16),)
    [unpacked] = pltriton.elementwise_inline_asm(
        halves(table, scale is not None)[high],
        args=[packed, *factors],
        constraints="=r,=r,r" + ",r,r" * len(factors),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(packed.shape, jnp.bfloat16)],
    )
    return unpacked


def numbers_of(table: Table, code, dtype=jnp.bfloat16):
    """In a kernel or outside: the same of codes, one by one, because a kernel has no arrays to look them up in."""
    wide = table.values() * np.float32(table.factor)
    numbers = (table.multiples if dtype == jnp.bfloat16 else wide).tolist()
    code = code.astype(jnp.int32)
    chosen = jnp.full(code.shape, numbers[0], jnp.float32)
    for i, number in enumerate(numbers[1:], 1):
        chosen = jnp.where(code == i, number, chosen)
    return chosen.astype(dtype)


@functools.cache
def halves(table: Table, scaled: bool = False) -> tuple[str, str]:
    """Instructions that make two pairs, $0 and $1, of the low halves of the four bytes of $2, and those for high halves;
    if they are ``scaled``, $3 and $4 are 2^126 times the scales of the pairs."""
    factors = ("$3", "$4") if scaled else ("factor", "factor")
    low, high = (
        f"{move} and.b32 digits, digits, 0x0F0F0F0F; shr.b32 part, digits, 4; or.b32 digits, digits, part;"
        f" prmt.b32 digits, digits, 0, 0x4420; {_looked_up('$0', '$1', '0x5140', '0x7362', factors)}"
        for move in ("mov.b32 digits, $2;", "shr.b32 digits, $2, 4;")
    )
    return _with_table(table, low), _with_table(table, high)


@functools.cache
def word_of(table: Table) -> str:
    """Instructions that make four pairs of $4, a word of ``jspec.quantization.codes``, each of four bits and those 16 bits
    above: their numbers times a scale, which $5 is 2^126 times."""
    both = (
        f"prmt.b32 digits, $4, 0, {bytes_of}; {_looked_up(f'${i}', f'${i + 1}', '0x6240', '0x7351')}"
        for i, bytes_of in ((0, "0x4420"), (2, "0x4431"))
    )
    return _with_table(table, " ".join(both), factor="$5")


def _looked_up(first: str, second: str, bytes_of_first: str, bytes_of_second: str, factors=("factor", "factor")) -> str:
    """Instructions that make two pairs of the four codes in ``digits``."""
    both = ((first, bytes_of_first), (second, bytes_of_second))
    pairs = (
        f"prmt.b32 {pair}, low, high, {of}; mul.rn.bf16x2 {pair}, {pair}, {factor};"
        for (pair, of), factor in zip(both, factors, strict=True)
    )
    return (
        "and.b32 part, digits, 0x7777; prmt.b32 high, high0, high1, part; prmt.b32 low, low0, low1, part;"
        " prmt.b32 part, more0, more1, digits; add.u32 low, low, part; " + " ".join(pairs)
    )


def _with_table(table: Table, instructions: str, factor: str = twice(2.0**126)) -> str:
    """``instructions`` after those that put the table into registers, and what numbers are multiplied by."""
    bits = table.bits
    more = bits[:8] - bits[8:]
    assert (more < 128).all(), table.name
    parts = {"low": bits[8:] & 255, "more": more, "high": bits[8:] >> 8}
    words = {
        f"{name}{i}": np.ascontiguousarray(part[4 * i :][:4].astype(np.uint8)).view("<u4")[0]
        for name, part in parts.items()
        for i in (0, 1)
    }
    moves = " ".join(f"mov.b32 {name}, 0x{word:08X};" for name, word in words.items())
    names = ", ".join((*words, "digits", "part", "low", "high", "factor"))
    return f"{{ .reg .b32 {names}; {moves} mov.b32 factor, {factor}; {instructions} }}"
