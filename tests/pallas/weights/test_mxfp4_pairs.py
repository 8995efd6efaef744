"""The instructions that unpack weights of four bits on a GPU, carried out in NumPy, against the same without them."""

import ml_dtypes
import numpy as np

from jspec.pallas.weights import mxfp4_pairs
from jspec.quantization.mxfp4_pairs import GROUP, LARGEST_SCALE, factors


def as_two_numbers(word: np.ndarray) -> np.ndarray:
    """bfloat16 ``[n, 2]`` of uint32 ``[n]``, the low half first."""
    return word.view(np.uint16).view(ml_dtypes.bfloat16).reshape(-1, 2)


def carried_out(asm: str, registers: dict[str, np.ndarray], results: int = 2) -> np.ndarray:
    """The pairs of numbers that ``asm`` makes of each word, bfloat16 ``[n, 2 results]``, from words uint32 ``[n]`` in its
    registers."""
    registers = dict(registers)

    def value(operand: str):
        return registers[operand] if operand in registers else np.uint32(int(operand, 0))

    for line in asm.strip(" {}").split(";"):
        name, _, rest = line.strip().partition(" ")
        if not name or name == ".reg":
            continue
        into, *operands = rest.replace(" ", "").split(",")
        registers[into] = _of_instruction(name, *map(value, operands))
    return np.concatenate([as_two_numbers(registers[out]) for out in (f"${i}" for i in range(results))], axis=1)


def _of_instruction(name: str, first: np.ndarray, *others) -> np.ndarray:
    match name:
        case "mov.b32":
            return first
        case "shl.b32":
            return first << others[0]
        case "shr.b32":
            return first >> others[0]
        case "and.b32":
            return first & others[0]
        case "xor.b32":
            return first ^ others[0]
        case "lop3.b32":
            assert others[2] == 0xEA
            return (first & others[0]) | others[1]
        case "prmt.b32":
            return sum(_permuted(first, others[0], int(others[1]) >> 4 * i & 15) << np.uint32(8 * i) for i in range(4))
        case "mul.rn.bf16x2" | "fma.rn.bf16x2":
            x, y, *z = (_as_exact(operand, first.shape) for operand in (first, *others))
            return (x * y + sum(z)).astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)
    raise AssertionError(f"{name} is not known here")


def _as_exact(word, shape) -> np.ndarray:
    """``as_two_numbers`` of words, or of one word repeated, in float64."""
    return as_two_numbers(np.array(np.broadcast_to(word, shape))).astype(np.float64)


def _permuted(first, second, digit: int):
    """The byte of two words that a digit of a permutation names; by 8 more, its sign in all bits."""
    byte = (first if digit & 7 < 4 else second) >> np.uint32(8 * (digit & 3)) & np.uint32(255)
    return byte if digit < 8 else (byte >> np.uint32(7)) * np.uint32(255)


def test_instructions_agree_with_the_definition():
    rng = np.random.default_rng(0)
    byte = rng.integers(256, size=(500, GROUP), dtype=np.uint8)
    scales = rng.integers(3, LARGEST_SCALE + 1, size=(2, 500), dtype=np.uint32)
    pair_factors = factors(*scales)
    words, word_factors = byte.view("<u4").reshape(-1), np.repeat(pair_factors, GROUP // 4)
    for asm, wanted in zip(
        (mxfp4_pairs._FIRST, mxfp4_pairs._SECOND), mxfp4_pairs.dequantize_groups(byte, pair_factors), strict=True
    ):
        actual = carried_out(asm, {"$2": words, "$3": word_factors}).reshape(500, GROUP)
        np.testing.assert_array_equal(actual, np.asarray(wanted))
