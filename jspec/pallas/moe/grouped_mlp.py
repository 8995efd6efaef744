"""The MLP of a mixture of experts: each token goes through its own few experts, and each expert's weights are read once.

The assignments of tokens to experts lie side by side by expert (``jspec.pallas.moe.router``). A *tile* is up to
``rows`` of them that belong to one expert: a product of a tile reads the weights of one expert for all of its tokens.
Tokens are neither dropped nor padded to a capacity. A number of the result is summed in the same order whatever other
tokens there are, so that a token's result does not depend on them, as long as M is the same."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.matmul import mxfp4
from jspec.pallas.moe.grouped_matmul import products
from jspec.pallas.moe.router_reference import Routed
from jspec.pallas.moe.tiles import Stacked, Tiling, store, this_tile
from jspec.pallas.triton import block_ids, kernel_call
from jspec.quantization.mxfp4 import PAIR


def experts(x, routed: Routed, gate_up: Stacked, down: Stacked, clamp: float | None = None):
    """``experts_reference``, and on an NVIDIA GPU the kernels."""
    kernel, reference = (functools.partial(f, clamp=clamp) for f in (experts_kernel, experts_reference))
    return by_platform(kernel, reference, x, routed, gate_up, down)


def experts_reference(x, routed: Routed, gate_up: Stacked, down: Stacked, clamp: float | None = None):
    """What its experts make of each token, weighted; an expert is a SwiGLU MLP (Shazeer, 2020). The sum over experts is
    ``rms_norm.whole`` of it, which the norm that follows computes, too.

    Every expert reads every token here, which is as exact as the kernels and slow.

    Args:
      x: ``[M, D]``.
      routed: the Y experts of each token.
      gate_up: ``[X, 2Fe, D]``, the rows of gate before those of up.
      down: ``[X, D, Fe]``.
      clamp: of ``gated``.

    Returns:
      ``[M, Y, D]`` in the dtype of x, to which the input of ``down`` is rounded, too. Sums are in float32.
    """
    gate, up = jnp.split(_all_products("md,xfd->mxf", x, gate_up), 2, axis=-1)
    made = _all_products("mxf,xdf->mxd", gated(gate, up, clamp).astype(x.dtype), down)
    own = jnp.take_along_axis(made, routed.expert[:, :, None], axis=1)  # [M, Y, D]
    return (own * routed.weight[:, :, None]).astype(x.dtype)


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


def tilings_of(A: int, X: int, dtype, stacked: Stacked) -> tuple[Tiling, Tiling]:
    """The tilings for A assignments to X experts: of gate and up, and of down. ``stacked`` is one of these.

    A tile has room for what most experts have. The rest is the fastest of what ``benchmarks.kernels.experts --sweep``
    tried."""
    each_has = A / X
    if stacked.is_mxfp4:
        both = _tiling_of_four_bits(A, each_has)
        return both, both
    depth = 256 // jnp.dtype(dtype).itemsize
    if each_has > 24 and stacked.scale is None and dtype == jnp.bfloat16:
        return Tiling(64, 256, 64, 8, 3), Tiling(128, 256, 64, 8, 4)
    if each_has > 24:
        both = Tiling(64, 64, depth, 4, 4)
    else:
        both = Tiling(16, 32, depth, 2, 4) if each_has <= 8 else Tiling(32, 32, depth, 4, 4)
    return both, both


def _tiling_of_four_bits(A: int, each_has: float) -> Tiling:
    if A <= 32:  # few programs: each has little to do, and reads much of it at once
        return Tiling(16, 32, 3 * PAIR, 2, 3)
    if each_has <= 12:
        return Tiling(16, 64, PAIR, 2, 4)
    if each_has <= 24:
        return Tiling(32, 64, PAIR, 2, 4)
    return Tiling(64 if each_has <= 64 else 128, 64, PAIR, 4, 3)


@functools.partial(
    jax.jit, static_argnames=("clamp", "up_tiling", "down_tiling", "interpret")
)  # layers share one trace
def experts_kernel(
    x,
    routed: Routed,
    gate_up: Stacked,
    down: Stacked,
    clamp: float | None = None,
    *,
    up_tiling: Tiling | None = None,
    down_tiling: Tiling | None = None,
    interpret=False,
):
    """``experts_reference`` as two kernels."""
    (M, Y), X, D, Fe = routed.expert.shape, routed.sizes.shape[0], x.shape[1], gate_up.num_outputs // 2
    A = M * Y
    up_default, down_default = tilings_of(A, X, x.dtype, gate_up)
    grouped = routed.sizes, routed.order
    run = functools.partial(_run, A=A, X=X, interpret=interpret)
    hidden = jax.ShapeDtypeStruct((A, Fe), x.dtype)
    hidden = run(_up, up_tiling or up_default, hidden, gate_up, *grouped, x, Y=Y, clamp=clamp)
    made = jax.ShapeDtypeStruct((A, D), x.dtype)
    made = run(_down, down_tiling or down_default, made, down, *grouped, hidden, routed.weight.reshape(A))
    return made.reshape(M, Y, D)


def _run(function, tiling: Tiling, out, stacked: Stacked, *args, A: int, X: int, interpret: bool, **static):
    """The output of a kernel whose programs have a tile and some output features each."""
    hit = min(A, X)  # the most experts that can have a tile of their own
    return kernel_call(
        function,
        *(*args, stacked),
        grid=(hit + (A - hit) // tiling.rows, pl.cdiv(out.shape[1], tiling.columns)),
        out_shape=out,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
        tiling=tiling,
        **static,
    )


def _up(sizes_ref, order_ref, x_ref, stacked: Stacked, hidden_ref, *, tiling: Tiling, Y: int, clamp: float | None):
    """``gated`` of a tile, written in the order by expert; ``stacked`` has refs."""
    Fe = hidden_ref.shape[1]
    there, tile = this_tile(sizes_ref, order_ref, tiling.rows)
    column = block_ids(pl.program_id(1), tiling.columns)

    @pl.when(there)
    def _():
        token, outputs = jax.lax.div(tile.assignment, jnp.int32(Y)), (column, Fe + column)
        gate, up = products(x_ref, token, tile, stacked, outputs, tiling.inside(column, Fe), tiling)
        store(hidden_ref, tile.at, column, tile.real, gated(gate, up, clamp))


def _down(sizes_ref, order_ref, hidden_ref, factor_ref, stacked: Stacked, made_ref, *, tiling: Tiling):
    """``down`` of a tile, times the weights of the expert for its tokens, written in the order of assignments."""
    D = made_ref.shape[1]
    there, tile = this_tile(sizes_ref, order_ref, tiling.rows)
    column = block_ids(pl.program_id(1), tiling.columns)

    @pl.when(there)
    def _():
        (made,) = products(hidden_ref, tile.at, tile, stacked, (column,), tiling.inside(column, D), tiling)
        factor = pltriton.load(factor_ref.at[tile.assignment], mask=tile.real, other=0.0)
        store(made_ref, tile.assignment, column, tile.real, made * factor[:, None])
