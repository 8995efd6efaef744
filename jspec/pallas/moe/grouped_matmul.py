"""The matmul of a tile of assignments (``jspec.pallas.moe.tiles``) with the weights of its expert."""

from typing import Any

import jax

from jspec.pallas.moe.operands import operands_of
from jspec.pallas.moe.tiles import ExpertMap, ExpertTile, ExpertTiling


def grouped_matmul(
    x_ref,
    line,
    tile: ExpertTile,
    expert_map: ExpertMap,
    outputs,
    output_mask,
    tiling: ExpertTiling,
    ordered: bool = False,
) -> list[Any]:
    """In a kernel: some output features of the tile's expert for lines of ``x_ref``.

    A sum is one chain, 16 inputs after 16, whatever the tiling is: numbers that are unpacked have their inputs in the order
    of ``to_mma_order`` in every tile. Sums of the inputs of a group are scaled and added in the order of groups.

    Args:
      x_ref: ``[lines, in]``; where weights are codes of four bits, the results of ``in_code_order`` side by side.
      ordered: whether lines of ``x_ref`` are in the order of ``to_mma_order``; of weights that are ``read_in_order``.
      line: int32 ``[assignments]``.
      expert_map: of refs.
      outputs: int32 ``[n]`` each, the output features of each product.
      output_mask: bool ``[n]``, which of these there are; None for all.

    Returns:
      float32 ``[assignments, n]`` for each of ``outputs``.
    """
    operands = operands_of(expert_map.weight.form)(x_ref, line, tile, expert_map, output_mask, tiling, ordered)

    def add(i, sums):
        for x, weights in operands.of(i, outputs):
            sums = tuple(operands.added(total, x, weight) for total, weight in zip(sums, weights, strict=True))
        return sums

    sums = jax.lax.fori_loop(0, operands.trips, add, tuple(operands.zeros(output) for output in outputs))
    return [operands.finished(total, output) for total, output in zip(sums, outputs, strict=True)]
