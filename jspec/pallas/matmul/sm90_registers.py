"""Weights of eight and of four bits as the left operand of Hopper's tensor cores: from shared memory to registers, in
bfloat16.

Tensor cores multiply 16 inputs at once, and of each line a thread has the pairs i and 4 + i of these, i = 0 .. 3. In eight
bits a pair is two bytes. A warp reads the pairs i of eight lines at once, and the swizzle puts these eight bytes of each
line into other banks of shared memory. Codes of four bits are stored in the order in which a thread needs them
(``jspec.quantization.codes``): four bytes of 32 inputs."""

import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jspec.pallas.weights.unpack import (
    FP8,
    FP8_PAIRS,
    FP8_PAIRS_TIMES,
    INT8,
    INT8_PAIRS,
    NVFP4_WORDS,
    numbers_of_e2m1,
    numbers_of_e4m3,
    to_mma_order,
)
from jspec.quantization import nvfp4
from jspec.quantization.codes import unpack_codes

_LINES, _CORE = 64, 8  # of the left operand; of a core matrix, of which a thread has a pair of inputs
PRODUCT = 16  # inputs that are multiplied at once, and the bytes that a swizzle moves together
MULTIPLIED = 64  # inputs whose numbers are multiplied by their scales together: four scales of NVFP4, two of MXFP8
_MXFP8_GROUP = 32
PER_LINE = plgpu.Layout.WGMMA.reduce(1)  # the layout of one number for each line of a left operand
_TILE = 128  # the most bytes of a line that are side by side in shared memory


def transforms(line_bytes: int) -> tuple:
    """How bytes of weights ``[outputs, line_bytes]`` lie in shared memory, for ``load_bfloat16`` and codes of four bits."""
    width = min(line_bytes, _TILE)
    return plgpu.TilingTransform((_CORE, width)), plgpu.SwizzleTransform(width)


def load_bfloat16(weight, first: int, inputs: int, ordered: bool = False):
    """In a kernel: the numbers of some inputs of ``weight`` divided by ``SHRINK``, bfloat16 ``[outputs, inputs]`` in
    registers.

    Args:
      weight: a ref in shared memory with ``transforms``, int8 or float8_e4m3fn, of a multiple of 64 outputs.
      first: the first of the inputs, and
      inputs: how many there are; both are multiples of 16, or of 64 if ``ordered``.
      ordered: whether the inputs come in the order of ``to_mma_order``: a thread reads 16 bytes of a line at once.
    """
    read = _read_ordered if ordered else _read_pairs
    is_int8 = weight.dtype == jnp.int8

    def fill(ref, by_core):
        read(ref, by_core, first, is_int8)

    return in_registers(weight, inputs, fill)


def load_nvfp4(weight, first: int, scales):
    """In a kernel: the numbers of 64 inputs of ``weight`` in NVFP4, times their scales and divided by ``SHRINK``, bfloat16
    ``[outputs, 64]`` in registers.

    Args:
      weight: a ref in shared memory with ``transforms``, uint8 ``[outputs, bytes]``, of a multiple of 64 outputs.
      first: the first of the inputs, a multiple of 64.
      scales: int32 ``[outputs]`` in the layout of one number for each line: the bits of the four scales, the first lowest.
    """

    def fill(ref, by_core, scales):
        _read_nvfp4(ref, by_core, first, scales)

    return in_registers(weight, MULTIPLIED, fill, scales)


def load_mxfp8(weight, first: int, scales):
    """In a kernel: the numbers of 64 inputs of ``weight`` in MXFP8, times their scales, bfloat16 ``[outputs, 64]`` in
    registers.

    Args:
      weight: as for ``load_bfloat16``.
      first: the first of the inputs, a multiple of 64.
      scales: int32 ``[outputs]`` as for ``load_nvfp4``, those of the 128 inputs of which these are a half.
    """

    def fill(ref, by_core, scales):
        _read_pairs(ref, by_core, first, False, scales)

    return in_registers(weight, MULTIPLIED, fill, scales)


