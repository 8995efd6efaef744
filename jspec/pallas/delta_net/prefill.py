"""Prefill of a gated delta net: the recurrence over segments of prompts.

On an NVIDIA GPU, one kernel does for all chunks at once what does not depend on the state. With the formulas and letters of
``jspec.pallas.delta_net.chunked``, and X = (I + A)^-1, it makes X beta V, W = X (beta exp(G) K) and Q K^T * D. A second one
goes through the chunks of a head one after the other, all segments of a chain, with some columns of S in registers, where
U = X beta V - W S."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.delta_net.chunked import CHUNK, chunked
from jspec.pallas.delta_net.projections import split_heads
from jspec.pallas.delta_net.reference import NORM_EPS
from jspec.pallas.delta_net.state import DeltaState, PrefillRows, per_row
from jspec.pallas.delta_net.verify import has_kernel
from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import is_interpreted, kernel_call, multiply_add, tile_indices


class PrefillTiling(NamedTuple):
    """How the work of the second kernel is cut.

    Attributes:
      values: columns of S that a program instance has, a power of two.
      keys: lines of S in a tile, a power of two.
      prepare_warps, num_warps: warps of 32 threads that run one instance of the first and of the second kernel.
    """

    values: int
    keys: int
    prepare_warps: int
    num_warps: int


TILING = PrefillTiling(32, 64, 8, 4)


def prefill(state: DeltaState, rows: PrefillRows, qkv, g, beta) -> tuple[jax.Array, DeltaState]:
    """``prefill_reference``, and on an NVIDIA GPU the kernels, which are for sizes of keys and values that are powers of
    two."""
    if not has_kernel(*state.S.shape[2:]):
        return prefill_reference(state, rows, qkv, g, beta)
    return by_platform(prefill_kernel, prefill_reference, state, rows, qkv, g, beta)


def prefill_reference(state: DeltaState, rows: PrefillRows, qkv, g, beta) -> tuple[jax.Array, DeltaState]:
    """Outputs of the segments of a pass, and the state with S behind the valid tokens of each chain.

    A row has nothing pending behind a segment: ``accepted`` of its first verify pass is 0.

    Args:
      state: of the layer; its columns belong to ``convolve_prefill`` and stay as they are.
      rows: of the pass.
      qkv: ``[B, T, Cc]``, queries, keys and values as the convolution gives them: not normed.
      g, beta: float32 ``[B, T, Nv]``.

    Returns:
      outputs ``[B, T, Nv, Dv]`` in the dtype of qkv, which are 0 for tokens that are not valid, and the state.
    """
    Bs = state.S.shape[0]
    S = jnp.where(per_row(rows.fresh, state.S), 0.0, state.S[jnp.clip(rows.row, 0, Bs - 1)])
    tokens = jnp.where(rows.is_live(Bs), rows.tokens, 0)
    o, S = chunked(*split_heads(qkv, state.heads), g, beta, S, tokens, rows.follows)
    return o.astype(qkv.dtype), dataclasses.replace(state, S=state.S.at[rows.written(Bs)].set(S, mode="drop"))


class _Chains(NamedTuple):
    """What the second kernel needs of the rows of a pass, int32 ``[B]``.

    Attributes:
      row, tokens, fresh: of ``PrefillRows``; ``tokens`` is 0 in entries that are not live.
      length: of the chain that begins there, in entries; 0 for entries that follow.
    """

    row: Any
    tokens: Any
    fresh: Any
    length: Any


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def prefill_kernel(
    state: DeltaState, rows: PrefillRows, qkv, g, beta, *, tiling: PrefillTiling = TILING, interpret=False
) -> tuple[jax.Array, DeltaState]:
    """``prefill_reference`` as two kernels. S is updated in place if the caller donates it."""
    (B, T, _), (Nk, Nv, Dk, Dv), Bs = qkv.shape, state.heads, state.S.shape[0]
    count, values = pl.cdiv(T, CHUNK), min(tiling.values, Dv)
    tokens = jnp.where(rows.is_live(Bs), rows.tokens, 0)
    chains = _Chains(rows.row, tokens, rows.fresh.astype(jnp.int32), rows.chain_lengths(Bs))
    f32 = lambda *last: jax.ShapeDtypeStruct((B, Nv, count * CHUNK, *last), jnp.float32)  # noqa: E731
    prepared: Any = kernel_call(
        _prepare_chunks,
        *(tokens, qkv, g, beta),
        grid=(count, Nv, B),
        out_shape=[f32(Dk), f32(Dv), f32(CHUNK), f32()],
        num_warps=tiling.prepare_warps,
        num_stages=1,
        interpret=interpret,
        sizes=(Nk, Dk, Dv),
    )
    before = (chains, qkv, *prepared)
    made: Any = kernel_call(
        _run_chunks,
        *before,
        state.S,
        grid=(Dv // values, Nv, B),
        out_shape=[
            jax.ShapeDtypeStruct((B, T, Nv, Dv), qkv.dtype),
            jax.ShapeDtypeStruct(state.S.shape, state.S.dtype),
        ],
        num_warps=tiling.num_warps,
        num_stages=1,
        interpret=interpret,
        aliases={len(jax.tree.leaves(before)): 1},
        values=values,
        keys=min(tiling.keys, Dk),
        num_key_heads=Nk,
    )
    o, S = made
    return o, dataclasses.replace(state, S=S)


def _prepare_chunks(
    tokens_ref, qkv_ref, g_ref, beta_ref, W_ref, U_ref, scores_ref, total_ref, *, sizes: tuple[int, int, int]
):
    """What a chunk of one head contributes without regard to the state."""
    (Nk, Dk, Dv), (_, Nv, _, _) = sizes, W_ref.shape
    head, b, tokens = pl.program_id(1), pl.program_id(2), tokens_ref[pl.program_id(2)]
    token = pl.program_id(0) * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
    key_head = jax.lax.div(head, jnp.int32(Nv // Nk))

    def load(first, width):
        channel = first + jnp.arange(width, dtype=jnp.int32)
        return _load_lines(qkv_ref, b, token, channel, tokens)

    @pl.when(pl.program_id(0) * CHUNK < tokens)
    def _():
        of_token = lambda ref: pltriton.load(ref.at[b, token, head], mask=token < tokens, other=0.0)  # noqa: E731
        g, beta = of_token(g_ref), of_token(beta_ref)
        q, k = load(key_head * Dk, Dk), load(Nk * Dk + key_head * Dk, Dk)
        q, k = q * (_factor([q]) * Dk**-0.5)[:, None], k * _factor([k])[:, None]
        line, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
        square = (CHUNK, CHUNK)
        total = jnp.sum(jnp.where(column <= line, jnp.broadcast_to(g[None, :], square), 0.0), axis=1)
        across = jnp.sum(jnp.where(line <= column, jnp.broadcast_to(g[:, None], square), 0.0), axis=0)  # the same sums
        decay = jnp.exp(jnp.where(column <= line, total[:, None] - across[None, :], -jnp.inf))
        A = jnp.where(column < line, beta[:, None] * _dot(k, k, b_axis=1) * decay, 0.0)
        X = _inverse(A, line, column)
        at = lambda width: (b, head, *tile_indices(token, jnp.arange(width, dtype=jnp.int32)))  # noqa: E731
        pltriton.store(W_ref.at[at(Dk)], _dot(X, k * (beta * jnp.exp(total))[:, None]))
        pltriton.store(U_ref.at[at(Dv)], _dot(X, load(2 * Nk * Dk + head * Dv, Dv) * beta[:, None]))
        pltriton.store(scores_ref.at[at(CHUNK)], _dot(q, k, b_axis=1) * decay)
        pltriton.store(total_ref.at[b, head, token], total)


def _inverse(A, line, column):
    """In a kernel: ``(I + A)^-1`` of a strictly lower triangular matrix, by forward substitution, a line at a time."""

    def eliminate(i, X):
        of_column = jnp.sum(jnp.where(column == i, A, 0.0), axis=1)
        of_line = jnp.sum(jnp.where(line == i, X, 0.0), axis=0)
        return multiply_add(-of_column[:, None], of_line[None, :], X)

    return jax.lax.fori_loop(0, CHUNK - 1, eliminate, jnp.where(line == column, 1.0, 0.0))


def _dot(a, b, a_axis: int = 1, b_axis: int = 0):
    """In a kernel: the product of two matrices, summed over these axes, as exact as products of float32 are.

    Tensor cores make it of six products of bfloat16 matrices, whose sums are the float32 ones."""
    precision = jax.lax.Precision.HIGHEST if is_interpreted() else jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
    axes = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def _load_lines(qkv_ref, b, token, channel, tokens):
    """In a kernel: some channels of some tokens, float32; zeros for tokens that are not valid."""
    token, channel = tile_indices(token, channel)
    return pltriton.load(qkv_ref.at[b, token, channel], mask=token < tokens, other=0.0).astype(jnp.float32)


def _factor(parts):
    """In a kernel: what makes each line of length 1, of matrices side by side."""
    squares = [jnp.sum(x * x, axis=1) for x in parts]
    return jax.lax.rsqrt(functools.reduce(jnp.add, squares) + NORM_EPS)


def _run_chunks(
    chains: _Chains,
    qkv_ref,
    W_ref,
    U_ref,
    scores_ref,
    total_ref,
    S_ref,
    o_ref,
    S_out_ref,
    *,
    values: int,
    keys: int,
    num_key_heads: int,
):
    """The chunks of one head of one chain, one after the other, for some columns of S."""
    (_, Nv, Dk, _), T, Nk = S_ref.shape, qkv_ref.shape[1], num_key_heads
    most = pl.cdiv(T, CHUNK)  # chunks of a segment
    head, first = pl.program_id(1), pl.program_id(2)
    length = chains.length[first]
    last = first + jnp.maximum(length - 1, 0)
    is_live = (length > 0) & (chains.tokens[first] > 0)
    row = jnp.where(is_live, chains.row[first], 0)
    first_key = jax.lax.div(head, jnp.int32(Nv // Nk)) * Dk
    value = pl.program_id(0) * values + jnp.arange(values, dtype=jnp.int32)
    lines = [start + jnp.arange(keys, dtype=jnp.int32) for start in range(0, Dk, keys)]
    places = [(row, head, *tile_indices(line, value)) for line in lines]
    chunk = jnp.arange(CHUNK, dtype=jnp.int32)

    def write(b, token, x):
        line, column = tile_indices(token, value)
        # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
        line = jnp.where(line < T, line, T)
        pltriton.store(o_ref.at[b, line, head, column], x.astype(o_ref.dtype), mask=line < T)

    def advance(i, tiles):
        b, c = first + jax.lax.div(i, jnp.int32(most)), jax.lax.rem(i, jnp.int32(most))
        token, tokens = c * CHUNK + chunk, chains.tokens[b]
        load = lambda ref, ids: pltriton.load(ref.at[(b, head, *tile_indices(token, ids))])  # noqa: E731
        total, end = pltriton.load(total_ref.at[b, head, token]), total_ref[b, head, c * CHUNK + CHUNK - 1]
        q, k = (
            [_load_lines(qkv_ref, b, token, start + first_key + line, tokens) for line in lines]
            for start in (0, Nk * Dk)
        )
        of_q, of_k = _factor(q) * (jnp.exp(total) * Dk**-0.5), _factor(k) * jnp.exp(end - total)
        U = load(U_ref, value)
        for line, tile in zip(lines, tiles, strict=True):
            U = U - _dot(load(W_ref, line), tile)
        o = _dot(load(scores_ref, chunk), U)
        for x, tile in zip(q, tiles, strict=True):
            o = o + _dot(x * of_q[:, None], tile)
        write(b, token, o)
        change = [_dot(x * of_k[:, None], U, a_axis=0) for x in k]
        return tuple(multiply_add(jnp.exp(end), tile, x) for tile, x in zip(tiles, change, strict=True))

    known = jnp.broadcast_to(is_live & (chains.fresh[first] == 0), (keys, values))
    tiles = tuple(pltriton.load(S_ref.at[at], mask=known, other=0.0) for at in places)
    # All segments of a chain are full but the last one.
    of_last = jnp.where(length > 0, jax.lax.div(chains.tokens[last] + (CHUNK - 1), jnp.int32(CHUNK)), most)
    trips = jnp.where(is_live, (length - 1) * most + of_last, 0)
    tiles = jax.lax.fori_loop(jnp.int32(0), trips, advance, tiles)

    @pl.when(is_live)
    def _():
        for at, tile in zip(places, tiles, strict=True):
            pltriton.store(S_out_ref.at[at], tile)

    def write_zeros(c, nothing):
        write(last, c * CHUNK + chunk, jnp.zeros((CHUNK, values), jnp.float32))
        return nothing

    jax.lax.fori_loop(of_last, jnp.int32(most), write_zeros, jnp.int32(0))
