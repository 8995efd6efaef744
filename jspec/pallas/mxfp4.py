"""The numbers that codes and scales of MXFP4 (``jspec.mxfp4``) stand for, inside kernels and outside."""

import jax
import jax.numpy as jnp

from jspec.mxfp4 import GROUP


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
