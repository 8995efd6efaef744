"""The instructions that unpack weights of four bits on a GPU, carried out in NumPy, against the same without them."""

import numpy as np
from inline_assembly import carried_out

from jspec.pallas.weights import mxfp4_pairs
from jspec.quantization.mxfp4_pairs import GROUP, LARGEST_SCALE, factors


def test_instructions_agree_with_the_definition():
    rng = np.random.default_rng(0)
    byte = rng.integers(256, size=(500, GROUP), dtype=np.uint8)
    scales = rng.integers(3, LARGEST_SCALE + 1, size=(2, 500), dtype=np.uint32)
    pair_factors = factors(*scales)
    words, word_factors = byte.view("<u4").reshape(-1), np.repeat(pair_factors, GROUP // 4)
    for asm, wanted in zip(
        (mxfp4_pairs._FIRST, mxfp4_pairs._SECOND), mxfp4_pairs.dequantize_groups(byte, pair_factors), strict=True
    ):
        actual = carried_out(asm, {"$2": words, "$3": word_factors}).reshape(500, GROUP)
        np.testing.assert_array_equal(actual, np.asarray(wanted))
