"""Rounds weights to ``int4``: codes of four bits (``jspec.quantization.codes``) in groups of 128 inputs with scales in
bfloat16."""

import ml_dtypes
import numpy as np

from jspec.quantization.codes import HALF, STORED, ZERO, pack_codes
from jspec.quantization.formats import GROUP, num_groups

SCALE = np.dtype(ml_dtypes.bfloat16)
# The number of largest magnitude in a group becomes minus one of these times the scale, whichever gives the least error.
# With 8 it becomes the lowest number there is, exactly but for the rounding of the scale; below that all numbers are rounded
# more coarsely, and above it that one is cut off. Where all errors overflow, the first is taken.
PEAKS = (8.0, 7.5, 8.5, 9.0)
_BLOCK = 2**20  # weights that are converted at a time, so that their float32 copies stay in a CPU's cache


def quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The packed codes, uint8 ``[out, 64 groups]``, and the scales, bfloat16 ``[out, groups]``, of a weight.

    The error of a group is the sum of the squared errors of its numbers, each times the number's magnitude: what large
    weights lose moves a model more than what small ones do. The least squared error without that cuts the largest weights
    off by up to 20%, and trained models are farther from their originals than with the largest magnitude / 7
    (``benchmarks/log/quantised-quality.md``).

    A scale is negative where the number of largest magnitude in its group is positive: codes stand for -8 to 7 times the
    scale, and that number takes the -8. A group of zeros has scale 1.

    Args:
      weight: ``[out, in]``, finite, of any float dtype.
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
        packed[channels] = pack_codes(codes).reshape(len(block), -1)
    return packed, scale


def _quantize(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales ``[R, groups]`` and the codes, uint8 ``[R, groups, 128]``, of numbers ``[R, groups, 128]``."""
    at = np.abs(block).argmax(axis=-1, keepdims=True)
    peak = np.take_along_axis(block, at, axis=-1)
    candidates = [_with_scale(block, peak / -largest) for largest in PEAKS]
    best = np.argmin([error for *_, error in candidates], axis=0)
    scales, codes = (np.choose(best, [candidate[i] for candidate in candidates]) for i in (0, 1))
    return scales[..., 0], codes


def _with_scale(block: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales rounded as they are stored, but in float32, codes, and errors ``[R, groups, 1]``.

    A scale that would be subnormal, which a GPU may flush to zero, is 1."""
    scale = scale.astype(SCALE).astype(np.float32)
    scale = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale)
    numbers = np.clip(np.rint(block / scale), -ZERO, ZERO - 1)
    with np.errstate(over="ignore"):  # of the largest numbers, of which the first scale is then taken
        error = (np.square(numbers * scale - block) * np.abs(block)).sum(axis=-1, keepdims=True)
    return scale, (numbers + ZERO).astype(np.uint8), error
