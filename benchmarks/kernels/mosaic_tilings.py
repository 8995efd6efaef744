"""How ``benchmarks.kernels.mosaic_product`` divides a product, and the tilings that are tried by weight and number of
tokens."""

from typing import NamedTuple

# Of a thread in the warpgroup that loads, and of one in each warpgroup together.
LOAD_REGISTERS, _REGISTERS = 40, 512


class MosaicTiling(NamedTuple):
    """How the kernel divides a product.

    Attributes:
      outputs: output features of a warpgroup, a multiple of 64.
      tokens: tokens of a tile, a multiple of 8, at most 256.
      inputs: input features that are copied at a time.
      num_stages: how many such copies are under way at once.
      side_by_side: warpgroups that multiply other output features of the same copy.
      in_turns: warpgroups that multiply one copy after the other in turn, and add up their sums in the end.
      keep_x: whether all of x stays in shared memory. Otherwise it is copied beside the weights of every tile.
    """

    outputs: int
    tokens: int
    inputs: int
    num_stages: int
    side_by_side: int = 1
    in_turns: int = 1
    keep_x: bool = False

    @property
    def warpgroups(self) -> int:
        """How many multiply."""
        return self.side_by_side * self.in_turns

    @property
    def tile_outputs(self) -> int:
        return self.outputs * self.side_by_side

    def registers(self) -> int:
        """Of a thread in the warpgroups that multiply: what is left of those with which all warpgroups start."""
        all_warpgroups = self.warpgroups + 1
        started = all_warpgroups * min(232, _REGISTERS // all_warpgroups // 8 * 8)
        return min(232, (started - LOAD_REGISTERS) // self.warpgroups // 8 * 8)


Tiling = MosaicTiling
# Fewer outputs in a tile divide the product more evenly among the multiprocessors, and more of them read x less often.
BF16 = {
    8: (
        Tiling(64, 8, 128, 8, keep_x=True),
        Tiling(64, 8, 128, 8, in_turns=2, keep_x=True),
        Tiling(64, 8, 128, 12),
    ),
    16: (
        Tiling(64, 16, 128, 5, keep_x=True),
        Tiling(64, 16, 128, 10),
        Tiling(64, 16, 64, 10, side_by_side=2),
    ),
    80: (
        Tiling(64, 80, 64, 7, side_by_side=2),
        Tiling(128, 80, 64, 4, side_by_side=2),
        Tiling(64, 80, 64, 8),
    ),
    160: (
        Tiling(64, 160, 64, 5, side_by_side=2),
        Tiling(128, 160, 64, 3, side_by_side=2),
    ),
}
EIGHT_BITS = {
    8: (
        Tiling(64, 8, 256, 8, in_turns=2, keep_x=True),
        Tiling(64, 8, 256, 8, in_turns=4, keep_x=True),
        Tiling(64, 8, 128, 8, side_by_side=2, in_turns=2, keep_x=True),
        Tiling(64, 8, 128, 8, side_by_side=2, keep_x=True),
    ),
    16: (
        Tiling(64, 16, 128, 10, in_turns=2, keep_x=True),
        Tiling(64, 16, 128, 8, in_turns=4, keep_x=True),
        Tiling(64, 16, 128, 10, side_by_side=2),
        Tiling(64, 16, 128, 8, side_by_side=2, in_turns=2),
    ),
    80: (
        Tiling(64, 80, 128, 5, side_by_side=2),
        Tiling(128, 80, 64, 6, side_by_side=2),
        Tiling(64, 80, 64, 6, side_by_side=4),
        Tiling(64, 80, 128, 4, side_by_side=2, in_turns=2),
    ),
    160: (
        Tiling(64, 160, 64, 6, side_by_side=2),
        Tiling(128, 160, 64, 4, side_by_side=2),
    ),
}
BLOCKS = {
    8: (
        Tiling(64, 8, 128, 16, in_turns=2, keep_x=True),
        Tiling(64, 8, 128, 16, in_turns=4, keep_x=True),
        Tiling(64, 8, 128, 8, side_by_side=2, in_turns=2, keep_x=True),
    ),
    16: (
        Tiling(64, 16, 128, 10, in_turns=2, keep_x=True),
        Tiling(64, 16, 128, 8, in_turns=4, keep_x=True),
        Tiling(64, 16, 128, 8, side_by_side=2, in_turns=2),
    ),
    80: (
        Tiling(64, 80, 128, 5, side_by_side=2),
        Tiling(64, 80, 128, 6),
    ),
    160: (Tiling(64, 160, 128, 3, side_by_side=2),),
}
TILINGS = {"bf16": BF16, "int8": EIGHT_BITS, "fp8": EIGHT_BITS, "blocks": BLOCKS}
SMALL_TILINGS = (Tiling(64, 8, 128, 4, side_by_side=2, in_turns=2),)  # where they are interpreted


def tilings_for(kind: str, tokens: int) -> tuple[Tiling, ...]:
    """Those of the smallest tile of tokens that holds all of them, or else of the largest."""
    tiles = TILINGS[kind]
    return tiles[min((size for size in tiles if size >= tokens), default=max(tiles))]
