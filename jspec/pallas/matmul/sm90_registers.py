"""Weights of eight bits as the left operand of Hopper's tensor cores: from shared memory to registers, in bfloat16.

Tensor cores multiply 16 inputs at once, and of each line a thread has the pairs i and 4 + i of these, i = 0 .. 3. In eight
bits a pair is two bytes. A warp reads the pairs i of eight lines at once, and the swizzle puts these eight bytes of each
line into other banks of shared memory."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jspec.pallas.matmul.unpack import FP8, FP8_PAIRS, INT8, INT8_PAIRS, to_mma_order

_LINES, _CORE = 64, 8  # of the left operand; of a core matrix, of which a thread has a pair of inputs
_PRODUCT = 16  # inputs that are multiplied at once, and the bytes that a swizzle moves together
_TILE = 128  # the most bytes of a line that are side by side in shared memory


def transforms(inputs: int) -> tuple:
    """How weights of eight bits ``[outputs, inputs]`` lie in shared memory, for ``load_bfloat16``."""
    width = min(inputs, _TILE)
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
    lines = weight.shape[0]
    read = _read_ordered if ordered else _read_pairs
    is_int8 = weight.dtype == jnp.int8

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(transforms(weight.shape[1])),),
        return_type=plgpu.ShapeDtypeStruct((lines, inputs), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def load(_, ref):
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((lines, inputs)), dtype=object)
        # The last axes are the core matrices of a product, and the two lines of a thread.
        by_core = registers.reshape(lines // _LINES, inputs // _PRODUCT, 2, 2)
        read(ref, by_core, first, is_int8)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return load(weight)  # pyright: ignore[reportCallIssue]  # jax passes the context


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


def in_order(weight, ordered: bool):
    """Numbers ``[outputs, inputs]`` in bfloat16 as ``load_bfloat16`` would give them, but not divided: for interpreters."""
    return to_mma_order(weight.astype(jnp.bfloat16)) if ordered else weight.astype(jnp.bfloat16)


def _read_pairs(ref, by_core, first: int, is_int8: bool):
    """Fill the registers of a thread: for each line and product, it reads two pairs of inputs."""
    i16, i32 = ir.IntegerType.get_signless(16), ir.IntegerType.get_signless(32)
    shared, asm = _Tile(ref), INT8_PAIRS if is_int8 else FP8_PAIRS
    pair = arith.muli(shared.quarter, mgpu.c(2, i32))
    for product in range(by_core.shape[1]):
        base = shared.piece(first // _PRODUCT + product, pair)
        for lines, half in np.ndindex(by_core.shape[0], 2):
            pieces = [
                arith.extui(i32, llvm.load(i16, shared.at(base, lines, half, core * _CORE), alignment=2))
                for core in range(2)
            ]
            by_core[lines, product, :, half] = _unpacked(asm, *pieces)


def _read_ordered(ref, by_core, first: int, is_int8: bool):
    """Fill the registers of a thread: of each line, it reads 16 bytes for four products."""
    i32, zero = ir.IntegerType.get_signless(32), mgpu.c(0, ir.IntegerType.get_signless(32))
    shared, asm, words = _Tile(ref), INT8 if is_int8 else FP8, ir.VectorType.get((4,), i32)
    for column in range(by_core.shape[1] // 4):
        base = shared.piece(first // _PRODUCT + 4 * column, zero, shared.quarter)
        for lines, half in np.ndindex(by_core.shape[0], 2):
            read = llvm.load(words, shared.at(base, lines, half), alignment=_PRODUCT)
            for product in range(4):
                by_core[lines, 4 * column + product, :, half] = _unpacked(asm, vector.extract(read, [], [product]))


class _Tile:
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
        tile, inside = divmod(number, self.width // _PRODUCT)
        swizzle = self.line if self.width == _TILE else arith.divui(self.line, self._c(_TILE // self.width))
        index = self._c(inside) if further is None else arith.addi(further, self._c(inside))
        moved = arith.muli(arith.xori(index, swizzle), self._c(_PRODUCT))
        offset = arith.addi(arith.addi(self.own, byte), arith.addi(moved, self._c(tile * self.strides[1])))
        return mgpu.utils.getelementptr(self.start, [offset], self.i8)

    def at(self, base, lines: int, half: int, byte: int = 0):
        """The same byte, or one behind it, in another line of the thread."""
        offset = (lines * _LINES // _CORE + half) * self.strides[0] + byte
        return mgpu.utils.getelementptr(base, [offset], self.i8)


def _unpacked(asm: str, *words):
    """Two pairs of bfloat16, of the bytes of some words."""
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    both: Any = llvm.inline_asm(llvm.StructType.get_literal([i32, i32]), list(words), asm, "=r,=r" + ",r" * len(words))
    single = ir.VectorType.get((1,), i32)
    return [vector.bitcast(pair, vector.broadcast(single, llvm.extractvalue(i32, both, [i]))) for i in range(2)]
