"""FP8 weights in blocks: numbers of eight bits, and for each output channel a scale for each 128 inputs.

Checkpoints of DeepSeek-V3 and those that follow it have one scale for a block of 128 output channels and 128 inputs. Here
it stands at each of these output channels, so that parts of a weight can begin and end anywhere: queries, keys and values
one after another, the experts of a layer, the shards of a model. The scales take 3% of the bytes of the numbers.

The number at output channel o and input i stands for ``weight[o, i] * scale[o, i // 128]``."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jspec.quantization.formats import GROUP, num_groups

STORED, SCALE = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float32)
LARGEST = 448


def quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers ``[out, in]``, rounded to nearest even, and the scales, float32 ``[out, groups]``, of a weight in blocks.

    A block has 128 output channels. Its largest magnitude becomes 448. A scale that would be subnormal, which a GPU may
    flush to zero, is 1.

    Args:
      weight: ``[out, in]``, finite, of any float dtype.
    """
    (outputs, inputs), groups = weight.shape, num_groups(weight.shape[1])
    numbers, scale = np.empty(weight.shape, STORED), np.empty((outputs, groups), SCALE)
    for start in range(0, outputs, GROUP):
        rows = slice(start, start + GROUP)
        block = weight[rows].astype(np.float32)
        padded = np.pad(np.abs(block), ((0, 0), (0, groups * GROUP - inputs)))
        peak = padded.reshape(len(block), groups, GROUP).max(axis=(0, 2)) / np.float32(LARGEST)
        scale[rows] = np.where(peak < np.finfo(np.float32).tiny, np.float32(1), peak)[None]
        numbers[rows] = np.clip(block / np.repeat(scale[rows], GROUP, axis=1)[:, :inputs], -LARGEST, LARGEST)
    return numbers, scale


def dequantize(weight, scale):
    """What the numbers ``[..., in]`` with scales ``[..., ceil(in / 128)]`` stand for, float32 ``[..., in]``.

    Both may be arrays of NumPy or of JAX, and the result is of the same kind."""
    inputs = weight.shape[-1]
    xp = jnp if isinstance(weight, jax.Array) else np
    return weight.astype(np.float32) * xp.repeat(scale, GROUP, axis=-1)[..., :inputs]
