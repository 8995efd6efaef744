"""NVFP4: numbers of four bits, a scale of eight bits for each 16 inputs, and a number for each output channel.

A code has a sign, two bits of exponent and one of mantissa (E2M1). Codes are packed by ``jspec.quantization.codes``.
A checkpoint has one number for a whole weight, which multiplies or divides its scales. Here each output channel has that of
its weight, because queries, keys and values may have different ones.

| array | shape | |
|---|---|---|
| weight | uint8 ``[out, 64 blocks]`` | the codes; a block is 128 inputs |
| scale | float8_e4m3fn ``[out, ceil(in / 16)]`` | of positive numbers and 0 |
| channel_scale | float32 ``[out, 2]`` | what multiplies the scales, and what divides them; one of the two is 1 |

The product of a code's number and its scale has at most six significant bits, so bfloat16 holds it. Products with these are
added up, and each sum is multiplied by the number of its output channel in float32."""

import numpy as np

GROUP = 16  # input features that share a scale
_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
VALUES = np.array([*_MAGNITUDES, *(-np.array(_MAGNITUDES))], np.float32)  # of the sixteen codes
STD_OF_RANDOM_CODES = 2.93  # of the numbers that equally likely codes stand for


def channel_scales(number: float, divides: bool, channels: int) -> np.ndarray:
    """The float32 ``[channels, 2]`` of the output channels of a weight whose scales a number multiplies or divides."""
    pair = (1, number) if divides else (number, 1)
    return np.broadcast_to(np.array(pair, np.float32), (channels, 2))
