"""How ``jspec.pallas.matmul.few_tokens_sm90`` divides a product."""

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
      ordered: whether x has its inputs in the order of ``to_mma_order``, in which weights of eight bits are read faster.
    """

    outputs: int
    tokens: int
    inputs: int
    num_stages: int
    side_by_side: int = 1
    in_turns: int = 1
    keep_x: bool = False
    ordered: bool = False

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
