"""Weights of four bits: MXFP4 (Open Compute Project, Microscaling Formats, 2023), in which gpt-oss has its experts.

A group of 32 input features shares a power of two. A number is one of 16 multiples of it, which a *code* of four bits
names: a sign, two bits of exponent and one of mantissa (e2m1).

Checkpoints hold in a byte the codes of two neighbours. A kernel would have to interleave the two halves of the bytes that
it unpacks, so jspec keeps the codes in another order: two groups make a *pair*, and byte j of a pair holds the codes of
feature j of its first group (the low four bits) and of feature j of its second. A weight ``[out, in]`` is therefore uint8
``[out, 32 pairs]``, and its scales are uint8 ``[out, 2 pairs]``. Where the number of groups is odd, the last group is
followed by one of zeros. Not a bit of a code or of a scale is changed."""

import jax
import jax.numpy as jnp
import numpy as np

GROUP = 32  # input features that share a scale
PAIR = 2 * GROUP
ONE = 127  # the scale that stands for 2^0
LARGEST_SCALE = 254  # 2^127; the format calls 255 NaN
STD_OF_RANDOM_CODES = 2.93  # of the numbers that equally likely codes stand for


def stored_width(inputs: int) -> int:
    """How many bytes a row of codes has, for so many input features."""
    return -(-inputs // PAIR) * GROUP


def stored_groups(inputs: int) -> int:
    """How many scales a row has, for so many input features."""
    return -(-inputs // PAIR) * 2


def repacked(blocks: np.ndarray) -> np.ndarray:
    """The bytes that jspec keeps, uint8 ``[out, bytes]``, of the blocks of a checkpoint, uint8 ``[out, in / 32, 16]``.

    Byte j of a block holds the codes of input features 2j, in its low four bits, and 2j + 1."""
    padded = np.pad(blocks, ((0, 0), (0, blocks.shape[1] % 2), (0, 0)))
    first, second = padded[:, 0::2], padded[:, 1::2]  # of each pair, [out, pairs, 16]
    bytes_ = np.empty((*first.shape, 2), np.uint8)
    bytes_[..., 0] = first & 15 | second << 4
    bytes_[..., 1] = first >> 4 | second & 240
    return bytes_.reshape(len(blocks), -1)


def values(code):
    """The numbers that codes 0 to 15 stand for, before their scales, in bfloat16: 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0, ...

    Args:
      code: int32 of any shape.
    """
    magnitude = code & 7
    # As bits of a bfloat16, the magnitudes from code 2 on are equally spaced, and 0x3F00 is 0.5.
    bits = jnp.where(magnitude < 2, magnitude * 0x3F00, 0x3F00 + (magnitude << 6)) | (code & 8) << 12
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def powers(scale):
    """What numbers are multiplied by, ``2 ** (scale - 127)`` in bfloat16, for int32 scales up to 254; 0 for scale 0.

    2^-127, which scale 0 stands for, is no normal number, and a GPU may flush it to zero in any case."""
    return jax.lax.bitcast_convert_type((scale << 7).astype(jnp.uint16), jnp.bfloat16)


def wide(weight, scale, inputs: int):
    """The weight in bfloat16, which is exact: ``[..., bytes]`` and ``[..., groups]``, both uint8 -> ``[..., inputs]``."""
    byte = weight.astype(jnp.int32).reshape(*weight.shape[:-1], -1, 1, GROUP)
    code = jnp.concatenate([byte & 15, byte >> 4], axis=-2)  # [..., pairs, 2, 32]
    found = values(code) * powers(scale.astype(jnp.int32)).reshape(*code.shape[:-1], 1)
    return found.reshape(*weight.shape[:-1], -1)[..., :inputs]
