"""Codes of four bits in groups: how they are packed, and what they stand for.

Checkpoints of GPTQ, AWQ and compressed-tensors are kept so, and jspec's own ``int4`` is one of these formats
(``jspec.quantization.groups``). An output channel has a code n = 0 .. 15 for each input feature, and its inputs are in
groups. A code stands for the number ``(n - zero) * scale`` of its group, exactly: the difference is an integer that bfloat16
holds, and a product adds up the products of a group before it multiplies by the scale, in float32.

| array | shape | |
|---|---|---|
| weight | uint8 ``[out, 64 blocks]`` | the codes, packed by ``pack_codes``; a block is 128 inputs |
| scale | ``[out, groups]`` | of float16, bfloat16 or float32; the zero of every group is 8 |
| | ``[out, groups, 2]`` | the scale of a group and its zero, an integer that each of these dtypes holds |

Nothing but ``pack_codes``, ``unpack_codes`` and ``input_at`` knows which bits of a block are the code of which input."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.quantization.groups import GROUP, INT4, Grouped, group_of, num_groups

STORED = np.dtype(np.uint8)
ZERO = 8  # the code that stands for 0 where groups have no zeros of their own
BLOCK = GROUP  # inputs whose codes are packed together
HALF = BLOCK // 2  # bytes of a block


def pack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes packed two in a byte: uint8 ``[..., in]`` -> uint8 ``[..., 64 blocks]``.

    Byte c < 64 of a block has the code of input c of the block in its low half, and that of input 64 + c in its high half.
    Where the inputs do not fill the last block, the missing codes are 8."""
    *before, inputs = codes.shape
    blocks = num_groups(inputs)
    if missing := blocks * BLOCK - inputs:
        codes = np.pad(codes, [(0, 0)] * len(before) + [(0, missing)], constant_values=ZERO)
    halves = codes.reshape(*before, blocks, 2, HALF)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*before, blocks * HALF)


def unpack_codes(packed, inputs: int):
    """The codes, uint8 ``[..., inputs]``, of bytes that ``pack_codes`` made, ``[..., 64 blocks]``.

    An array of NumPy gives one of NumPy, and one of JAX gives one of JAX."""
    *before, size = packed.shape
    shifts = np.array([0, 4], np.uint8).reshape((1,) * (len(before) + 1) + (2, 1))
    codes = (packed.reshape(*before, size // HALF, 1, HALF) >> shifts) & np.uint8(15)
    return codes.reshape(*before, 2 * size)[..., :inputs]


def input_at(byte, high: bool) -> Any:
    """The input feature whose code is in the low or the high half of a byte.

    Of 32 bytes from a multiple of 32 on, the low halves belong to one group of 32 inputs, and so do the high halves.

    Args:
      byte: its place in an output channel; ints, or integer arrays of NumPy or JAX.
      high: which half.
    """
    return _quotient(byte, HALF) * BLOCK + HALF * high + _remainder(byte, HALF)


def _quotient(x, y: int):
    return jax.lax.div(x, jnp.int32(y)) if isinstance(x, jax.Array) else x // y


def _remainder(x, y: int):
    return jax.lax.rem(x, jnp.int32(y)) if isinstance(x, jax.Array) else x % y


def scales_and_zeros(weight, scale) -> tuple[Any, Any]:
    """The scales and the zeros of the groups of ``weight [..., 64 blocks]``, each ``[..., groups]`` in the dtype of
    ``scale``; None for the zeros if they are 8."""
    return (scale, None) if scale.ndim == weight.ndim else (scale[..., 0], scale[..., 1])


def differences(weight, scale, inputs: int):
    """``n - zero`` of each code, float32 ``[..., inputs]``; arguments as for ``dequantize``."""
    scale, zero = scales_and_zeros(weight, scale)
    codes = unpack_codes(weight, inputs).astype(np.float32)
    return codes - (np.float32(ZERO) if zero is None else of_inputs(zero.astype(np.float32), inputs))


def of_inputs(of_groups, inputs: int):
    """Numbers of groups, ``[..., groups]``, repeated for each input of their group: ``[..., inputs]``."""
    xp, shape = jnp if isinstance(of_groups, jax.Array) else np, of_groups.shape
    repeated = xp.broadcast_to(of_groups[..., None], (*shape, group_of(inputs, shape[-1])))
    return repeated.reshape(*shape[:-1], -1)[..., :inputs]


def dequantize(weight, scale, inputs: int):
    """What codes stand for, float32 ``[..., inputs]``, in which they are exact but for scales of float32.

    Args:
      weight: packed codes, uint8 ``[..., 64 blocks]``, of NumPy or of JAX, and so is the result.
      scale: ``[..., groups]`` or ``[..., groups, 2]``.
      inputs: how many codes there are.
    """
    scales, _ = scales_and_zeros(weight, scale)
    return differences(weight, scale, inputs) * of_inputs(scales.astype(np.float32), inputs)


def random_codes(key, shape: tuple[int, int], std: float, form: Grouped = INT4) -> tuple[jax.Array, jax.Array]:
    """Packed codes and scales of a weight ``shape`` = (out, in) of about normal numbers.

    Args:
      key: the PRNG key.
      shape: (out, in).
      std: standard deviation of the numbers that they stand for.
      form: how scales and zeros are stored.
    """
    packed_shape, scale_shape = form.weight_shape(shape), form.scale_shape(shape)
    numbers = jax.random.normal(key, (*packed_shape, 2)) * (ZERO / 3)
    codes = (jnp.clip(jnp.round(numbers), -ZERO, ZERO - 1) + ZERO).astype(STORED)
    scale = jnp.full(scale_shape[:2], 3 * std / ZERO, form.scale)
    if form.zeros:
        scale = jnp.stack([scale, jnp.full_like(scale, ZERO)], axis=-1)
    return codes[..., 0] | codes[..., 1] << 4, scale
