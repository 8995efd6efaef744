"""Codes of four to eight bits as the left operand of Hopper's tensor cores: from shared memory to registers, times their
scales, in bfloat16 (``Weight.multiplied``).

A thread makes four pairs of a word of 32 inputs (``jspec.quantization.codes``), the first two of which are of the first 16
inputs. Each pair of pairs has the operands of its group, which come from numbers of its line: scales, with zeros or offsets,
or the factors and integers of scales of two levels (``jspec.quantization.levels``)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jspec.pallas.matmul.sm90_copy_scales import INTEGER, CopyScales, times_added
from jspec.pallas.matmul.sm90_registers import (
    MULTIPLIED,
    PRODUCT,
    Tile,
    in_registers,
    instruction,
    kept_word,
    of_line,
    unpacked,
)
from jspec.pallas.weights.table_codes import word_of, words_of
from jspec.pallas.weights.unpack import DIFFERENCES, INT8_PAIRS_TIMES, twice, word_of_codes
from jspec.quantization.codes import BLOCK, HALF, SHARING
from jspec.quantization.formats import Format
from jspec.quantization.tables import TABLES

_WORD = 2 * PRODUCT  # inputs of a word


def load_codes(weight, first: int, parts: Sequence[Any], scales: CopyScales):
    """In a kernel: 64 inputs of ``weight`` as ``Weight.multiplied`` has them, divided by ``CODE_SHRINK``; bfloat16
    ``[outputs, 64]`` in registers. Those of a table are also multiplied by its ``factor``.

    Args:
      weight: a ref in shared memory, uint8 or int8 ``[outputs, bytes]``, of a multiple of 64 outputs; of four and eight
        bits with ``transforms``.
      first: the first of the inputs of a copy, a multiple of 64.
      parts: what the copy has of each line, as ``CopyScales.prepared`` has it.
      scales: says how.
    """
    form, groups = scales.form, scales.groups_of(first)

    def fill(ref, by_core, *by_line):
        rows = Tile(ref) if form.bits not in SHARING else _Rows(ref)
        for lines, half in np.ndindex(by_core.shape[0], 2):
            of_group = scales.of_line([of_line(part, lines, half) for part in by_line])
            operands = [_operands(form, of_group(group), group % 4) for group in groups]
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
            table = TABLES[form.table]
            return word_of(table, in_operands=True), [word, *map(kept_word, words_of(table).values())]
        return (DIFFERENCES if form.zeros else word_of_codes(4, 0)), [word]
    block, place = divmod(first, BLOCK)
    start, sharing = block * form.block_bytes, SHARING[form.bits]
    chunk, part = place // _WORD, place // _WORD % sharing
    other = start + HALF + PRODUCT * (chunk // sharing)
    words = [load(rows.at(at, lines, half)) for at in (start + PRODUCT * chunk, other)]
    return word_of_codes(form.bits, part), words


def _operands(form: Format, words: Sequence[Any], byte: int) -> list[Any]:
    """The operands of the instructions for codes of one group of a line: 2^133 times the scale, of codes of four bits 2^129
    times it, and what is added; each twice in a word and divided by ``CODE_SHRINK``.

    Args:
      words: as ``CopyScales.of_line`` has them.
      byte: which of a word's integers are the group's, of levels.
    """
    table = TABLES[form.table] if form.table else None
    if table is not None and not table.integers:
        return list(words)
    if form.zeros:
        return [words[1], words[0]]
    if form.levels:
        low, added = _of_levels(form, words, byte)
    elif form.offsets:
        low, added = words
    else:
        low, added = words[0], instruction("mul.rn.bf16x2", words[0], _constant(times_added(form) * 2.0**-133))
    if form.bits != 4 or table is not None:
        return [low, added]
    return [low, instruction("mul.rn.bf16x2", low, _constant(2.0**-4)), added]


def _of_levels(form: Format, words: Sequence[Any], byte: int) -> tuple[Any, Any]:
    """An integer below 128 and 128 more is a bfloat16 with these bits behind those of 128. One with a sign and 128 more,
    moved to the lowest bits, is 2^-133 of that."""
    digits = f"0x4{byte}4{byte}"
    if form.offsets:
        *factors, scales, offsets = words
        lanes = [instruction("prmt.b32", integers, kept_word(0x43434343), digits) for integers in (scales, offsets)]
        low, added = (instruction("fma.rn.bf16x2", lanes[i], factors[2 * i], factors[2 * i + 1]) for i in range(2))
        return low, added
    *factors, integers = words
    bytes_ = arith.xori(integers, mgpu.c(-0x7F7F7F80, integers.type))
    lanes = instruction("prmt.b32", bytes_, mgpu.c(0, integers.type), digits)
    small = instruction("fma.rn.bf16x2", lanes, _constant(2.0**113), _constant(-INTEGER * 2.0**-20))
    low, added = (instruction("mul.rn.bf16x2", small, factor) for factor in factors)
    return low, added


def _constant(number: float):
    """A bfloat16 number twice in a word."""
    bits = np.uint32(int(twice(number), 16)).astype(np.int32)
    return mgpu.c(int(bits), ir.IntegerType.get_signless(32))


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
