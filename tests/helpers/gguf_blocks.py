"""Random blocks of every type of GGUF, with scales that are numbers."""

import numpy as np

from jspec.checkpoints.quantized.gguf_blocks import BlockType

# The first bytes of the float16 numbers of a block.
_FLOATS = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **{"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": (), "NVFP4": ()},
}


def random_blocks(kind: BlockType, rows: int, inputs: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """Bytes of a tensor ``[rows, inputs]``, uint8 ``[rows, blocks, bytes]``, of which all codes and integers are random, and
    the numbers of float16 are multiplied by ``scale``."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, inputs // kind.weights, kind.bytes), dtype=np.uint8)
    for start in _FLOATS.get(kind.name, (0,)):
        numbers = rng.normal(size=(*blocks.shape[:2], 1)) * 2.0 ** rng.integers(-12, -5, (*blocks.shape[:2], 1))
        blocks[..., start : start + 2] = (scale * numbers).astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        blocks[..., 0] = rng.integers(110, 130, blocks.shape[:2])
    if kind.name == "NVFP4":
        blocks[..., :4] = rng.integers(0, 128, (*blocks.shape[:2], 4))
    return blocks
