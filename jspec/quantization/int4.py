"""INT4 weights in groups: codes of the inputs of an output channel, two in a byte, and a scale for each 128 inputs.

A code n = 0 .. 15 with the scale s of its group stands for the number (n - 8) s, which a model rounds to its own dtype
before it multiplies by it. Every program therefore multiplies by the same weight, in whatever order it adds up.

Byte c < 64 of a group has the code of input c of the group in its low half, and that of input 64 + c in its high half.
Where the inputs do not fill the last group, the missing codes are 8, which is zero."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jspec.quantization.groups import GROUP, num_groups

STORED, SCALE = np.dtype(np.uint8), np.dtype(ml_dtypes.bfloat16)
HALF, ZERO = GROUP // 2, 8  # bytes of the codes of a group, and the code of zero
# The number of largest magnitude in a group becomes minus one of these times the scale, whichever gives the least squared
# error. With 8 it becomes the lowest number there is, exactly but for the rounding of the scale. With 9 and 10 it is cut
# off, and all others are rounded more finely. Of normal numbers the error is 30% below that of the usual peak / 7.
_PEAKS = (8.0, 9.0, 10.0)
LARGEST = 4_000_000  # magnitudes below it have scales that ``jspec.pallas.matmul.unpack`` has factors for
_BLOCK = 2**20  # weights that are converted at a time, so that their float32 copies stay in a CPU's cache


def quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The packed codes, uint8 ``[out, 64 groups]``, and the scales, bfloat16 ``[out, groups]``, of a weight.

    A scale is negative where the number of largest magnitude in its group is positive: codes stand for -8 to 7 times the
    scale, and that number takes the -8. A group of zeros has scale 1.

    Args:
      weight: ``[out, in]``, of magnitudes below ``LARGEST``, of any float dtype.
    """
    outputs, inputs = weight.shape
    groups = num_groups(inputs)
    packed, scale = np.empty((outputs, groups * HALF), STORED), np.empty((outputs, groups), SCALE)
    step = max(1, _BLOCK // (groups * GROUP))
    for start in range(0, outputs, step):
        channels = slice(start, start + step)
        block = np.pad(weight[channels].astype(np.float32), ((0, 0), (0, groups * GROUP - inputs)))
        block = block.reshape(len(block), groups, GROUP)
        scale[channels], codes = _quantize(block)
        low, high = np.split(codes, 2, axis=-1)
        packed[channels] = (low | high << 4).reshape(len(block), -1)
    return packed, scale


def _quantize(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales ``[R, groups]`` and the codes, uint8 ``[R, groups, 128]``, of numbers ``[R, groups, 128]``."""
    at = np.abs(block).argmax(axis=-1, keepdims=True)
    peak = np.take_along_axis(block, at, axis=-1)
    candidates = [_with_scale(block, peak / -largest) for largest in _PEAKS]
    best = np.argmin([error for *_, error in candidates], axis=0)
    scales, codes = (np.choose(best, [candidate[i] for candidate in candidates]) for i in (0, 1))
    return scales[..., 0], codes


def _with_scale(block: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales rounded as they are stored, but in float32, codes, and squared errors ``[R, groups, 1]``.

    A scale that would be subnormal, which a GPU may flush to zero, is 1."""
    scale = scale.astype(SCALE).astype(np.float32)
    scale = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale)
    numbers = np.clip(np.rint(block / scale), -ZERO, ZERO - 1)
    error = np.square(numbers * scale - block).sum(axis=-1, keepdims=True)
    return scale, (numbers + ZERO).astype(np.uint8), error


def dequantize(packed, scale, inputs: int):
    """The numbers of codes ``[..., 64 groups]`` with scales ``[..., groups]``, float32 ``[..., inputs]``.

    Both may be arrays of NumPy or of JAX, and the result is of the same kind."""
    shape = scale.shape
    shifts = np.array([0, 4], np.uint8).reshape((1,) * len(shape) + (2, 1))
    codes = (packed.reshape(*shape, 1, HALF) >> shifts) & np.uint8(15)
    numbers = (codes.astype(np.float32) - np.float32(ZERO)) * scale.astype(np.float32)[..., None, None]
    return numbers.reshape(*shape[:-1], shape[-1] * GROUP)[..., :inputs]


def random_codes(key, shape: tuple[int, int], std: float) -> tuple[jax.Array, jax.Array]:
    """Packed codes and scales of a weight ``shape`` = (out, in) of about normal numbers.

    Args:
      key: the PRNG key.
      shape: (out, in).
      std: standard deviation of the numbers that they stand for.
    """
    outputs, groups = shape[0], num_groups(shape[1])
    numbers = jax.random.normal(key, (outputs, groups, 2, HALF)) * (ZERO / 3)
    codes = (jnp.clip(jnp.round(numbers), -ZERO, ZERO - 1) + ZERO).astype(STORED)
    packed = codes[:, :, 0] | codes[:, :, 1] << 4
    return packed.reshape(outputs, groups * HALF), jnp.full((outputs, groups), 3 * std / ZERO, SCALE)
