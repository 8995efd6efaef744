"""What MXFP4 weights of gpt-oss' experts (``jspec.quantization.mxfp4_pairs``) stand for."""

import jax
import jax.numpy as jnp

from jspec.quantization.mxfp4_pairs import BITS


def dequantize_groups(byte, factors):
    """The weights of the two groups of pairs: uint8 ``[..., 32]`` and uint32 ``[...]`` -> two of bfloat16 ``[...,
    32]``."""
    pair = byte.astype(jnp.int32).reshape(*byte.shape[:-1], -1, 2, 2)  # [..., words, halves, bytes]
    half = pair[..., 0] | pair[..., 1] << 8

    def group(letters: str, factor):
        codes = [half >> BITS[letter][0] & 7 | (half >> BITS[letter][1] & 1) << 3 for letter in letters]
        power = jax.lax.bitcast_convert_type(factor.astype(jnp.uint16), jnp.bfloat16).astype(jnp.float32) * 2.0**-126
        numbers = _values(jnp.stack(codes, axis=-2).reshape(byte.shape))
        return (numbers * power[..., None]).astype(jnp.bfloat16)

    return group("ab", factors & 0xFFFF), group("cd", factors >> 16)


def _values(code):
    """The numbers that codes 0 to 15 stand for, before their scales, in bfloat16: 0, 0.5, 1, 1.5, 2, 3, 4, 6, -0, ..."""
    magnitude = code & 7
    # As bits of a bfloat16, the magnitudes from code 2 on are equally spaced, and 0x3F00 is 0.5.
    bits = jnp.where(magnitude < 2, magnitude * 0x3F00, 0x3F00 + (magnitude << 6)) | (code & 8) << 12
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def dequantize(weight, factors, inputs: int):
    """The weight in bfloat16, exactly: uint8 ``[pairs, ..., 32]`` and uint32 ``[pairs, ...]`` -> ``[..., inputs]``."""
    pairs = jnp.stack(dequantize_groups(weight, factors), axis=-2)  # [pairs, ..., 2, 32]
    pairs = jnp.moveaxis(pairs, 0, -3)
    return pairs.reshape(*pairs.shape[:-3], -1)[..., :inputs]
