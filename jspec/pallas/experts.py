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

from jspec.pallas import mxfp4
from jspec.pallas.dispatch import by_platform
from jspec.pallas.flash import dot, each
from jspec.pallas.routing import Chosen, group_kernel
from jspec.pallas.triton import block_ids, kernel_call


class Stacked(NamedTuple):
    """The same linear map of each of X experts.

    Attributes:
      weight: ``[X, out, in]``, as it is stored; in MXFP4 (``jspec.pallas.mxfp4``) uint8 ``[X, out, bytes]``.
      scale: float32 ``[X, out]``, by which a quantised weight is multiplied; in MXFP4 uint8 ``[X, out, groups]``. None for
        a weight that is not quantised.
      bias: ``[X, out]``, or None.
    """

    weight: jax.Array
    scale: jax.Array | None = None
    bias: jax.Array | None = None

    @property
    def is_mxfp4(self) -> bool:
        """Whether the weight is stored in MXFP4."""
        return self.weight.dtype == jnp.uint8


def experts(x, chosen: Chosen, gate_up: Stacked, down: Stacked, clamp: float | None = None):
    """``experts_reference``, and on an NVIDIA GPU the kernels."""
    kernel, reference = (functools.partial(f, clamp=clamp) for f in (experts_kernel, experts_reference))
    return by_platform(kernel, reference, x, chosen, gate_up, down)


def experts_reference(x, chosen: Chosen, gate_up: Stacked, down: Stacked, clamp: float | None = None):
    """The weighted sum of what its experts make of each token; an expert is a SwiGLU MLP (Shazeer, 2020).

    Every expert reads every token here, which is as exact as the kernels and slow.

    Args:
      x: ``[M, D]``.
      chosen: the Y experts of each token.
      gate_up: ``[X, 2Fe, D]``, the rows of gate before those of up.
      down: ``[X, D, Fe]``.
      clamp: of ``gated``.

    Returns:
      ``[M, D]`` in the dtype of x. Sums are in float32; the input of ``down`` is rounded to the dtype of x.
    """
    gate, up = jnp.split(_all_products("md,xfd->mxf", x, gate_up), 2, axis=-1)
    made = _all_products("mxf,xdf->mxd", gated(gate, up, clamp).astype(x.dtype), down)
    own = jnp.take_along_axis(made, chosen.expert[:, :, None], axis=1)  # [M, Y, D]
    return jnp.sum(own * chosen.weight[:, :, None], axis=1).astype(x.dtype)


def gated(gate, up, clamp: float | None = None):
    """``silu(gate) * up``, or with ``clamp`` c what gpt-oss (OpenAI, 2025) has in its place.

    That is ``g sigmoid(1.702 g) (u + 1)``, where g is the gate, at most c, and u is up, between -c and c."""
    if clamp is None:
        return gate * jax.nn.sigmoid(gate) * up
    gate = jnp.where(gate > clamp, clamp, gate)  # NaN stays, unlike in a minimum of Triton
    up = jnp.where(up > clamp, clamp, jnp.where(up < -clamp, -clamp, up))
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _all_products(subscripts: str, x, stacked: Stacked):
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    weight, scale = stacked.weight, stacked.scale
    if stacked.is_mxfp4:
        weight, scale = mxfp4.wide(weight, scale, x.shape[-1]), None
    product = jnp.einsum(subscripts, x, weight.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)
    product = product if scale is None else product * scale[None]
    return product if stacked.bias is None else product + stacked.bias.astype(jnp.float32)[None]


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


