"""What a weight stands for, whatever it is stored as."""

from typing import Any

import numpy as np

from jspec.quantization import codes, fp8_block, mxfp4, nvfp4


def dequantize(weight, scale, inputs: int, channel_scale=None) -> Any:
    """The numbers of output channels, float32 ``[..., inputs]``; arrays of NumPy give one of NumPy, and arrays of JAX one of
    JAX.

    Args:
      weight: entire output channels, or tokens of an embedding, as they are stored: ``[..., inputs]``, or packed codes.
      scale: one scale for each of them, ``[...]``, or those of their groups. None if they are not quantised.
      inputs: how many numbers each of them has.
      channel_scale: of NVFP4, float32 ``[..., 2]``; else None.
    """
    if channel_scale is not None:
        return nvfp4.dequantize(weight, scale, channel_scale, inputs)
    if mxfp4.is_mxfp4(scale):
        return mxfp4.dequantize(weight, scale, inputs)
    if codes.are_codes(weight, scale):
        return codes.dequantize(weight, scale, inputs)
    if scale is not None and scale.ndim == weight.ndim:
        return fp8_block.dequantize(weight, scale)
    weight = weight.astype(np.float32)
    return weight if scale is None else weight * scale[..., None]
