"""Looks up the numbers of a table (``jspec.quantization.tables``) in registers: codes of four bits become bfloat16.

A permutation (prmt) looks up four codes of three bits at once in eight bytes: it takes the one of its first two operands
that a digit of the third names. A digit has four bits; where the highest is set, the result is the byte's sign in all bits,
which here is 0. So two permutations look up one of sixteen bytes: the lowest three bits of a code among those of codes 8 to
15, and all of its bits among what those of codes 0 to 7 have more. Low bytes are found so; high ones are the same for codes
k and k + 8. Each number, which is 2^-126 of that of the table, is then corrected by a factor. Of integers, whose high bytes
are 0, bytes are 128 more, and moved to the lowest bits of a bfloat16 they are 2^-133 of that."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import is_interpreted
from jspec.pallas.weights.unpack import CODE_SHRINK, SHRINK, twice
from jspec.quantization.tables import Table
from jspec.quantization.weight import rounded_product


def unpack_table(table: Table, packed, high: bool, dtype=jnp.bfloat16, scale=None):
    """In a kernel: the numbers of the codes in the low or the high halves of bytes times the table's ``factor``: rounded to
    bfloat16, or in float32, which takes more instructions; divided by ``shrink_of_table``. With a ``scale``, float32
    ``[channels, n]``, they are multiplied by that in bfloat16.

    Args:
      table: of the codes.
      packed: uint8 ``[channels, n]``.
      high: which halves.
      dtype: of the result.
    """
    if is_interpreted() or dtype != jnp.bfloat16:
        numbers = numbers_of(table, packed >> 4 if high else packed & 15, dtype)
        if scale is None:
            return numbers / jnp.asarray(shrink_of_table(table), dtype)
        return rounded_product(numbers, scale / CODE_SHRINK).astype(dtype)
    factors = () if scale is None else tuple((scale * by).astype(jnp.bfloat16) for by in factors_of(table))
    [unpacked] = pltriton.elementwise_inline_asm(
        halves(table, scale is not None)[high],
        args=[packed, *factors],
        constraints=",".join(["=r,=r,r", *["r,r"] * len(factors)]),
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


def shrink_of_table(table: Table, scaled: bool = False) -> float:
    """What the numbers of a table are divided by, times its ``factor`` and perhaps a scale."""
    return CODE_SHRINK if scaled else SHRINK if table.integers else 1.0


def factors_of(table: Table, scaled: bool = True) -> tuple[float, ...]:
    """What numbers that were looked up are multiplied by, and of integers what is added to that; a scale multiplies both."""
    factors = (2.0**133, -128.0) if table.integers else (2.0**126,)
    return tuple(factor / shrink_of_table(table, scaled) for factor in factors)


@functools.cache
def halves(table: Table, scaled: bool = False) -> tuple[str, str]:
    """Instructions that make two pairs, $0 and $1, of the low halves of the four bytes of $2, and those for high halves;
    if they are ``scaled``, $3 and $4 are the first of ``factors_of`` times the scales of the pairs, $5 and $6 the second."""
    by = (("$3", "$4"), ("$5", "$6")) if scaled else (("factor",) * 2, ("added",) * 2)
    low, high = (
        f"{move} and.b32 digits, digits, 0x0F0F0F0F; shr.b32 part, digits, 4; or.b32 digits, digits, part;"
        f" prmt.b32 digits, digits, 0, 0x4420; {_looked_up(table, ('$0', '$1'), ('0x5140', '0x7362'), *by)}"
        for move in ("mov.b32 digits, $2;", "shr.b32 digits, $2, 4;")
    )
    return _with_table(table, low), _with_table(table, high)


@functools.cache
def word_of(table: Table, in_operands: bool = False) -> str:
    """Instructions that make four pairs of $4, a word of ``jspec.quantization.codes``, each of four bits and those 16 bits
    above: their numbers times a scale. $5 and what follows is ``factors_of`` times the scale of the first two pairs, and
    what follows these that of the others. If ``in_operands``, ``words_of`` the table come between."""
    first = 5 + len(words_of(table)) * in_operands
    count, both = len(factors_of(table)), []
    for i, bytes_of in ((0, "0x4420"), (2, "0x4431")):
        by = [(f"${first + i // 2 * count + j}",) * 2 for j in (0, count - 1)]
        looked_up = _looked_up(table, (f"${i}", f"${i + 1}"), ("0x6240", "0x7351"), *by)
        both.append(f"prmt.b32 digits, $4, 0, {bytes_of}; {looked_up}")
    return _with_table(table, " ".join(both), operand=5 if in_operands else None)


def _looked_up(
    table: Table, pairs: tuple[str, str], bytes_of: tuple[str, str], factors: Sequence[str], added: Sequence[str]
) -> str:
    """Instructions that make two ``pairs`` of the four codes in ``digits``, times ``factors``, and of integers plus what is
    ``added``. A pair takes those bytes of low and of high ones."""
    low = (
        "and.b32 part, digits, 0x7777; prmt.b32 low, low0, low1, part; prmt.b32 high, high0, high1, part;"
        " prmt.b32 part, more0, more1, digits; add.u32 low, low, part; "
    )
    if table.integers:
        low = low.replace(" prmt.b32 high, high0, high1, part;", " mov.b32 high, 0;")
        made = "prmt.b32 {0}, low, high, {1}; fma.rn.bf16x2 {0}, {0}, {2}, {3};"
    else:
        made = "prmt.b32 {0}, low, high, {1}; mul.rn.bf16x2 {0}, {0}, {2};"
    return low + " ".join(made.format(*each) for each in zip(pairs, bytes_of, factors, added, strict=True))


def words_of(table: Table) -> dict[str, int]:
    """The words of a table, four bytes each, by the registers in which instructions look them up."""
    bits = np.array(table.numbers).astype(np.uint16) + np.uint16(128) if table.integers else table.bits
    more = bits[:8] - bits[8:]
    assert (more < 128).all(), table.name
    parts = {"low": bits[8:] & 255, "more": more} | ({} if table.integers else {"high": bits[8:] >> 8})
    return {
        f"{name}{i}": int(np.ascontiguousarray(part[4 * i :][:4].astype(np.uint8)).view("<u4")[0])
        for name, part in parts.items()
        for i in (0, 1)
    }


def _with_table(table: Table, instructions: str, operand: int | None = None) -> str:
    """``instructions`` after those that put the table into registers, from operands if the first of them is given, and
    ``factors_of`` it for numbers without a scale."""
    words = words_of(table)
    moves = " ".join(
        f"mov.b32 {name}, {f'0x{word:08X}' if operand is None else f'${operand + i}'};"
        for i, (name, word) in enumerate(words.items())
    )
    by = dict(zip(("factor", "added"), map(twice, factors_of(table, scaled=False)), strict=False))
    moves += "".join(f" mov.b32 {name}, {number};" for name, number in by.items())
    names = ", ".join((*words, "digits", "part", "low", "high", *by))
    return f"{{ .reg .b32 {names}; {moves} {instructions} }}"
