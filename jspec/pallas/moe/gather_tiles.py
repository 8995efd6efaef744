"""The tokens of each tile of assignments side by side in memory, for ``jspec.pallas.moe.grouped_sm90``."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.moe.router_reference import Routed
from jspec.pallas.moe.tiles import ExpertTiling, num_tiles, tile_of_instance
from jspec.pallas.triton import block_ids, kernel_call, tile_indices

_COLUMNS = 1024  # input features that a program instance copies


class GatheredTiles(NamedTuple):
    """The assignments of all experts in tiles of n lines, of which the last ``tiles - total`` tiles have none.

    Attributes:
      x: ``[tiles n, D]``, the token of each assignment. A line without an assignment may hold anything.
      total: int32 ``[1]``, how many tiles have assignments.
      expert: int32 ``[tiles]``, the expert of each of these.
      assignment: int32 ``[tiles n]``, M Y in a line without one.
      factor: float32 ``[tiles n]``, the weight of the expert for the token; 0 in a line without an assignment.
    """

    x: jax.Array
    total: jax.Array
    expert: jax.Array
    assignment: jax.Array
    factor: jax.Array


@functools.partial(jax.jit, static_argnames=("size", "interpret"))  # layers share one trace
def gather_tiles_kernel(x, routed: Routed, size: int, *, interpret=False) -> GatheredTiles:
    """The tiles of ``size`` lines of tokens ``x [M, D]``, as a kernel. Its program instances have a tile and some features
    each."""
    (M, Y), D, X = routed.expert.shape, x.shape[1], len(routed.sizes)
    tiles = num_tiles(M * Y, X, size)
    shapes = ((tiles * size, D), x.dtype), ((1,), jnp.int32), ((tiles,), jnp.int32)
    shapes = *shapes, ((tiles * size,), jnp.int32), ((tiles * size,), jnp.float32)
    made = kernel_call(
        _gather,
        *(routed.sizes, routed.order, routed.weight.reshape(M * Y), x),
        grid=(tiles, pl.cdiv(D, _COLUMNS)),
        out_shape=[jax.ShapeDtypeStruct(*shape) for shape in shapes],
        num_warps=4,
        interpret=interpret,
        tiling=ExpertTiling(size, _COLUMNS, 0, 4, 1),
        Y=Y,
    )
    return GatheredTiles(*made)


def _gather(
    sizes_ref,
    order_ref,
    weight_ref,
    x_ref,
    tiled_ref,
    total_ref,
    expert_ref,
    assignment_ref,
    factor_ref,
    *,
    tiling: ExpertTiling,
    Y: int,
):
    X, A, t, size = sizes_ref.shape[0], order_ref.shape[0], pl.program_id(0), tiling.assignments
    has_tile, tile = tile_of_instance(sizes_ref, order_ref, None, tiling, X)
    line, column = t * size + jnp.arange(size, dtype=jnp.int32), tiling.output_ids()

    @pl.when(pl.program_id(1) == 0)
    def _():
        expert_ref[t] = tile.expert
        pltriton.store(assignment_ref.at[line], jnp.where(tile.real, tile.assignment, A))
        pltriton.store(factor_ref.at[line], pltriton.load(weight_ref.at[tile.assignment], mask=tile.real, other=0.0))

    @pl.when((t == 0) & (pl.program_id(1) == 0))
    def _():
        ids = block_ids(0, pl.next_power_of_2(X))
        sizes = pltriton.load(sizes_ref.at[ids], mask=ids < X, other=0)
        total_ref[0] = jnp.sum(jax.lax.div(sizes + size - 1, jnp.int32(size)))

    @pl.when(has_tile)
    def _():
        mask = jnp.broadcast_to(tile.real[:, None] & (column < x_ref.shape[1])[None, :], (size, column.shape[0]))
        token = jax.lax.div(tile.assignment, jnp.int32(Y))
        x = pltriton.load(x_ref.at[tile_indices(token, column)], mask=mask, other=0)
        pltriton.store(tiled_ref.at[tile_indices(line, column)], x, mask=mask)
