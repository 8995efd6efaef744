"""Weights of eight bits, int8 or fp8 numbers ``[out, in]`` with one float32 scale for each output channel, or of four
bits.

Output channel o of the weight W stands for ``scale[o] * weight[o]``. Quantisation is symmetric, as in W8A16 checkpoints:
the largest magnitude of an output channel becomes 127 (int8) or 448 (fp8). Weights of four bits (``int4`` and the other
formats of ``jspec.quantization.formats``) and FP8 weights in blocks (``fp8_block``) have a scale for each group of inputs,
see ``jspec.quantization``. Which activations are quantised, too, ``jspec.models.w8a8`` says."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from jspec.pallas.matmul import quantize_activations
from jspec.quantization import codes, fp8_block, int4, mxfp4
from jspec.quantization.formats import format_of, known_format

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_EIGHT_BITS = {"int8": np.dtype(np.int8), "fp8": FP8, "fp8_block": fp8_block.STORED}
STORED_DTYPES = (*_EIGHT_BITS.values(), codes.STORED)  # of all quantised weights
LARGEST = quantize_activations.LARGEST  # the largest magnitude that is used
_BLOCK = 2**20  # weights that are converted at a time, so that their float32 copies stay in a CPU's cache


class StoredWeight(NamedTuple):
    """A weight ``[out, in]`` as params hold it.

    Attributes:
      weight: ``[out, in]``, or packed codes of four bits.
      scale: of a quantised weight, ``[out]``, or those of groups of inputs; else None.
      channel_scale: of NVFP4 float32 ``[out, 2]``; else None.
    """

    weight: Any
    scale: Any = None
    channel_scale: Any = None


def stored_dtype(quantization: str) -> np.dtype:
    """The dtype in which the numbers or codes of weights in this quantisation are stored."""
    return jnp.dtype(known_format(quantization).numbers)


def scale_dtype(quantization: str) -> np.dtype:
    """The dtype of their scales."""
    return jnp.dtype(known_format(quantization).scale)


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
    largest, step = np.float32(LARGEST[quantization]), max(1, _BLOCK // weight.shape[1])
    rounded = np.empty(weight.shape, _EIGHT_BITS[quantization])
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


def quantized_shapes(shape: tuple[int, ...], quantization: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the two arrays in which a weight ``shape`` = (out, in) is stored: the weight's and the scales'."""
    arrays = known_format(quantization).arrays(shape)
    return arrays["weight"].shape, arrays["scale"].shape


def random_weight(key, shape: tuple[int, int], std: float, dtype, quantization: str | None):
    """A weight of normal numbers and its scales, as params. The scales are None without quantisation.

    Args:
      key: the PRNG key.
      shape: (out, in).
      std: standard deviation of the numbers, once they are multiplied by their scales.
      dtype: of a weight that is not quantised.
      quantization: ``int8``, ``fp8``, ``fp8_block``, ``mxfp4``, a format of ``jspec.quantization.formats`` such as ``int4``,
        or None.
    """
    if quantization is None:
        return nnx.Param(std * jax.random.normal(key, shape, dtype)), None
    if (form := format_of(quantization)) is not None and form.kind in ("int4", "int8_groups"):
        return tuple(nnx.Param(array) for array in codes.random_codes(key, shape, std, form))
    if quantization in ("fp8_block", "mxfp4"):
        random = fp8_block.random_numbers if quantization == "fp8_block" else mxfp4.random_codes
        return tuple(nnx.Param(array) for array in random(key, shape, std))
    largest = LARGEST[quantization]
    numbers = jnp.clip(jax.random.normal(key, shape) * largest / 4, -largest, largest)
    numbers = jnp.round(numbers) if quantization == "int8" else numbers
    scale = jnp.full(shape[0], 4 * std / largest, jnp.float32)
    return nnx.Param(numbers.astype(_EIGHT_BITS[quantization])), nnx.Param(scale)
