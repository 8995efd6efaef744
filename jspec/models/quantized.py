"""Weights of eight bits: a row of W is ``scale * weight``, integers or fp8 numbers with one float32 scale a row.

Symmetric and per output channel, as W8A16 checkpoints have it: a row's largest magnitude becomes 127 or 448.
Activations are never quantised."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

STORED = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
LARGEST = {"int8": 127, "fp8": 448}  # the largest of float8_e4m3fn
_BLOCK = 2**20  # numbers at a time: what is wide of them stays in a CPU's cache


def quantize(weight: np.ndarray, quantization: str) -> tuple[np.ndarray, np.ndarray]:
    """``weight`` ``[out, in]``, finite, of any float dtype -> rounded to nearest even, and scales float32 ``[out]``.

    Args:
      weight: what to store.
      quantization: ``int8`` or ``fp8`` (float8_e4m3fn).
    """
    largest, step = np.float32(LARGEST[quantization]), max(1, _BLOCK // weight.shape[1])
    rounded = np.empty(weight.shape, STORED[quantization])
    scale = np.empty(len(weight), np.float32)
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        block = weight[rows].astype(np.float32)
        scale[rows] = _scale(np.abs(block).max(axis=1), largest)
        block = np.clip(block / scale[rows, None], -largest, largest)
        rounded[rows] = np.rint(block) if quantization == "int8" else block
    return rounded, scale


def _scale(peak: np.ndarray, largest: np.float32) -> np.ndarray:
    """float32 ``[out]``; 1 for rows of zeros, or so near to zero that a GPU would take their scale for zero."""
    scale = peak / largest
    return np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)


def wide(weight, scale=None) -> jax.Array:
    """float32 rows ``[..., in]`` of stored ones and, if they are quantised, their scales, float32 ``[...]``."""
    rows = weight.astype(jnp.float32)
    return rows if scale is None else rows * scale[..., None]


def random_weight(key, shape: tuple[int, int], std: float, dtype, quantization: str | None):
    """A weight ``[out, in]`` of normal numbers and its scale, as params; the scale is None if ``quantization`` is."""
    if quantization is None:
        return nnx.Param(std * jax.random.normal(key, shape, dtype)), None
    largest = LARGEST[quantization]
    numbers = jnp.clip(jax.random.normal(key, shape) * largest / 4, -largest, largest)
    numbers = jnp.round(numbers) if quantization == "int8" else numbers
    scale = jnp.full(shape[0], 4 * std / largest, jnp.float32)
    return nnx.Param(numbers.astype(STORED[quantization])), nnx.Param(scale)