@functools.partial(
    jax.jit, static_argnames=("clamp", "up_tiling", "down_tiling", "interpret")
)  # layers share one trace
def experts_kernel(
    x,
    chosen: Chosen,
    gate_up: Stacked,
    down: Stacked,
    clamp: float | None = None,
    *,
    up_tiling: Tiling | None = None,
    down_tiling: Tiling | None = None,
    interpret=False,
):
    """``experts_reference`` as two kernels, behind that which groups the assignments."""
    (M, Y), (X, D), Fe = chosen.expert.shape, down.weight.shape[:2], gate_up.weight.shape[1] // 2
    A, default = M * Y, tiling_of(M * Y, X, x.dtype)
    grouped = group_kernel(chosen.expert, X, interpret=interpret)
    run = functools.partial(_run, A=A, X=X, interpret=interpret)
    hidden = jax.ShapeDtypeStruct((A, Fe), x.dtype)
    hidden = run(_up, up_tiling or default, hidden, gate_up, *grouped, x, Y=Y, clamp=clamp)
    made = jax.ShapeDtypeStruct((A, D), jnp.float32)
    made = run(_down, down_tiling or default, made, down, *grouped, hidden, chosen.weight.reshape(A))
    return jnp.sum(made.reshape(M, Y, D), axis=1).astype(x.dtype)


