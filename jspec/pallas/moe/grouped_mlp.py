"""The MLP of a mixture of experts: each token goes through its own few experts, and each expert's weights are read once.

The assignments of tokens to experts lie side by side by expert (``jspec.pallas.moe.router``). A *tile* is up to
``assignments`` of them that belong to one expert: its matmul reads the weights of one expert for all of its tokens.
Tokens are neither dropped nor padded to a capacity. A number of the result is summed in one order whatever other tokens
there are and however many, so that a token's result does not depend on them: the order follows from the weight alone
(``jspec.pallas.moe.grouped_matmul``), and M only chooses the tiling."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import KernelRow, by_platform
from jspec.pallas.moe.activation import gated
from jspec.pallas.moe.grouped_matmul import grouped_matmul
from jspec.pallas.moe.operands import read_in_order
from jspec.pallas.moe.router_reference import Routed
from jspec.pallas.moe.tiles import ExpertMap, ExpertTiling, num_tiles, store_tile, tile_of_instance
from jspec.pallas.sums import linear, rows_product
from jspec.pallas.triton import kernel_call
from jspec.pallas.weights.tiles import with_bits_of_scales
from jspec.pallas.weights.unpack import ORDER_INPUTS, place_in_mma_order, to_mma_order
from jspec.quantization import codes, unpack_pairs
from jspec.quantization.mxfp4_pairs import PAIR
from jspec.quantization.weight import Weight

# Bytes of the weight of an expert that is still in the L2 cache when the next tile of the expert is multiplied.
_STAYS_IN_CACHE = 4 << 20
# Assignments of a tile, above which XLA puts x of weights of eight bits into the order in which kernels read it, in a launch
# of its own. The kernels do so for fewer, each for its tile.
_FEW = 32


def grouped_mlp(
    x,
    routed: Routed,
    gate_up: ExpertMap,
    down: ExpertMap,
    first=None,
    *,
    clamp: float | None = None,
    activation: str = "silu",
):
    """``grouped_mlp_reference``, and on an NVIDIA GPU the kernels."""
    kernel, reference = (
        functools.partial(f, clamp=clamp, activation=activation) for f in (grouped_mlp_kernel, grouped_mlp_reference)
    )
    return by_platform(kernel, reference, x, routed, gate_up, down, first)


def grouped_mlp_reference(
    x,
    routed: Routed,
    gate_up: ExpertMap,
    down: ExpertMap,
    first=None,
    *,
    clamp: float | None = None,
    activation: str = "silu",
):
    """The outputs of each token's experts, weighted; an expert is a gated MLP (Shazeer, 2020). Their sum is
    that of ``PartialSums``, which the norm that follows computes.

    Every expert reads every token here, which is as exact as the kernels and slow.

    Args:
      x: ``[M, D]``.
      routed: the Y experts of each token, among all that there are.
      gate_up: ``[X, 2Fe, D]``, the output features of gate before those of up, of X experts.
      down: ``[X, D, Fe]``.
      first: int32 ``[1]``, the first of these X experts among all; None if they are all. The outputs of other experts are
        zeros.
      clamp, activation: of ``gated``.

    Returns:
      ``[M, Y, D]`` in the dtype of x, to which the input of ``down`` is rounded, too. Sums are in float32.
    """
    gate, up = jnp.split(_matmul_all(x, gate_up), 2, axis=-1)
    outputs = jnp.moveaxis(_matmul_all(gated(gate, up, clamp, activation).astype(x.dtype), down), 0, 1)
    expert = routed.expert if first is None else routed.expert - first[0]
    chosen = jnp.take_along_axis(outputs, expert[:, :, None], axis=1, mode="clip")  # [M, Y, D]
    made = (chosen * routed.weight[:, :, None]).astype(x.dtype)
    here = (expert >= 0) & (expert < gate_up.weight.shape[0])
    return made if first is None else jnp.where(here[:, :, None], made, jnp.zeros((), x.dtype))


def _matmul_all(x, of: ExpertMap):
    """The results of all experts, float32 ``[X, M, out]``, of inputs ``[X, M, in]``, or of the same for
    all ``[M, in]``."""
    weight, scale = of.weight.numbers, of.weight.scale
    if of.weight.in_pairs:
        weight, scale = unpack_pairs.dequantize(weight, scale, of.weight.inputs), None
    elif of.weight.in_groups:  # float32 holds numbers and their products with x: only sums are rounded
        wide = of.weight.multiplied() if x.dtype == jnp.bfloat16 else of.weight.dequantize()
        weight, scale, x = wide, None, x.astype(jnp.float32)
    weight = weight.astype(x.dtype)
    if x.ndim == 3:
        product = rows_product(x, weight, -1)
    else:
        product = linear(x, weight.reshape(-1, x.shape[1]), jnp.float32)
        product = jnp.moveaxis(product.reshape(len(x), *weight.shape[:2]), 1, 0)
    product = product if scale is None else product * scale[:, None]
    return product if of.bias is None else product + of.bias.astype(jnp.float32)[:, None]


def tilings_of(A: int, X: int, dtype, weight: Weight) -> tuple[ExpertTiling, ExpertTiling]:
    """The tilings for A assignments to X experts, which are all that there are: of gate and up, and of down. ``weight``
    is that of one of these.

    A tile has room for the assignments of most experts. The other sizes are the fastest of ``benchmarks.kernels.experts
    --sweep``."""
    per_expert, form = A / X, weight.form
    if weight.in_pairs:
        down = _tiling_of_four_bits(A, per_expert)
        up = dataclasses.replace(down, joined=A <= 32 or down.assignments == 64)
        return dataclasses.replace(up, outputs=16, num_stages=4) if A <= 8 else up, down
    depth, plain = 256 // jnp.dtype(dtype).itemsize, form is None and dtype == jnp.bfloat16
    if per_expert > 24:
        if not plain:
            return _of_both(ExpertTiling(64, 64, depth, 4, 4))
        stays = 2 * math.prod(weight.shape[1:]) <= _STAYS_IN_CACHE
        return ExpertTiling(64, 256, 64, 8, 3, stays), ExpertTiling(128, 256, 64, 8, 4, stays)
    if weight.in_groups and not weight.packed and dtype == jnp.bfloat16:  # four warps multiply 64 outputs at once
        down = ExpertTiling(32 if per_expert > 12 else 16, 64, depth, 4, 3)
        return dataclasses.replace(down, outputs=32, joined=True) if A <= 16 else down, down
    if weight.packed and dtype == jnp.bfloat16:
        if per_expert > 8:
            return _of_both(ExpertTiling(32, 64, depth, 4, 4))
        return ExpertTiling(16, 32, depth, 4, 5, joined=True), ExpertTiling(16, 64, depth, 4, 4)
    if per_expert <= 8:
        return _of_both(ExpertTiling(16, 32, depth, 2, 4))
    if plain:
        return ExpertTiling(32, 64, depth, 4, 3), ExpertTiling(32, 32, depth, 2, 3)
    return _of_both(ExpertTiling(32, 32, depth, 4, 4))


def _of_both(tiling: ExpertTiling) -> tuple[ExpertTiling, ExpertTiling]:
    return tiling, tiling


def _tiling_of_four_bits(A: int, per_expert: float) -> ExpertTiling:
    if A <= 32:  # few instances: each has little to do, and reads much of it at once
        return ExpertTiling(16, 32, 3 * PAIR, 2, 3)
    if per_expert <= 12:
        return ExpertTiling(16, 64, PAIR, 2, 4)
    if per_expert <= 24:
        return ExpertTiling(32, 64, PAIR, 2, 4)
    return ExpertTiling(64 if per_expert <= 64 else 128, 64, PAIR, 4, 3)


@functools.partial(
    jax.jit, static_argnames=("clamp", "activation", "up_tiling", "down_tiling", "interpret")
)  # layers share one trace
def grouped_mlp_kernel(
    x,
    routed: Routed,
    gate_up: ExpertMap,
    down: ExpertMap,
    first=None,
    *,
    clamp: float | None = None,
    activation: str = "silu",
    up_tiling: ExpertTiling | None = None,
    down_tiling: ExpertTiling | None = None,
    interpret=False,
):
    """``grouped_mlp_reference`` as two kernels."""
    how = {"clamp": clamp, "activation": activation, "tiling": up_tiling, "interpret": interpret}
    hidden = hidden_kernel(x, routed, gate_up, first, down=down.weight, **how)
    return made_kernel(hidden, routed, down, first, tiling=down_tiling, interpret=interpret)


EXPERTS = KernelRow("experts", grouped_mlp_kernel, lambda *_: iter(()), order="chain")


def hidden_kernel(
    x,
    routed: Routed,
    gate_up: ExpertMap,
    first=None,
    *,
    down: Weight,
    clamp: float | None = None,
    activation: str = "silu",
    tiling: ExpertTiling | None = None,
    interpret=False,
):
    """``gated`` of all assignments, in the order by expert, ``[A, Fe]``; ``_as_read`` by ``down``."""
    (M, Y), Fe = routed.expert.shape, gate_up.weight.shape[1] // 2
    tiling = tiling or tilings_of(M * Y, routed.sizes.shape[0], x.dtype, gate_up.weight)[0]
    if gate_up.weight.packed or tiling.assignments > _FEW:
        x, ordered = _as_read(x, gate_up.weight)
    else:
        ordered = False
    by_kernel = Fe % (codes.BLOCK if down.packed else ORDER_INPUTS) == 0  # it writes what the second one reads
    how = {"Y": Y, "clamp": clamp, "activation": activation, "ordered": ordered}
    shape = jax.ShapeDtypeStruct((M * Y, Fe), x.dtype)
    place = functools.partial(_place_as_read, weight=down, dtype=x.dtype, width=Fe) if by_kernel else None
    hidden = _run(routed, first, _up, tiling, shape, gate_up, x, **how, place=place, interpret=interpret)
    return hidden if by_kernel else _as_read(hidden, down)[0]


def made_kernel(
    hidden,
    routed: Routed,
    down: ExpertMap,
    first=None,
    *,
    tiling: ExpertTiling | None = None,
    interpret=False,
):
    """The output ``[M, Y, D]`` of experts, from the result of ``hidden_kernel``."""
    (M, Y), D = routed.expert.shape, down.weight.shape[1]
    tiling = tiling or tilings_of(M * Y, routed.sizes.shape[0], hidden.dtype, down.weight)[1]
    shape, factor = jax.ShapeDtypeStruct((M * Y, D), hidden.dtype), routed.weight.reshape(M * Y)
    ordered = _is_ordered(hidden, down.weight)
    made = _run(routed, first, _down, tiling, shape, down, hidden, factor, ordered=ordered, interpret=interpret)
    return made.reshape(M, Y, D)


def _as_read(x, weight: Weight) -> tuple[jax.Array, bool]:
    """x as products with ``weight`` read it, and whether it is in the order of ``to_mma_order``. Codes of four bits read the
    two results of ``codes.in_code_order`` side by side."""
    x = jnp.concatenate(codes.in_code_order(x), axis=1) if weight.packed else x
    ordered = _is_ordered(x, weight)
    return to_mma_order(x) if ordered else x, ordered


def _is_ordered(x, weight: Weight) -> bool:
    """Whether ``_as_read`` has lines of this width in the order of ``to_mma_order``."""
    return read_in_order(weight, x.dtype) and x.shape[1] % ORDER_INPUTS == 0


def _place_as_read(i, *, weight: Weight, dtype, width: int):
    """Where ``_as_read`` has input i of ``width``, which fill whole blocks."""
    place = codes.place_of(i, width) if weight.packed else i
    return place_in_mma_order(place) if read_in_order(weight, dtype) else place


def _run(
    routed: Routed,
    first,
    function,
    tiling: ExpertTiling,
    out,
    of: ExpertMap,
    *args,
    interpret: bool,
    **static,
):
    """The output of a kernel whose program instances have a tile and some output features each."""
    if routed.expert.shape[0] == 1:
        tiles = len(routed.order)
    else:  # the last tile of other experts' assignments may not be full
        tiles = num_tiles(len(routed.order), of.weight.shape[0], tiling.assignments) + (first is not None)
    blocks = pl.cdiv(out.shape[1], tiling.outputs)
    return kernel_call(
        function,
        *(routed.expert, routed.sizes, routed.order, first, *args, of._replace(weight=with_bits_of_scales(of.weight))),
        grid=(blocks, tiles) if tiling.outputs_first else (tiles, blocks),
        out_shape=out,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
        **static,
    )


def _up(
    expert_ref,
    sizes_ref,
    order_ref,
    first_ref,
    x_ref,
    of: ExpertMap,
    hidden_ref,
    *,
    tiling: ExpertTiling,
    Y: int,
    clamp: float | None,
    activation: str,
    ordered: bool,
    place,
):
    """``gated`` of a tile, written in the order by expert, each feature where ``place`` says; ``of`` has refs."""
    Fe = hidden_ref.shape[1]
    has_tile, tile = tile_of_instance(expert_ref, sizes_ref, order_ref, first_ref, tiling, of.weight.shape[0])
    output, (features, mask) = tiling.output_ids(), _gate_and_up(tiling, Fe)

    @pl.when(has_tile)
    def _():
        token = jax.lax.div(tile.assignment, jnp.int32(Y))
        products = grouped_matmul(x_ref, token, tile, of, features, mask, tiling, ordered)
        gate, up = _halves(*products) if tiling.joined else products
        column = None if place is None else place(output)
        store_tile(hidden_ref, tile.place, output, tile.real, gated(gate, up, clamp, activation), column)


def _gate_and_up(tiling: ExpertTiling, Fe: int) -> tuple[tuple, Any]:
    """In a kernel: the outputs of each product of an instance, among the 2Fe of gate and up; and which there are."""
    if not tiling.joined:
        output = tiling.output_ids()
        return (output, Fe + output), tiling.output_mask(output, Fe)
    output, ids = tiling.output_ids(times=2), jnp.arange(2 * tiling.outputs, dtype=jnp.int32)
    return (jnp.where(ids < tiling.outputs, output, Fe + output),), tiling.output_mask(output, Fe)


def _halves(x):
    """In a kernel: the first and the second half of each line of ``[m, 2n]``."""
    x = x.reshape(x.shape[0], 2, x.shape[1] // 2)
    half = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return [jnp.sum(jnp.where(half == i, x, 0.0), axis=1) for i in (0, 1)]


def _down(
    expert_ref,
    sizes_ref,
    order_ref,
    first_ref,
    hidden_ref,
    factor_ref,
    of: ExpertMap,
    made_ref,
    *,
    tiling: ExpertTiling,
    ordered: bool,
):
    """``down`` of a tile, times the weights of the expert for its tokens, written in the order of assignments. Outputs of
    experts that are elsewhere are zeros."""
    D = made_ref.shape[1]
    has_tile, tile = tile_of_instance(expert_ref, sizes_ref, order_ref, first_ref, tiling, of.weight.shape[0])
    output = tiling.output_ids()

    @pl.when(has_tile)
    def _():
        mask = tiling.output_mask(output, D)
        (made,) = grouped_matmul(hidden_ref, tile.place, tile, of, (output,), mask, tiling, ordered)
        factor = pltriton.load(factor_ref.at[tile.assignment], mask=tile.real, other=0.0)
        store_tile(made_ref, tile.assignment, output, tile.real, made * factor[:, None])

    if first_ref is not None:

        @pl.when(jnp.logical_not(has_tile))
        def _():
            zeros = jnp.zeros((tiling.assignments, tiling.outputs), jnp.float32)
            store_tile(made_ref, tile.assignment, output, tile.real, zeros)
