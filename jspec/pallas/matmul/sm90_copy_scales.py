"""The scales of codes in a copy of inputs: how a warpgroup reads them from global memory, and which are a group's.

Four threads multiply inputs of the same line. Where the scales of a copy are whole words that lie together, each of the four
reads other words of the line, and has those of the others by shuffles: reading scale by scale, threads would ask for the
same few bytes many times, and wait for that more than for the codes."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jspec.pallas.matmul.sm90_registers import (
    MULTIPLIED,
    PER_LINE,
    PRODUCT,
    instruction,
    lines_of,
    per_line,
    twice_in_word,
)
from jspec.pallas.weights.table_codes import factors_of
from jspec.pallas.weights.unpack import CODE_SHRINK
from jspec.quantization.formats import SUPER, Format
from jspec.quantization.tables import TABLES
from jspec.quantization.weight import Weight

INTEGER = 128.0  # what is added to integers of eight bits to make bytes of them
_THREADS = 4  # that have the same line
_WORD = 4  # bytes, and integers of levels


class CopyScales(NamedTuple):
    """How a warpgroup has the scales of a copy of inputs.

    Attributes:
      form: of the weight.
      inputs: of a copy, 128 or 256 where groups of them have scales.
      in_words: whether four threads share the words of a line. If not, each has all numbers as float32.
    """

    form: Format
    inputs: int
    in_words: bool

    @property
    def groups(self) -> int:
        """How many groups a copy has, or is a part of."""
        return max(self.inputs // (self.form.group or self.inputs), 1)

    @property
    def numbers(self) -> int:
        """Of a group: its scale, and its zero or offset."""
        return 1 + (self.form.zeros or self.form.offsets)

    @property
    def words(self) -> int:
        """How many words the numbers of a copy are; 0 if threads cannot share them: they are no whole words, or pairs of
        words."""
        size = jnp.dtype(self.form.scale).itemsize
        words, rest = divmod(self.groups * self.numbers * size, _WORD)
        return 0 if rest or not self.form.group or self.numbers * size > _WORD else words

    @property
    def groups_of_super(self) -> int:
        """Of levels, how many groups share their numbers."""
        return SUPER // (self.form.group or SUPER)

    @property
    def places(self) -> list[int]:
        """Of levels, where the words with integers of a copy's groups are, behind the first of them."""
        own, all_words = self.groups // _WORD, self.groups_of_super // _WORD
        return [i * all_words + word for i in range(self.numbers) for word in range(own)]

    def groups_of(self, first: int) -> range:
        """Which groups of a copy 64 inputs belong to, from ``first`` on."""
        each = max(self.groups * MULTIPLIED // self.inputs, 1)
        start = first * self.groups // self.inputs
        return range(start, start + each)

    def of_line(self, numbers: Sequence[Any]) -> Callable[[int], list[Any]]:
        """In a kernel: a function that gives the words of a group of a copy: of its scale, and of its zero or offset.

        They are bfloat16 twice, times ``first_factors``; of levels those that ``numbers`` begin with, and then the words
        that have the integers of the scale and of the offset.

        Args:
          numbers: what a thread has of the line; words as ``prepared`` has them.
        """
        if not self.in_words:
            each, by = self.numbers, first_factors(self.form)
            return lambda group: list(map(twice_in_word, numbers[group * each : (group + 1) * each], by))
        count = len(self.places) if self.form.levels else self.words
        split = len(numbers) - -(-count // _THREADS)
        factors, own = list(numbers[:split]), numbers[split:]

        @functools.cache
        def word(i: int):
            return own[0] if count == 1 else _of_thread(own[i // _THREADS], i % _THREADS)

        def of_group(group: int) -> list[Any]:
            if self.form.levels:
                return [*factors, *(word(i * self.groups // _WORD + group // _WORD) for i in range(self.numbers))]
            which = range(group * self.numbers, (group + 1) * self.numbers)
            if jnp.dtype(self.form.scale).itemsize == _WORD:
                return [word(i) for i in which]
            return [_half_twice(word(i // 2), i % 2) for i in which]

        return of_group

    def prepared(self, words: list[Any]) -> list[Any]:
        """In a kernel: what all inputs of a copy need of its words. Numbers become bfloat16 times ``first_factors``, both
        halves of a word or a float32 twice; of levels the first word becomes ``level_factors``."""
        if self.form.levels:
            return [*level_factors(words[0], self.form), *words[1:]]
        if not self.in_words:
            return words
        by = first_factors(self.form)

        def of_word(word) -> list[Any]:
            if self.form.scale == "float32":
                return [twice_in_word(_float_of(word, "float32"), by[0])]
            low, high = (_scaled(_float_of(word, self.form.scale, half), by[half % len(by)]) for half in range(2))
            return [llvm.inline_asm(word.type, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f")]

        return [per_line(of_word, word)[0] for word in words]


def first_factors(form: Format) -> tuple[float, ...]:
    """What the numbers of a group are multiplied by in an instruction's operands: its scale, and its zero or offset."""
    if form.table:
        return factors_of(TABLES[form.table])[:1]
    if form.zeros:
        return 1.0, -1 / CODE_SHRINK
    return (2.0**133 / CODE_SHRINK, 1 / CODE_SHRINK) if form.offsets else (2.0**133 / CODE_SHRINK,)


def level_factors(word, form: Format) -> list[Any]:
    """In a kernel: what multiplies integers of levels, and what is added, of the word with their numbers: int32
    ``[outputs]`` each, in the layout of one number for each line, as that is.

    With offsets, the factor and what is added of scales and then those of offsets. Without, the factors of scales and of
    what is added to products."""

    def of_word(word) -> list[Any]:
        if form.offsets:
            numbers = [_float_of(word, "float16", half) for half in range(2)]
            return [
                twice_in_word(number, by * times)
                for number, by in zip(numbers, (2.0**133 / CODE_SHRINK, 1 / CODE_SHRINK), strict=True)
                for times in (1.0, -INTEGER)
            ]
        number = _float_of(word, "float32")
        return [twice_in_word(number, times * 2.0**20 / CODE_SHRINK) for times in (2.0**133, times_added(form))]

    return per_line(of_word, word, count=4 if form.offsets else 2)


def times_added(form: Format) -> float:
    """How often the scale is added to products where groups have no offsets."""
    return -INTEGER if form.table or form.bits == 8 else -float(form.middle)


def scale_words(weight: Weight, inputs: int) -> Weight:
    """The same weight in codes, whose scales are words, int32 ``[out, words]``, if those of every copy of ``inputs`` are;
    of levels ``[out, supers, words]``."""
    form = weight.form
    assert form is not None
    if form.levels:
        return dataclasses.replace(weight, scale=lax.bitcast_convert_type(weight.scale, jnp.int32))
    line = weight.scale.size // weight.shape[0] * weight.scale.dtype.itemsize
    if not CopyScales(form, inputs, True).words or line % _WORD:
        return weight
    scale = weight.scale.reshape(weight.shape[0], line // _WORD, -1)
    words = lax.bitcast_convert_type(scale, jnp.int32).reshape(scale.shape[:2])
    return dataclasses.replace(weight, scale=words)


def load_words(ref, places: Sequence[int]) -> list[Any]:
    """In a kernel: int32 ``[outputs]`` in the layout of one number for each line, of which the four threads of a line have
    other words: those at ``places`` of the line, one after the other.

    Args:
      ref: int32 ``[outputs, words]`` in global memory.
      places: of words.
    """
    outputs = ref.shape[0]
    count = -(-len(places) // _THREADS)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=[plgpu.ShapeDtypeStruct((outputs,), jnp.int32, layout=PER_LINE)] * count,
    )
    def load(_, ref):
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        (pitch, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(128, i32))
        warp, lane = arith.divui(thread, mgpu.c(32, i32)), arith.remui(thread, mgpu.c(32, i32))
        line = arith.addi(arith.muli(warp, mgpu.c(PRODUCT, i32)), arith.divui(lane, mgpu.c(_THREADS, i32)))
        quarter, start = arith.remui(lane, mgpu.c(_THREADS, i32)), mgpu.utils.memref_ptr(ref)

        def own(first: int):
            """The thread's place among up to four."""
            place = mgpu.c(places[first], i32)
            for i, other in enumerate(places[first + 1 : first + _THREADS], 1):
                is_own = arith.cmpi(arith.CmpIPredicate.eq, quarter, mgpu.c(i, i32))
                place = arith.select(is_own, mgpu.c(other, i32), place)
            return arith.addi(arith.muli(line, mgpu.c(pitch, i32)), place)

        bases = [arith.muli(own(_THREADS * i), mgpu.c(_WORD, i32)) for i in range(count)]

        def of_line(lines: int, half: int) -> list[Any]:
            offset = mgpu.c(_WORD * pitch * (64 * lines + 8 * half), i32)
            at = (mgpu.utils.getelementptr(start, [arith.addi(base, offset)], i8) for base in bases)
            return [llvm.load(i32, pointer, alignment=_WORD) for pointer in at]

        return lines_of(outputs, of_line)

    return load(ref)  # pyright: ignore[reportCallIssue, reportReturnType]  # jax passes the context


def _float_of(word, dtype: str, half: int = 0):
    """The number in a half of a word, or of float32 in the whole of it, as float32."""
    f32, i16 = ir.F32Type.get(), ir.IntegerType.get_signless(16)
    if dtype == "float32":
        return arith.bitcast(f32, word)
    if dtype == "bfloat16":
        moved = arith.andi(word, mgpu.c(-0x10000, word.type)) if half else arith.shli(word, mgpu.c(16, word.type))
        return arith.bitcast(f32, moved)
    assert dtype == "float16", dtype
    bits = arith.trunci(i16, arith.shrui(word, mgpu.c(16 * half, word.type)))
    return arith.extf(f32, arith.bitcast(ir.F16Type.get(), bits))


def _scaled(number, by: float):
    return arith.mulf(number, mgpu.c(by, ir.F32Type.get()))


def _half_twice(word, half: int):
    """A half of a word in both halves of another."""
    return instruction("prmt.b32", word, mgpu.c(0, word.type), ("0x1010", "0x3232")[half])


def _of_thread(word, thread: int):
    """The word that one of the four threads of a line has."""
    return llvm.inline_asm(
        word.type, [word], f"shfl.sync.idx.b32 $0, $1, {thread}, 0x1c1f, 0xffffffff;", "=r,r", has_side_effects=True
    )
