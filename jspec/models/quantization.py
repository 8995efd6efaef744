"""Weights of eight bits, int8 or fp8 numbers ``[out, in]`` with one float32 scale for each output channel, or of four
bits.

Output channel o of the weight W stands for ``scale[o] * weight[o]``. Quantisation is symmetric, as in W8A16 checkpoints:
the largest magnitude of an output channel becomes 127 (int8) or 448 (fp8). Weights of four bits (``int4`` and the other
formats of ``jspec.quantization.formats``) and FP8 weights in blocks (``fp8_block``) have a scale for each group of inputs,
see ``jspec.quantization``. Which activations are quantised, too, ``jspec.models.w8a8`` says."""

import ml_dtypes
import numpy as np

from jspec.quantization import fp8_block, int4
from jspec.quantization.formats import known_format

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_BLOCK = 2**20  # weights that are converted at a time, so that their float32 copies stay in a CPU's cache


def quantize(weight: np.ndarray, quantization: str) -> tuple[np.ndarray, np.ndarray]:
    """The quantised weight ``[out, in]``, rounded to nearest even, and its scales, float32 ``[out]``.

    With ``int4`` and ``fp8_block`` it is what ``jspec.quantization`` makes.

    Args:
      weight: ``[out, in]``, finite, of any float dtype.
      quantization: ``int8``, ``fp8`` (float8_e4m3fn), ``int4`` or ``fp8_block``.
    """
    if quantization == "int4":
        return int4.quantize(weight)
    if quantization == "fp8_block":
        return fp8_block.quantize(weight)
    form, step = known_format(quantization), max(1, _BLOCK // weight.shape[1])
    largest, rounded = np.float32(form.largest), np.empty(weight.shape, np.dtype(form.numbers))
    scale = np.empty(len(weight), np.float32)
    for start in range(0, len(weight), step):
        channels = slice(start, start + step)
        block = weight[channels].astype(np.float32)
        scale[channels] = _scale(np.abs(block).max(axis=1), largest)
        block = np.clip(block / scale[channels, None], -largest, largest)
        rounded[channels] = np.rint(block) if quantization == "int8" else block
    return rounded, scale


def _scale(peak: np.ndarray, largest: np.float32) -> np.ndarray:
    """Scales, float32 ``[out]``, from the largest magnitude of each output channel.

    An output channel of zeros gets 1, and so does one whose scale would be subnormal, which a GPU may flush to zero.
    """
    scale = peak / largest
    return np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
