"""The instructions that unpack weights on a GPU, carried out in NumPy."""

import ml_dtypes
import numpy as np


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
        case "or.b32":
            return first | others[0]
        case "add.u32":
            return first + others[0]
        case "xor.b32":
            return first ^ others[0]
        case "lop3.b32":
            assert others[2] == 0xEA
            return (first & others[0]) | others[1]
        case "prmt.b32":
            digits = (others[1] >> np.uint32(4 * i) & np.uint32(15) for i in range(4))
            return sum(_permuted(first, others[0], digit) << np.uint32(8 * i) for i, digit in enumerate(digits))
        case "mul.rn.bf16x2" | "fma.rn.bf16x2":
            x, y, *z = (_as_exact(operand, first.shape) for operand in (first, *others))
            return (x * y + sum(z)).astype(ml_dtypes.bfloat16).view(np.uint32).reshape(-1)
    raise AssertionError(f"{name} is not known here")


def _as_exact(word, shape) -> np.ndarray:
    """``as_two_numbers`` of words, or of one word repeated, in float64."""
    return as_two_numbers(np.array(np.broadcast_to(word, shape))).astype(np.float64)


def _permuted(first, second, digit):
    """The byte of two words that a digit of a permutation names; by 8 more, its sign in all bits."""
    chosen = np.where(digit & np.uint32(7) < 4, first, second)
    byte = chosen >> np.uint32(8) * (digit & np.uint32(3)) & np.uint32(255)
    return np.where(digit < 8, byte, (byte >> np.uint32(7)) * np.uint32(255))
