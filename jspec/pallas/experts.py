"""The MLP of a mixture of experts: each token goes through its own few experts, and each expert's weights are read once.

The assignments of tokens to experts lie side by side by expert (``jspec.pallas.routing``). A *tile* is up to ``rows`` of
them that belong to one expert: a product of a tile reads the weights of one expert for all of its tokens. Tokens are
neither dropped nor padded to a capacity. A number of the result is summed in the same order whatever other tokens there
are, so that a token's result does not depend on them, as long as M is the same."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.flash import dot, each
from jspec.pallas.routing import Chosen, group_kernel
from jspec.pallas.triton import block_ids, kernel_call


class Stacked(NamedTuple):
    """The same linear map of each of X experts.

    Attributes:
      weight: ``[X, out, in]``, as it is stored.
      scale: float32 ``[X, out]``, by which a quantised weight is multiplied; None for a weight that is not quantised.
    """

    weight: jax.Array
    scale: jax.Array | None = None


def experts(x, chosen: Chosen, gate_up: Stacked, down: Stacked):
    """``experts_reference``, and on an NVIDIA GPU the kernels."""
    return by_platform(experts_kernel, experts_reference, x, chosen, gate_up, down)


def experts_reference(x, chosen: Chosen, gate_up: Stacked, down: Stacked):
    """The weighted sum of what its experts make of each token; an expert is a SwiGLU MLP (Shazeer, 2020).

    Every expert reads every token here, which is as exact as the kernels and slow.

    Args:
      x: ``[M, D]``.
      chosen: the Y experts of each token.
      gate_up: ``[X, 2Fe, D]``, the rows of gate before those of up.
      down: ``[X, D, Fe]``.

    Returns:
      ``[M, D]`` in the dtype of x. Sums are in float32; the input of ``down`` is rounded to the dtype of x.
    """
    gate, up = jnp.split(_all_products("md,xfd->mxf", x, gate_up), 2, axis=-1)
    made = _all_products("mxf,xdf->mxd", (jax.nn.silu(gate) * up).astype(x.dtype), down)
    own = jnp.take_along_axis(made, chosen.expert[:, :, None], axis=1)  # [M, Y, D]
    return jnp.sum(own * chosen.weight[:, :, None], axis=1).astype(x.dtype)


def _all_products(subscripts: str, x, stacked: Stacked):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    weight = stacked.weight.astype(x.dtype)
    product = jnp.einsum(subscripts, x, weight, precision=precision, preferred_element_type=jnp.float32)
    return product if stacked.scale is None else product * stacked.scale[None]


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How the products are cut up.

    Attributes:
      rows: assignments of a tile.
      columns: output features of a program.
      depth: input features that are read together.
      num_warps: warps of a program.
      num_stages: how many reads are under way at once.
    """

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def tiling_of(A: int, X: int, dtype) -> Tiling:
    """The tiling for A assignments to X experts."""
    each_has = A // X
    rows = 16 if each_has <= 8 else 32 if each_has <= 24 else 64
    return Tiling(rows, 32 if rows <= 32 else 64, 256 // jnp.dtype(dtype).itemsize, 4, 4)


@functools.partial(jax.jit, static_argnames=("up_tiling", "down_tiling", "interpret"))  # layers share one trace
def experts_kernel(
    x, chosen: Chosen, gate_up: Stacked, down: Stacked, *, up_tiling=None, down_tiling=None, interpret=False
):
    """``experts_reference`` as two kernels, behind that which groups the assignments."""
    (M, Y), (X, D, Fe) = chosen.expert.shape, down.weight.shape
    A, default = M * Y, tiling_of(M * Y, X, x.dtype)
    grouped = group_kernel(chosen.expert, X, interpret=interpret)
    run = functools.partial(_run, A=A, X=X, interpret=interpret)
    hidden = run(_up, up_tiling or default, jax.ShapeDtypeStruct((A, Fe), x.dtype), gate_up, *grouped, x, Y=Y)
    made = jax.ShapeDtypeStruct((A, D), jnp.float32)
    made = run(_down, down_tiling or default, made, down, *grouped, hidden, chosen.weight.reshape(A))
    return jnp.sum(made.reshape(M, Y, D), axis=1).astype(x.dtype)


def _run(function, tiling: Tiling, out, stacked: Stacked, *args, A: int, X: int, interpret: bool, **static):
    """The output of a kernel whose programs have a tile and some output features each."""
    hit = min(A, X)  # the most experts that can have a tile of their own
    scale = () if stacked.scale is None else (stacked.scale,)
    return kernel_call(
        function,
        *(*args, stacked.weight, *scale),
        grid=(hit + (A - hit) // tiling.rows, pl.cdiv(out.shape[1], tiling.columns)),
        out_shape=out,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
        **static,
    )


class _Tile(NamedTuple):
    """Assignments of one expert.

    Attributes:
      expert: whose they are.
      at: int32 ``[rows]``, their places in the order by expert.
      real: bool ``[rows]``, which of these there are.
      assignment: int32 ``[rows]``.
    """

    expert: jax.Array
    at: jax.Array
    real: jax.Array
    assignment: jax.Array


def _tile(sizes_ref, order_ref, rows: int) -> tuple[jax.Array, _Tile]:
    """In a kernel: whether this program has a tile, and the tile."""
    t, X = pl.program_id(0), sizes_ref.shape[0]
    ids = block_ids(0, pl.next_power_of_2(X))
    sizes = pltriton.load(sizes_ref.at[ids], mask=ids < X, other=0)
    tiles = (sizes + rows - 1) // rows
    expert = jnp.sum((jnp.cumsum(tiles) <= t).astype(jnp.int32))
    earlier = ids < expert
    first = jnp.sum(jnp.where(earlier, sizes, 0)) + rows * (t - jnp.sum(jnp.where(earlier, tiles, 0)))
    end = jnp.sum(jnp.where(ids <= expert, sizes, 0))
    at, there = first + jnp.arange(rows, dtype=jnp.int32), t < jnp.sum(tiles)
    real = (at < end) & there
    # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
    nowhere = order_ref.shape[0]
    assignment = pltriton.load(order_ref.at[at], mask=real, other=nowhere)
    return there, _Tile(jnp.minimum(expert, X - 1), jnp.where(real, at, nowhere), real, assignment)


def _up(sizes_ref, order_ref, x_ref, weight_ref, *refs, tiling: Tiling, Y: int):
    """``silu(gate x) * up x`` of a tile, written in the order by expert."""
    (*scale_refs, hidden_ref), Fe = refs, refs[-1].shape[1]
    there, tile = _tile(sizes_ref, order_ref, tiling.rows)
    column = block_ids(pl.program_id(1), tiling.columns)

    @pl.when(there)
    def _():
        token, outputs = jax.lax.div(tile.assignment, jnp.int32(Y)), (column, Fe + column)
        gate, up = _products(x_ref, token, tile, weight_ref, scale_refs, outputs, column < Fe, tiling)
        _store(hidden_ref, tile.at, column, tile.real, gate * jax.nn.sigmoid(gate) * up)


def _down(sizes_ref, order_ref, hidden_ref, factor_ref, weight_ref, *refs, tiling: Tiling):
    """``down`` of a tile, times the weights of the expert for its tokens, written in the order of assignments."""
    (*scale_refs, made_ref), D = refs, refs[-1].shape[1]
    there, tile = _tile(sizes_ref, order_ref, tiling.rows)
    column = block_ids(pl.program_id(1), tiling.columns)

    @pl.when(there)
    def _():
        (made,) = _products(hidden_ref, tile.at, tile, weight_ref, scale_refs, (column,), column < D, tiling)
        factor = pltriton.load(factor_ref.at[tile.assignment], mask=tile.real, other=0.0)
        _store(made_ref, tile.assignment, column, tile.real, made * factor[:, None])


def _products(x_ref, row, tile: _Tile, weight_ref, scale_refs, outputs, inside, tiling: Tiling) -> list[Any]:
    """In a kernel: products of rows of ``x_ref`` with output features of the tile's expert.

    Args:
      row: int32 ``[rows]``.
      scale_refs: the scales of a quantised weight, or nothing.
      outputs: int32 ``[columns]`` each, the output features of each product.
      inside: bool ``[columns]``, which of these there are.

    Returns:
      float32 ``[rows, columns]`` for each of ``outputs``.
    """
    width = x_ref.shape[1]
    depth = min(tiling.depth, max(pl.next_power_of_2(width), 16))
    whole = width % depth == 0

    def mask_of(real, ids):
        mask = each(real, depth)
        return mask if whole else mask & jnp.broadcast_to((ids < width)[None, :], mask.shape)

    def add(i, sums):
        ids = block_ids(i, depth)
        x = pltriton.load(x_ref.at[_grid(row, ids)], mask=mask_of(tile.real, ids), other=0.0)
        added = []
        for total, output in zip(sums, outputs, strict=True):
            weight = _load_weight(weight_ref.at[tile.expert, *_grid(output, ids)], mask_of(inside, ids), x.dtype)
            added.append(total + dot(x, weight, trans_b=True))
        return tuple(added)

    nothing = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, pl.cdiv(width, depth), add, (nothing,) * len(outputs))
    scales = [
        pltriton.load(ref.at[tile.expert, output], mask=inside, other=0.0) for ref in scale_refs for output in outputs
    ]
    return [total * scale[None, :] for total, scale in zip(sums, scales, strict=True)] if scales else list(sums)


def _load_weight(at, mask, dtype):
    """In a kernel: a block of a weight in ``dtype``, 0 where ``mask`` is false."""
    if jnp.issubdtype(at.dtype, jnp.integer) or at.dtype == dtype:
        return pltriton.load(at, mask=mask, other=0).astype(dtype)
    weight = pltriton.load(at, mask=mask).astype(dtype)  # Triton has no fp8 literal for ``other``
    return jnp.where(mask, weight, jnp.zeros((), dtype))


def _store(ref, row, column, real, x):
    """In a kernel: write ``[rows, columns]`` where there is such a row and such a column."""
    inside = jnp.broadcast_to((column < ref.shape[1])[None, :], x.shape)
    pltriton.store(ref.at[_grid(row, column)], x.astype(ref.dtype), mask=each(real, x.shape[1]) & inside)


def _grid(row, column):
    """Indices of the elements at rows ``row [n]`` and columns ``column [m]``: two arrays ``[n, m]``."""
    shape = row.shape[0], column.shape[0]
    return jnp.broadcast_to(row[:, None], shape), jnp.broadcast_to(column[None, :], shape)