def _run(function, tiling: Tiling, out, stacked: Stacked, *args, A: int, X: int, interpret: bool, **static):
    """The output of a kernel whose programs have a tile and some output features each."""
    hit = min(A, X)  # the most experts that can have a tile of their own
    parts, tree = jax.tree.flatten(stacked)
    return kernel_call(
        function,
        *(*args, *parts),
        grid=(hit + (A - hit) // tiling.rows, pl.cdiv(out.shape[1], tiling.columns)),
        out_shape=out,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
        tree=tree,
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


def _up(sizes_ref, order_ref, x_ref, *refs, tiling: Tiling, tree, Y: int, clamp: float | None):
    """``gated`` of a tile, written in the order by expert."""
    (*parts, hidden_ref), Fe = refs, refs[-1].shape[1]
    there, tile = _tile(sizes_ref, order_ref, tiling.rows)
    column = block_ids(pl.program_id(1), tiling.columns)

    @pl.when(there)
    def _():
        token, outputs = jax.lax.div(tile.assignment, jnp.int32(Y)), (column, Fe + column)
        gate, up = _products(x_ref, token, tile, tree.unflatten(parts), outputs, column < Fe, tiling)
        _store(hidden_ref, tile.at, column, tile.real, gated(gate, up, clamp))


def _down(sizes_ref, order_ref, hidden_ref, factor_ref, *refs, tiling: Tiling, tree):
    """``down`` of a tile, times the weights of the expert for its tokens, written in the order of assignments."""
    (*parts, made_ref), D = refs, refs[-1].shape[1]
    there, tile = _tile(sizes_ref, order_ref, tiling.rows)
    column = block_ids(pl.program_id(1), tiling.columns)

    @pl.when(there)
    def _():
        (made,) = _products(hidden_ref, tile.at, tile, tree.unflatten(parts), (column,), column < D, tiling)
        factor = pltriton.load(factor_ref.at[tile.assignment], mask=tile.real, other=0.0)
        _store(made_ref, tile.assignment, column, tile.real, made * factor[:, None])


def _products(x_ref, row, tile: _Tile, stacked: Stacked, outputs, inside, tiling: Tiling) -> list[Any]:
    """In a kernel: what the tile's expert makes of rows of ``x_ref``, for some of its output features.

    Args:
      row: int32 ``[rows]``.
      stacked: refs.
      outputs: int32 ``[columns]`` each, the output features of each product.
      inside: bool ``[columns]``, which of these there are.

    Returns:
      float32 ``[rows, columns]`` for each of ``outputs``.
    """
    read = _Packed if stacked.is_mxfp4 else _Plain
    operands = read(x_ref, row, tile, stacked, inside, tiling)

    def add(i, sums):
        for x, weights in operands.of(i, outputs):
            sums = tuple(total + dot(x, weight, trans_b=True) for total, weight in zip(sums, weights, strict=True))
        return sums

    nothing = jnp.zeros((tiling.rows, tiling.columns), jnp.float32)
    sums = jax.lax.fori_loop(0, operands.trips, add, (nothing,) * len(outputs))

    def of_outputs(ref):
        return (pltriton.load(ref.at[tile.expert, output], mask=inside, other=0.0) for output in outputs)

    if stacked.scale is not None and not stacked.is_mxfp4:
        sums = (total * scale[None, :] for total, scale in zip(sums, of_outputs(stacked.scale), strict=True))
    if stacked.bias is not None:
        sums = (
            total + bias.astype(jnp.float32)[None, :]
            for total, bias in zip(sums, of_outputs(stacked.bias), strict=True)
        )
    return list(sums)


@dataclasses.dataclass(frozen=True)
class _Operands:
    """In a kernel: what is multiplied in each trip of the loop over input features. Fields are those of ``_products``."""

    x_ref: Any
    row: Any
    tile: _Tile
    stacked: Stacked
    inside: Any
    tiling: Tiling

    @property
    def width(self) -> int:
        """How many input features there are."""
        return self.x_ref.shape[1]

    @property
    def depth(self) -> int:
        """How many of them a trip reads."""
        raise NotImplementedError

    @property
    def trips(self) -> int:
        return pl.cdiv(self.width, self.depth)

    def x(self, ids):
        """Features ``ids [n]`` of the rows, ``[rows, n]``; 0 past the last of them."""
        return pltriton.load(self.x_ref.at[_grid(self.row, ids)], mask=self.mask(self.tile.real, ids), other=0.0)

    def mask(self, real, ids):
        """Which of ``[n, m]`` numbers there are, if ``real [n]`` says which rows there are, and ``ids [m]`` are features."""
        mask = each(real, ids.shape[0])
        every = self.width % self.depth == 0
        return mask if every else mask & jnp.broadcast_to((ids < self.width)[None, :], mask.shape)


class _Plain(_Operands):
    """A weight of one number for each input feature."""

    @property
    def depth(self) -> int:
        return min(self.tiling.depth, max(pl.next_power_of_2(self.width), 16))

    def of(self, i, outputs):
        """Blocks ``x [rows, depth]`` and, for each of ``outputs``, ``[columns, depth]`` to multiply it with."""
        ids = block_ids(i, self.depth)
        x, ref, mask = self.x(ids), self.stacked.weight, self.mask(self.inside, ids)
        weights = [_load_weight(ref.at[self.tile.expert, *_grid(output, ids)], mask, x.dtype) for output in outputs]
        return [(x, weights)]


class _Packed(_Operands):
    """A weight in MXFP4, whose groups of input features are multiplied one after the other."""

    @property
    def depth(self) -> int:
        return max(self.tiling.depth, mxfp4.PAIR)

    def of(self, i, outputs):
        """Blocks ``x [rows, 32]`` and, for each of ``outputs``, ``[columns, 32]`` to multiply it with."""
        pairs = self.depth // mxfp4.PAIR
        for pair in (i * pairs + j for j in range(pairs)):
            both = zip(*(self._groups(pair, output) for output in outputs), strict=True)
            for half, weights in enumerate(both):
                x = self.x(block_ids(2 * pair + half, mxfp4.GROUP))
                yield x, [weight.astype(x.dtype) for weight in weights]

    def _groups(self, pair, output):
        """The weights of the two groups of a pair, bfloat16 ``[columns, 32]`` each."""
        weight_ref, scale_ref, expert = self.stacked.weight, self.stacked.scale, self.tile.expert
        there = self.inside & (pair * mxfp4.PAIR < self.width)
        at = weight_ref.at[expert, *_grid(output, block_ids(pair, mxfp4.GROUP))]
        byte = pltriton.load(at, mask=each(there, mxfp4.GROUP), other=0).astype(jnp.int32)
        for half, code in enumerate((byte & 15, byte >> 4)):
            scale = pltriton.load(scale_ref.at[expert, output, 2 * pair + half], mask=there, other=0)
            yield mxfp4.values(code) * mxfp4.powers(scale.astype(jnp.int32))[:, None]


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
