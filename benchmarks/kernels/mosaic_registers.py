"""Weights of eight bits as the left operand of Hopper's tensor cores: from shared memory to registers, in bfloat16."""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jspec.pallas.matmul.unpack import FP8, INT8, to_mma_order

ORDER_INPUTS = 64  # inputs that ``to_mma_order`` permutes among each other; four threads read 16 of a line each
_LINES, _CORE = 64, 8  # of the left operand; of a core matrix, of which a thread has a pair of inputs
_READ = 16  # bytes that a thread reads at once


def in_order(weight):
    """Numbers ``[outputs, inputs]`` in bfloat16, as ``load_bfloat16`` would give them, but not divided: for interpreters."""
    return to_mma_order(weight.astype(jnp.bfloat16))


def load_bfloat16(weight):
    """In a kernel: the numbers of ``weight`` divided by ``SHRINK``, bfloat16 ``[outputs, inputs]`` in registers, with the
    inputs in the order of ``to_mma_order``.

    Args:
      weight: a ref in shared memory, int8 or float8_e4m3fn ``[outputs, inputs]``, multiples of 64, line by line.
    """
    asm = INT8 if weight.dtype == jnp.int8 else FP8

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(weight.shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def load(_, ref):
        return _load(ref, asm)

    return load(weight)


def _load(ref, asm: str):
    """The registers of this thread. Thread t of a warp has the lines t / 4 and t / 4 + 8 of the warp's sixteen."""
    outputs, inputs = ir.MemRefType(ref.type).shape
    (pitch, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
    i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    four_words = ir.VectorType.get((4,), i32)

    thread = arith.remui(mgpu.thread_idx(), mgpu.c(128, i32))
    lane = arith.remui(thread, mgpu.c(32, i32))
    line = arith.addi(
        arith.muli(arith.divui(thread, mgpu.c(32, i32)), mgpu.c(16, i32)), arith.divui(lane, mgpu.c(4, i32))
    )
    own = arith.addi(
        arith.muli(line, mgpu.c(pitch, i32)), arith.muli(arith.remui(lane, mgpu.c(4, i32)), mgpu.c(_READ, i32))
    )
    base = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [own], i8)

    layout = mgpu.WGMMA_LAYOUT
    registers = np.empty(layout.registers_shape((outputs, inputs)), dtype=object)
    by_core = registers.reshape(outputs // _LINES, inputs // _CORE, 2)  # the last axis is the two lines
    for tile, column, half in np.ndindex(outputs // _LINES, inputs // ORDER_INPUTS, 2):
        offset = (tile * _LINES + half * _CORE) * pitch + column * ORDER_INPUTS
        words = llvm.load(four_words, mgpu.utils.getelementptr(base, [offset], i8), alignment=_READ)
        for product in range(4):  # of sixteen inputs; a word has a thread's pairs of both core matrices
            word = vector.extract(words, [], [product])
            both = llvm.inline_asm(llvm.StructType.get_literal([i32, i32]), [word], asm, "=r,=r,r")
            for core in range(2):
                number = llvm.extractvalue(i32, both, [core])
                one = vector.broadcast(ir.VectorType.get((1,), i32), number)
                by_core[tile, column * 8 + product * 2 + core, half] = vector.bitcast(pair, one)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)
