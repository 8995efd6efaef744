"""A tiny GGUF file with many types of tensors, and mutations of it: seeded changes of bytes in its header or its tensors."""

from collections.abc import Iterator

import numpy as np

MIXED = {"hidden": 256, "width": 256, "kv_heads": 1, "vocabulary": 64}
KINDS = {
    "token_embd": "Q4_K",
    "attn_q": "Q4_0",
    "attn_k": "Q5_0",
    "attn_v": "Q6_K",
    "attn_output": "MXFP4",
    "ffn_gate": "Q5_K",
    "ffn_up": "IQ4_XS",
    "ffn_down": "F16",
}
MORE_KINDS = {
    "token_embd": "Q8_0",
    "attn_q": "BF16",
    "attn_k": "Q4_1",
    "attn_v": "Q5_1",
    "attn_output": "IQ3_S",
    "ffn_gate": "Q2_K",
    "ffn_up": "Q3_K",
    "ffn_down": "IQ4_NL",
}


NUMBERS = [0, 1, 2, 3, 5, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 0x7F800000, 0x7FC00000, 0x3F800000]


def mutations(data: bytes, header: int, count: int, seed: int) -> Iterator[bytes]:
    """``count`` mutated copies of a file of which the first ``header`` bytes are its header."""
    for number in range(count):
        rng = np.random.default_rng((seed, number))
        low, high = (0, header) if rng.random() < 0.6 else (header, len(data))
        changed = bytearray(data)
        first, second = np.sort(rng.integers(low, high, 2)).tolist()
        length = int(rng.integers(1, 32))
        match int(rng.integers(7)):
            case 0:
                changed[first] ^= 1 << int(rng.integers(8))
            case 1:
                for at in rng.integers(low, high, length).tolist():
                    changed[at] = int(rng.integers(256))
            case 2:
                changed[first:first] = rng.bytes(length)
            case 3:
                del changed[first : first + length]
            case 4:
                one, other = changed[first : first + length], changed[second : second + length]
                changed[first : first + len(one)], changed[second : second + len(other)] = other, one
            case 5:
                changed[first : first + length] = bytes([int(rng.choice([0, 127, 255]))]) * length
            case _:  # a number, in place of another where it hits one
                changed[first : first + 4] = int(rng.choice(NUMBERS)).to_bytes(4, "little")
        yield bytes(changed)