def in_registers(weight, inputs: int, fill, *by_line, transformed: bool = True):
    """A left operand ``[outputs, inputs]`` of bfloat16, whose registers ``fill(ref, registers, *by_line)`` makes.

    The axes of ``registers`` are 64 lines, products, the two core matrices of a product, and the two lines of a thread.
    ``by_line`` has a number for each line. ``transformed`` says whether the ref has ``transforms``."""
    lines = weight.shape[0]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms(weight.shape[1]) if transformed else ()), *(PER_LINE for _ in by_line)),
        return_type=plgpu.ShapeDtypeStruct((lines, inputs), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def load(_, ref, *by_line):
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((lines, inputs)), dtype=object)
        fill(ref, registers.reshape(lines // _LINES, inputs // PRODUCT, 2, 2), *by_line)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(weight, *by_line)  # pyright: ignore[reportCallIssue]  # jax passes the context


def store_transposed(y, sums):
    """In a kernel: store ``sums`` ``[64, tokens]`` of float32 in shared memory as ``y`` ``[tokens, 64]``, line by line.

    jax stores numbers of 16 bits so, and no others."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_, ref, sums):
        i32, i8, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8), ir.F32Type.get()
        (pitch, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(128, i32))
        warp, lane = arith.divui(thread, mgpu.c(32, i32)), arith.remui(thread, mgpu.c(32, i32))
        line = arith.addi(arith.muli(warp, mgpu.c(16, i32)), arith.divui(lane, mgpu.c(4, i32)))
        token = arith.muli(arith.remui(lane, mgpu.c(4, i32)), mgpu.c(2, i32))
        own = arith.muli(arith.addi(arith.muli(token, mgpu.c(pitch, i32)), line), mgpu.c(4, i32))
        base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [own], i8)
        by_core = sums.registers.reshape(-1, 2)  # the last axis is the two lines
        for core, half in np.ndindex(*by_core.shape):
            for i in range(2):
                number = vector.extract(by_core[core, half], [], [i])
                assert number.type == f32, number.type
                offset = 4 * ((_CORE * core + i) * pitch + _CORE * half)
                llvm.store(number, mgpu.utils.getelementptr(base, [offset], i8), alignment=4)

    store(y, sums)  # pyright: ignore[reportCallIssue]  # jax passes the context


def rounded_times(sums, number: float, by_line=None):
    """In a kernel: float32 ``sums`` ``[outputs, tokens]`` in the layout of tensor cores times a number, and times one of
    each line; rounded, whatever is done with it: a compiler may make one instruction, which rounds once, of a product and a
    sum."""
    by = () if by_line is None else (by_line,)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, *(PER_LINE for _ in by)),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def multiply(_, sums, *by_line):
        f32 = ir.F32Type.get()
        registers = np.empty(sums.registers.shape, dtype=object)
        by_core, results = (of.reshape(sums.shape[0] // _LINES, -1, 2) for of in (sums.registers, registers))
        for lines, half in np.ndindex(by_core.shape[0], 2):
            factor = mgpu.c(number, f32)
            factor = arith.mulf(factor, of_line(by_line[0], lines, half)) if by_line else factor
            for core in range(by_core.shape[1]):
                pair = by_core[lines, core, half]
                for i in range(2):
                    factors = [vector.extract(pair, [], [i]), factor]
                    product: Any = llvm.inline_asm(f32, factors, "mul.rn.f32 $0, $1, $2;", "=f,f,f")
                    pair = vector.insert(product, pair, [], [i])
                results[lines, core, half] = pair
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return multiply(sums, *by)  # pyright: ignore[reportCallIssue]  # jax passes the context


def numbers_of_nvfp4(weight, inputs: int, scales):
    """Numbers ``[outputs, inputs]`` in bfloat16 as ``load_nvfp4`` would give them, but not divided: for interpreters.
    ``scales`` are those of ``load_nvfp4``, one word after the other."""
    scale = jnp.stack([word >> 8 * i & 255 for word in scales for i in range(4)], axis=1)
    factors = jnp.repeat(numbers_of_e4m3(scale), nvfp4.GROUP, axis=1)[:, :inputs]
    return (numbers_of_e2m1(unpack_codes(weight, inputs)) * factors).astype(jnp.bfloat16)


def numbers_of_mxfp8(weight, inputs: int, scales):
    """Numbers ``[outputs, inputs]`` in bfloat16 as ``load_mxfp8`` would give them: for interpreters. ``scales`` are those of
    ``load_mxfp8``, of each 64 inputs."""
    scale = jnp.stack([word >> 8 * i & 255 for word in scales[::2] for i in range(4)], axis=1)
    factors = jnp.repeat(jnp.exp2(scale.astype(jnp.float32) - 127), _MXFP8_GROUP, axis=1)[:, :inputs]
    return (weight.astype(jnp.float32) * factors).astype(jnp.bfloat16)


def in_order(weight, ordered: bool):
    """Numbers ``[outputs, inputs]`` in bfloat16 as ``load_bfloat16`` would give them, but not divided: for interpreters."""
    return to_mma_order(weight.astype(jnp.bfloat16)) if ordered else weight.astype(jnp.bfloat16)


def _read_pairs(ref, by_core, first: int, is_int8: bool, scales=None):
    """Fill the registers of a thread: for each line and product, it reads two pairs of inputs. FP8 numbers may have
    ``scales`` of MXFP8."""
    i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    shared, asm = Tile(ref), INT8_PAIRS if is_int8 else FP8_PAIRS
    pair, factors = arith.muli(shared.quarter, mgpu.c(2, i32)), {}
    if scales is not None:
        asm, places = FP8_PAIRS_TIMES, {(first + i * PRODUCT) // _MXFP8_GROUP for i in range(by_core.shape[1])}
        factors = {at: _factor(scales, *at) for at in itertools.product(range(by_core.shape[0]), range(2), places)}
    for product in range(by_core.shape[1]):
        base = shared.piece(first // PRODUCT + product, pair)
        for lines, half in np.ndindex(by_core.shape[0], 2):
            pieces = [
                arith.extui(i32, llvm.load(i16, shared.at(base, lines, half, core * _CORE), alignment=2))
                for core in range(2)
            ]
            group = (first + product * PRODUCT) // _MXFP8_GROUP
            factor = () if scales is None else (factors[lines, half, group],)
            by_core[lines, product, :, half] = unpacked(asm, *pieces, *factor)


def _read_ordered(ref, by_core, first: int, is_int8: bool):
    """Fill the registers of a thread: of each line, it reads 16 bytes for four products."""
    i32, zero = ir.IntegerType.get_signless(32), mgpu.c(0, ir.IntegerType.get_signless(32))
    shared, asm, words = Tile(ref), INT8 if is_int8 else FP8, ir.VectorType.get((4,), i32)
    for column in range(by_core.shape[1] // 4):
        base = shared.piece(first // PRODUCT + 4 * column, zero, shared.quarter)
        for lines, half in np.ndindex(by_core.shape[0], 2):
            read = llvm.load(words, shared.at(base, lines, half), alignment=PRODUCT)
            for product in range(4):
                by_core[lines, 4 * column + product, :, half] = unpacked(asm, vector.extract(read, [], [product]))


def _read_nvfp4(ref, by_core, first: int, scales):
    """Fill the registers of a thread by two words of each line and the word of their scales."""
    i32 = ir.IntegerType.get_signless(32)
    shared = Tile(ref)
    byte = arith.muli(shared.quarter, mgpu.c(4, i32))
    for word, asm in enumerate(NVFP4_WORDS):
        base = shared.piece(first // (2 * PRODUCT) + word, byte)
        for lines, half in np.ndindex(by_core.shape[0], 2):
            code = llvm.load(i32, shared.at(base, lines, half), alignment=4)
            pairs = unpacked(asm, code, of_line(scales, lines, half), count=4)
            by_core[lines, 2 * word : 2 * word + 2, :, half] = np.array(pairs, dtype=object).reshape(2, 2)


def of_line(numbers, lines: int, half: int):
    """The number of a line of the thread."""
    number = numbers.registers.reshape(-1, 2)[lines, half]
    return vector.extract(number, [], [0]) if isinstance(number.type, ir.VectorType) else number


def per_line(make, *by_line, count: int = 1) -> list[Any]:
    """In a kernel: ``count`` words for each line, int32 ``[outputs]`` as ``by_line`` are, of what these have of the line."""
    outputs = by_line[0].shape

    @plgpu.inline_mgpu(
        arg_types=tuple(PER_LINE for _ in by_line),
        return_type=[plgpu.ShapeDtypeStruct(outputs, jnp.int32, layout=PER_LINE)] * count,
    )
    def words(_, *by_line):
        return lines_of(outputs[0], lambda lines, half: make(*(of_line(numbers, lines, half) for numbers in by_line)))

    return words(*by_line)  # pyright: ignore[reportCallIssue, reportReturnType]  # jax passes the context


def lines_of(outputs: int, make) -> list[Any]:
    """The arrays of a kernel ``[outputs]`` that have the words ``make(lines, half)`` of each line of a thread."""
    layout, single = mgpu.WGMMA_LAYOUT.reduce((1,)), ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    made = {at: make(*at) for at in np.ndindex(outputs // _LINES, 2)}
    arrays = []
    for i in range(len(next(iter(made.values())))):
        registers = np.empty(layout.registers_shape((outputs,)), dtype=object)
        for at, words in made.items():
            registers.reshape(-1, 2)[at] = vector.broadcast(single, words[i])
        arrays.append(mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True))
    return arrays


def _factor(scales, lines: int, half: int, group: int):
    """2^120 times the scale of a group of a line of the thread, twice in a word."""
    i32 = ir.IntegerType.get_signless(32)
    scale = arith.shrui(of_line(scales, lines, half), mgpu.c(8 * (group % 4), i32))
    twice_scale = arith.muli(
        arith.andi(scale, mgpu.c(255, i32)), mgpu.c(0x00800080, i32)
    )  # each in the exponent's bits
    return arith.addi(twice_scale, mgpu.c(120 * 0x00800080, i32))


def twice_in_word(number, by: float):
    """A float32 times a power of two, rounded to bfloat16, twice in a word."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    scaled = arith.mulf(number, mgpu.c(by, f32))
    return llvm.inline_asm(i32, [scaled], "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,f")


def instruction(name: str, *operands):
    """The result of one instruction on words, of which those that are strings stand in its text."""
    i32, words = ir.IntegerType.get_signless(32), [one for one in operands if not isinstance(one, str)]
    places = iter(range(1, len(words) + 1))
    text = ", ".join(one if isinstance(one, str) else f"${next(places)}" for one in operands)
    return llvm.inline_asm(i32, words, f"{name} $0, {text};", ",".join(["=r", *["r"] * len(words)]))


def kept_word(number: int):
    """A word that stays in a register.

    Of a number that it knows, ptxas would make a copy for each instruction. It does not know that there is one layer of
    blocks alone, whose number is 0."""
    i32 = ir.IntegerType.get_signless(32)
    zero = nvvm.read_ptx_sreg_ctaid_z(results=[i32])
    return arith.addi(zero, mgpu.c(int(np.uint32(number).astype(np.int32)), i32))


class Tile:
    """Where a thread finds its numbers. Thread t of a warp has the lines t / 4 and t / 4 + 8 of the warp's sixteen.

    ``ref`` has tiles of eight lines one after the other, of as many bytes as ``transforms`` says, in pieces of 16 bytes
    whose number in the line is changed by the number of the line."""

    def __init__(self, ref):
        self.i32, self.i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        self.strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        self.width = ir.MemRefType(ref.type).shape[-1]
        self.start = mgpu.utils.memref_ptr(ref)
        thread = arith.remui(mgpu.thread_idx(), self._c(128))
        lane = arith.remui(thread, self._c(32))
        self.quarter, self.line = arith.remui(lane, self._c(4)), arith.divui(lane, self._c(4))
        tiles = arith.muli(arith.divui(thread, self._c(32)), self._c(2 * self.strides[0]))
        self.own = arith.addi(tiles, arith.muli(self.line, self._c(self.width)))

    def _c(self, number: int):
        return mgpu.c(number, self.i32)

    def piece(self, number: int, byte, further=None):
        """A pointer to a byte of a piece in the first line: piece ``number`` of the line, or ``further`` behind it."""
        tile, inside = divmod(number, self.width // PRODUCT)
        swizzle = self.line if self.width == _TILE else arith.divui(self.line, self._c(_TILE // self.width))
        index = self._c(inside) if further is None else arith.addi(further, self._c(inside))
        moved = arith.muli(arith.xori(index, swizzle), self._c(PRODUCT))
        offset = arith.addi(arith.addi(self.own, byte), arith.addi(moved, self._c(tile * self.strides[1])))
        return mgpu.utils.getelementptr(self.start, [offset], self.i8)

    def at(self, base, lines: int, half: int, byte: int = 0):
        """The same byte, or one behind it, in another line of the thread."""
        offset = (lines * _LINES // _CORE + half) * self.strides[0] + byte
        return mgpu.utils.getelementptr(base, [offset], self.i8)


def unpacked(asm: str, *words, count: int = 2):
    """``count`` pairs of bfloat16, of the bytes of some words."""
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    constraints = ",".join(["=&r"] * count + ["r"] * len(words))  # no result takes the place of a word
    results: Any = llvm.inline_asm(llvm.StructType.get_literal([i32] * count), list(words), asm, constraints)
    single = ir.VectorType.get((1,), i32)
    return [vector.bitcast(pair, vector.broadcast(single, llvm.extractvalue(i32, results, [i]))) for i in range(count)]
