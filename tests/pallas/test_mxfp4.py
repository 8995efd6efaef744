"""The instructions that unpack weights of four bits on a GPU, carried out in NumPy, against the same without them."""

import ml_dtypes
import numpy as np

from jspec.mxfp4 import GROUP, LARGEST_SCALE, factors
from jspec.pallas import mxfp4


def as_two_numbers(word: np.ndarray) -> np.ndarray:
    """bfloat16 ``[n, 2]`` of uint32 ``[n]``, the low half first."""
    return word.view(np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 2)


def carried_out(asm: str, word: np.ndarray, both_factors: np.ndarray) -> np.ndarray:
    """The four numbers that ``asm`` makes of each word, bfloat16 ``[n, 4]``, from uint32 ``[n]`` and ``[n]``."""
    registers = {"$2": word, "$3": both_factors}

    def value(operand: str):
        return registers[operand] if operand in registers else np.uint32(int(operand, 0))

    for line in asm.strip(" {}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        into, *operands = rest.replace(" ", "").split(",")
        first, *others = map(value, operands)
        match name:
            case "mov.b32":
                found = first
            case "shl.b32":
                found = first << others[0]
            case "shr.b32":
                found = first >> others[0]
            case "and.b32":
                found = first & others[0]
            case "lop3.b32":
                assert others[2] == 0xEA
                found = (first & others[0]) | others[1]
            case "prmt.b32":
                picked = [first >> np.uint32(8 * (int(others[1]) >> 4 * i & 3)) & np.uint32(255) for i in range(4)]
                found = sum(byte << np.uint32(8 * i) for i, byte in enumerate(picked))
            case "mul.rn.bf16x2":
                product = as_two_numbers(first).astype(np.float64) * as_two_numbers(others[0]).astype(np.float64)
                found = product.astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)
            case _:
                raise AssertionError(f"{name} is not known here")
        registers[into] = found
    return np.concatenate([as_two_numbers(registers[out]) for out in ("$0", "$1")], axis=1)


def test_the_instructions_make_the_numbers_of_the_definition():
    rng = np.random.default_rng(0)
    byte = rng.integers(256, size=(500, GROUP), dtype=np.uint8)
    scales = rng.integers(3, LARGEST_SCALE + 1, size=(2, 500), dtype=np.uint32)
    both = factors(*scales)
    words, every = byte.view("<u4").reshape(-1), np.repeat(both, GROUP // 4)
    for asm, wanted in zip((mxfp4._FIRST, mxfp4._SECOND), mxfp4.groups(byte, both), strict=True):
        found = carried_out(asm, words, every).reshape(500, GROUP)
        np.testing.assert_array_equal(found, np.asarray(wanted))
