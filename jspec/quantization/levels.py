"""Scales of two levels: an integer for each group, times a number that the groups of 256 inputs share.

The types of GGUF whose names end with ``_K`` have such scales, and some whose names begin with ``IQ``. Those of 256 inputs
are words side by side, uint32 ``[..., supers, words]``:

| word | |
|---|---|
| 0 | the number, a float32; with offsets two of float16: that of scales in the lower half, that of offsets in the other |
| 1 ... | the integers of scales, int8, four in a word, the first in the lowest bits |
| ... | with offsets their integers, likewise |

A product of an integer and a number is exact in float32. The functions work of arrays of NumPy and of JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.quantization.formats import SUPER, Format


def pack_levels(numbers: np.ndarray, *integers: np.ndarray) -> np.ndarray:
    """The words ``[..., supers, words]`` of scales, and of offsets.

    Args:
      numbers: float16 or float32 ``[..., supers, 1]``; with offsets float16 ``[..., supers, 2]``, of scales and of offsets.
      integers: int8 ``[..., supers, groups]`` of scales, and of offsets.
    """
    first = numbers if len(integers) == 2 else numbers.astype(np.float32)
    parts = (np.ascontiguousarray(part).view(np.uint32) for part in (first, *integers))
    return np.concatenate(list(parts), axis=-1)


def shared_numbers(words: np.ndarray, form: Format) -> np.ndarray:
    """The numbers in words ``[..., supers, words]``: float32 ``[..., supers, 1]``, or with offsets float16 ``[..., 2]``."""
    return np.ascontiguousarray(words[..., :1]).view(np.float16 if form.offsets else np.float32)


def pack_same(scale: float, offset: float, form: Format) -> np.ndarray:
    """The words ``[words]`` of groups of which all have the same scale, and the same offset if they have any."""
    ones = np.ones((1, SUPER // (form.group or SUPER)), np.int8)
    if not form.offsets:
        return pack_levels(np.array([[scale]], np.float32), ones)[0]
    return pack_levels(np.array([[scale, offset]], np.float16), ones, ones)[0]


def unpack_levels(words, form: Format, rounded: bool = False) -> tuple[Any, Any]:
    """The scales of groups, float32 ``[..., groups]``, and their offsets or None, of words ``[..., supers, words]``. If
    ``rounded``, the numbers are rounded to bfloat16 before they are multiplied, as kernels do with codes of few bits."""
    xp: Any = jnp if isinstance(words, jax.Array) else np
    count = (words.shape[-1] - 1) // (1 + form.offsets)
    numbers = [
        words[..., 0] if not form.offsets else (words[..., 0] >> 16 * i).astype(np.uint16)
        for i in range(1 + form.offsets)
    ]

    def values(i: int):
        number = _float_of(numbers[i]).astype(np.float32)
        number = number.astype(jnp.bfloat16).astype(np.float32) if rounded else number
        four = words[..., 1 + i * count : 1 + (i + 1) * count]
        integers = xp.stack([four >> np.uint32(8 * j) for j in range(4)], axis=-1).astype(np.uint8).astype(np.int8)
        products = integers.reshape(*words.shape[:-1], -1).astype(np.float32) * number[..., None]
        return products.reshape(*words.shape[:-2], -1)

    return values(0), values(1) if form.offsets else None


def _float_of(bits):
    """The floats with these bits, of as many bits."""
    kind = {2: np.float16, 4: np.float32}[bits.dtype.itemsize]
    return (
        jax.lax.bitcast_convert_type(bits, kind)
        if isinstance(bits, jax.Array)
        else np.ascontiguousarray(bits).view(kind)
    )
