"""Groups of input features that share a scale where a weight is stored in four bits (``jspec.quantization.int4``)."""

GROUP = 128  # input features of a group


def four_bit_groups(inputs: int) -> int:
    """How many groups the inputs of an output channel make; the last one may not be full."""
    return -(-inputs // GROUP)
