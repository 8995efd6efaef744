"""MXFP4 of linear maps: numbers of four bits, and a power of two of eight bits for each 32 inputs (Open Compute Project,
Microscaling Formats, 2023). Experts of gpt-oss have an order of their own, ``jspec.quantization.mxfp4_pairs``.

A code has a sign, two bits of exponent and one of mantissa (E2M1), as in ``jspec.quantization.nvfp4``. Codes are packed by
``jspec.quantization.codes``.

| array | shape | |
|---|---|---|
| weight | uint8 ``[out, 64 blocks]`` | the codes; a block is 128 inputs |
| scale | uint8 ``[out, ceil(in / 32)]`` | E8M0: a byte n stands for 2^(n - 127) |

The number of a code times its scale has two significant bits, so bfloat16 holds it, subnormal numbers among them: the
smallest one is 2^-128, and that of bfloat16 is 2^-133. A kernel makes it of the bits of a code with one factor, 2^121 times
the scale, which has to be a number of bfloat16, too. So the largest scale that is read is 2^6 (``Format.largest_power``),
for weights up to 384. Where XLA counts subnormal numbers as 0, as it does on a CPU, weights below 2^-126 count as 0, as
those of any checkpoint do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ONE = 127  # the byte that stands for 2^0


def twice_powers(scale) -> Any:
    """Twice the powers of two that bytes stand for, float32, of which none is subnormal; an array of NumPy gives one of
    NumPy, and one of JAX gives one of JAX. A byte of 254 or 255 gives infinity or NaN."""
    bits = (scale.astype(np.uint32) + 1) << 23
    return jax.lax.bitcast_convert_type(bits, jnp.float32) if isinstance(scale, jax.Array) else bits.view(np.float32)
