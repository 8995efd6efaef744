"""Codes of four to eight bits as the left operand of Hopper's tensor cores: from shared memory to registers, times their
scales, in bfloat16 (``Weight.multiplied``).

A thread makes four pairs of a word of 32 inputs (``jspec.quantization.codes``), the first two of which are of the first 16
inputs. Each pair of pairs has the operands of its group, which come from numbers of its line: scales, with zeros or offsets,
or the words of scales of two levels (``jspec.quantization.levels``)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jspec.pallas.matmul.sm90_registers import MULTIPLIED, PRODUCT, Tile, in_registers, of_line, twice_in_word, unpacked
from jspec.pallas.weights.table_codes import factors_of, word_of
from jspec.pallas.weights.unpack import CODE_SHRINK, DIFFERENCES, INT8_PAIRS_TIMES, twice, word_of_codes
from jspec.quantization.codes import BLOCK, HALF, SHARING
from jspec.quantization.formats import Format
from jspec.quantization.tables import TABLES

_WORD = 2 * PRODUCT  # inputs of a word
_INTEGER = 128.0  # what is added to integers of eight bits to make bytes of them


class GroupNumbers(NamedTuple):
    """What a group of inputs has of each line, in the layout of one number for each.

    Attributes:
      scale: float32; of levels int32, the word of the numbers.
      beside: the zeros or offsets, float32; of levels int32, the word with the integers of scales; None if there is none.
      offsets: of levels with offsets int32, the word with their integers.
    """

    scale: Any
    beside: Any = None
    offsets: Any = None


def load_codes(weight, first: int, groups: Sequence[GroupNumbers], form: Format):
    """In a kernel: 64 inputs of ``weight`` as ``Weight.multiplied`` has them, divided by ``CODE_SHRINK``; bfloat16
    ``[outputs, 64]`` in registers. Those of a table are also multiplied by its ``factor``.

    Args:
      weight: a ref in shared memory, uint8 or int8 ``[outputs, bytes]``, of a multiple of 64 outputs; of four and eight
        bits with ``transforms``.
      first: the first of the inputs, a multiple of 64.
      groups: those of these inputs, 1, 2 or 4.
      form: of the codes.
    """
    parts = [number for group in groups for number in group if number is not None]
    each, place = (
        len(parts) // len(groups),
        first // MULTIPLIED * len(groups),
    )  # the first group's, among those of a copy

    def fill(ref, by_core, *by_line):
        rows = Tile(ref) if form.bits not in SHARING else _Rows(ref)
        for lines, half in np.ndindex(by_core.shape[0], 2):
            numbers = [of_line(number, lines, half) for number in by_line]
            operands = [
                _operands(form, numbers[i * each : (i + 1) * each], (place + i) % 4) for i in range(len(groups))
            ]
            operands = [operands[i * len(groups) // 4] for i in range(4)]  # of each 16 inputs
            for product in range(4) if form.bits == 8 else ():
                pieces = _pairs(rows, first // PRODUCT + product, lines, half)
                by_core[lines, product, :, half] = unpacked(INT8_PAIRS_TIMES, *pieces, *operands[product])
            if form.bits == 8:
                continue
            for word in range(MULTIPLIED // _WORD):
                own = (*operands[2 * word], *operands[2 * word + 1])
                asm, words = _instructions(form, rows, first + word * _WORD, lines, half)
                pairs = unpacked(asm, *words, *own, count=4)
                by_core[lines, 2 * word : 2 * word + 2, :, half] = np.array(pairs, dtype=object).reshape(2, 2)

    return in_registers(weight, MULTIPLIED, fill, *parts, transformed=form.bits not in SHARING)


def _pairs(rows: Any, product: int, lines: int, half: int) -> list[Any]:
    """Words with the two pairs of bytes that a thread has of 16 inputs of a line."""
    i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    base = rows.piece(product, arith.muli(rows.quarter, mgpu.c(2, i32)))
    at = (rows.at(base, lines, half, byte) for byte in (0, PRODUCT // 2))
    return [arith.extui(i32, llvm.load(i16, pointer, alignment=2)) for pointer in at]


def _instructions(form: Format, rows: Any, first: int, lines: int, half: int) -> tuple[str, list[Any]]:
    """The instructions that make the pairs of a word of a line from ``first`` on, and the words that they need."""
    i32 = ir.IntegerType.get_signless(32)

    def load(at):
        return llvm.load(i32, at, alignment=4)

    if form.bits == 4:
        quarter = arith.muli(rows.quarter, mgpu.c(4, i32))
        word = load(rows.at(rows.piece(first // _WORD, quarter), lines, half))
        if form.table:
            return word_of(TABLES[form.table]), [word]
        return (DIFFERENCES if form.zeros else word_of_codes(4, 0)), [word]
    block, place = divmod(first, BLOCK)
    start, sharing = block * form.block_bytes, SHARING[form.bits]
    chunk, part = place // _WORD, place // _WORD % sharing
    other = start + HALF + PRODUCT * (chunk // sharing)
    words = [load(rows.at(at, lines, half)) for at in (start + PRODUCT * chunk, other)]
    return word_of_codes(form.bits, part), words


def _operands(form: Format, numbers: Sequence[Any], byte: int) -> list[Any]:
    """The operands of the instructions for codes of one group of a line: 2^133 times the scale, of codes of four bits 2^129
    times it, and what is added; each twice in a word and divided by ``CODE_SHRINK``. Integers of levels are that ``byte`` of
    their word."""
    table = TABLES[form.table] if form.table else None
    if table is not None and not table.integers:
        return [twice_in_word(numbers[0], by) for by in factors_of(table)]
    if form.zeros:
        return [twice_in_word(numbers[1], -1 / CODE_SHRINK), twice_in_word(numbers[0], 1.0)]
    middle = -_INTEGER if table is not None or form.bits == 8 else -float(form.middle)
    low, added = _of_levels(form, numbers, byte, middle) if form.levels else _of_floats(form, numbers, middle)
    if form.bits != 4 or table is not None:
        return [low, added]
    return [low, _instruction("mul.rn.bf16x2", low, _constant(2.0**-4)), added]


def _of_floats(form: Format, numbers: Sequence[Any], middle: float) -> tuple[Any, Any]:
    low = twice_in_word(numbers[0], 2.0**133 / CODE_SHRINK)
    if form.offsets:
        return low, twice_in_word(numbers[1], 1 / CODE_SHRINK)
    return low, twice_in_word(numbers[0], middle / CODE_SHRINK)


def _of_levels(form: Format, numbers: Sequence[Any], byte: int, middle: float) -> tuple[Any, Any]:
    """An integer below 128 and 128 more is a bfloat16 with these bits behind those of 128. One with a sign and 128 more,
    moved to the lowest bits, is 2^-133 of that."""
    word, *integers = numbers
    if form.offsets:
        results = []
        for i, (integer, by) in enumerate(zip(integers, (2.0**133, 1.0), strict=True)):
            number = _half_float(word, i)
            factor, less = (twice_in_word(number, by * times / CODE_SHRINK) for times in (1.0, -_INTEGER))
            lanes = _instruction("prmt.b32", integer, mgpu.c(0x43434343, word.type), f"0x4{byte}4{byte}")
            results.append(_instruction("fma.rn.bf16x2", lanes, factor, less))
        return results[0], results[1]
    i32 = word.type
    number = arith.bitcast(ir.F32Type.get(), word)
    bytes_ = arith.xori(integers[0], mgpu.c(-0x7F7F7F80, i32))
    lanes = _instruction("prmt.b32", bytes_, mgpu.c(0, i32), f"0x4{byte}4{byte}")
    small = _instruction("fma.rn.bf16x2", lanes, _constant(2.0**113), _constant(-_INTEGER * 2.0**-20))
    by = (twice_in_word(number, times * 2.0**20 / CODE_SHRINK) for times in (2.0**133, middle))
    return tuple(_instruction("mul.rn.bf16x2", small, factor) for factor in by)  # pyright: ignore[reportReturnType]


def _half_float(word, half: int):
    """The float16 in a half of a word, as float32."""
    i16, f16 = ir.IntegerType.get_signless(16), ir.F16Type.get()
    moved = arith.shrui(word, mgpu.c(16 * half, word.type))
    return arith.extf(ir.F32Type.get(), arith.bitcast(f16, arith.trunci(i16, moved)))


def _constant(number: float):
    """A bfloat16 number twice in a word."""
    bits = np.uint32(int(twice(number), 16)).astype(np.int32)
    return mgpu.c(int(bits), ir.IntegerType.get_signless(32))


def _instruction(name: str, *operands):
    """The result of one instruction on words, of which those that are strings stand in its text."""
    i32, words = ir.IntegerType.get_signless(32), [one for one in operands if not isinstance(one, str)]
    places = iter(range(1, len(words) + 1))
    text = ", ".join(one if isinstance(one, str) else f"${next(places)}" for one in operands)
    return llvm.inline_asm(i32, words, f"{name} $0, {text};", ",".join(["=r", *["r"] * len(words)]))


class _Rows:
    """Where a thread finds its words of rows ``[outputs, bytes]`` without ``transforms``; lines are those of ``Tile``."""

    def __init__(self, ref):
        i32 = ir.IntegerType.get_signless(32)
        (self.pitch, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(128, i32))
        warp, lane = arith.divui(thread, mgpu.c(32, i32)), arith.remui(thread, mgpu.c(32, i32))
        line = arith.addi(arith.muli(warp, mgpu.c(PRODUCT, i32)), arith.divui(lane, mgpu.c(4, i32)))
        quarter = arith.muli(arith.remui(lane, mgpu.c(4, i32)), mgpu.c(4, i32))
        own = arith.addi(arith.muli(line, mgpu.c(self.pitch, i32)), quarter)
        self._start = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [own], ir.IntegerType.get_signless(8))

    def at(self, byte: int, lines: int, half: int):
        """The thread's word from a byte of a row on."""
        offset = (64 * lines + 8 * half) * self.pitch + byte
        return mgpu.utils.getelementptr(self._start, [offset], ir.IntegerType.get_signless(8))
