"""Groups of input features that share a scale: in four bits (``int4``), and in blocks of FP8 (``fp8_block``)."""

GROUP = 128  # input features of a group


def num_groups(inputs: int) -> int:
    """How many groups the inputs of an output channel make; the last one may not be full."""
    return -(-inputs // GROUP)
