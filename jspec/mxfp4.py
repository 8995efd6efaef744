"""MXFP4, weights of four bits (Open Compute Project, Microscaling Formats, 2023), in which gpt-oss has its experts.

A group of 32 input features shares a power of two. A number is one of 16 multiples of it, which a *code* of four bits
names: a sign, two bits of exponent and one of mantissa (e2m1).

Checkpoints hold in a byte the codes of two neighbours. A kernel would have to interleave the two halves of the bytes that
it unpacks, so jspec keeps the codes in another order: two groups make a *pair*, and byte j of a pair holds the codes of
feature j of its first group (the low four bits) and of feature j of its second. A weight ``[out, in]`` is therefore uint8
``[out, 32 pairs]``, and its scales are uint8 ``[out, 2 pairs]``. Where the number of groups is odd, the last group is
followed by one of zeros. Not a bit of a code or of a scale is changed."""

import math

GROUP = 32  # input features that share a scale
PAIR = 2 * GROUP
LARGEST_SCALE = 254  # 2^127; the format calls 255 NaN
_ONE = 127  # the scale that stands for 2^0
_STD_OF_RANDOM_CODES = 2.93  # of the numbers that equally likely codes stand for


def stored_width(inputs: int) -> int:
    """How many bytes a row of codes has, for so many input features."""
    return -(-inputs // PAIR) * GROUP


def stored_groups(inputs: int) -> int:
    """How many scales a row has, for so many input features."""
    return -(-inputs // PAIR) * 2


def scale_of_random_codes(inputs: int) -> int:
    """The scale with which equally likely codes have a standard deviation near ``inputs ** -0.5``."""
    return _ONE + round(math.log2(inputs**-0.5 / _STD_OF_RANDOM_CODES))
