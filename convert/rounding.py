"""Rounds weights to formats of ``jspec.quantization.formats``: to numbers of eight bits with a scale for each output channel
or for each 128 inputs, or to codes of four bits in groups of 128 inputs.

Quantisation in eight bits is symmetric, as in W8A16 checkpoints: the largest magnitude of an output channel, or of a block,
becomes 127 (int8) or 448 (fp8). ``jspec.quantization.weight`` says what numbers and scales stand for."""

import ml_dtypes
import numpy as np

from jspec.quantization.codes import HALF, ZERO, pack_codes
from jspec.quantization.formats import GROUP, Format, known_format, num_groups

_BLOCK = 2**20  # weights that are converted at a time, so that their float32 copies stay in a CPU's cache
# The number of largest magnitude in a group of int4 becomes minus one of these times the scale, whichever gives the least
# squared error. With 8 it becomes the lowest number there is, exactly but for the rounding of the scale. With 9 and 10 it is
# cut off, and all others are rounded more finely. Of normal numbers the error is 30% below that of the usual peak / 7.
_PEAKS = (8.0, 9.0, 10.0)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def quantize(weight: np.ndarray, quantization: str) -> tuple[np.ndarray, np.ndarray]:
    """The quantised weight, rounded to nearest even, and its scales, as they are stored.

    Args:
      weight: ``[out, in]``, finite, of any float dtype.
      quantization: ``int8``, ``fp8`` (float8_e4m3fn), ``int4`` or ``fp8_block``.
    """
    return {"int4": _to_codes, "fp8_block": _to_blocks}.get(quantization, _per_channel)(
        weight, known_format(quantization)
    )


def _per_channel(weight: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """Numbers ``[out, in]``, and scales, float32 ``[out]``."""
    step, largest = max(1, _BLOCK // weight.shape[1]), np.float32(form.largest)
    rounded, scale = np.empty(weight.shape, np.dtype(form.numbers)), np.empty(len(weight), np.float32)
    for start in range(0, len(weight), step):
        channels = slice(start, start + step)
        block = weight[channels].astype(np.float32)
        scale[channels] = _scale(np.abs(block).max(axis=1), largest)
        block = np.clip(block / scale[channels, None], -largest, largest)
        rounded[channels] = np.rint(block) if rounded.dtype == np.int8 else block
    return rounded, scale


def _to_blocks(weight: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """Numbers ``[out, in]``, and scales, float32 ``[out, groups]``, of blocks of 128 output channels and 128 inputs."""
    (outputs, inputs), groups, largest = weight.shape, num_groups(weight.shape[1]), np.float32(form.largest)
    numbers, scale = np.empty(weight.shape, np.dtype(form.numbers)), np.empty((outputs, groups), np.float32)
    for start in range(0, outputs, GROUP):
        rows = slice(start, start + GROUP)
        block = weight[rows].astype(np.float32)
        padded = np.pad(np.abs(block), ((0, 0), (0, groups * GROUP - inputs)))
        scale[rows] = _scale(padded.reshape(len(block), groups, GROUP).max(axis=(0, 2)), largest)[None]
        numbers[rows] = np.clip(block / np.repeat(scale[rows], GROUP, axis=1)[:, :inputs], -largest, largest)
    return numbers, scale


def _scale(peak: np.ndarray, largest: np.float32) -> np.ndarray:
    """Scales, float32 like ``peak``, from the largest magnitudes.

    Of zeros it is 1, and so is one that would be subnormal, which a GPU may flush to zero."""
    scale = peak / largest
    return np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)


def _to_codes(weight: np.ndarray, form: Format) -> tuple[np.ndarray, np.ndarray]:
    """The packed codes, uint8 ``[out, 64 groups]``, and the scales, bfloat16 ``[out, groups]``.

    A scale is negative where the number of largest magnitude in its group is positive: codes stand for -8 to 7 times the
    scale, and that number takes the -8. A group of zeros has scale 1."""
    outputs, inputs = weight.shape
    groups = num_groups(inputs)
    packed, scale = np.empty((outputs, groups * HALF), np.dtype(form.numbers)), np.empty((outputs, groups), _BFLOAT16)
    step = max(1, _BLOCK // (groups * GROUP))
    for start in range(0, outputs, step):
        channels = slice(start, start + step)
        block = np.pad(weight[channels].astype(np.float32), ((0, 0), (0, groups * GROUP - inputs)))
        block = block.reshape(len(block), groups, GROUP)
        scale[channels], codes = _with_least_error(block)
        packed[channels] = pack_codes(codes).reshape(len(block), -1)
    return packed, scale


def _with_least_error(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    scale = scale.astype(_BFLOAT16).astype(np.float32)
    scale = np.where(np.abs(scale) < np.finfo(np.float32).tiny, np.float32(1), scale)
    numbers = np.clip(np.rint(block / scale), -ZERO, ZERO - 1)
    with np.errstate(over="ignore"):  # of the largest numbers, of which the first scale is then taken
        error = np.square(numbers * scale - block).sum(axis=-1, keepdims=True)
    return scale, (numbers + ZERO).astype(np.uint8), error
