"""Rounds weights to FP8 in blocks (``fp8_block``)."""

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
