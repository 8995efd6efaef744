"""FP8 weights in blocks: numbers of eight bits, and for each output channel a scale for each 128 inputs.

Checkpoints of DeepSeek-V3 and those that follow it have one scale for a block of 128 output channels and 128 inputs. Here
it stands at each of these output channels, so that parts of a weight can begin and end anywhere: queries, keys and values
one after another, the experts of a layer, the shards of a model. The scales take 3% of the bytes of the numbers.

The number at output channel o and input i stands for ``weight[o, i] * scale[o, i // 128]``."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jspec.quantization.formats import GROUP

STORED = np.dtype(ml_dtypes.float8_e4m3fn)


def dequantize(weight, scale):
    """What the numbers ``[..., in]`` with scales ``[..., ceil(in / 128)]`` stand for, float32 ``[..., in]``.

    Both may be arrays of NumPy or of JAX, and the result is of the same kind."""
    inputs = weight.shape[-1]
    xp = jnp if isinstance(weight, jax.Array) else np
    return weight.astype(np.float32) * xp.repeat(scale, GROUP, axis=-1)[..., :inputs]
