"""Prefill of a gated delta net: the recurrence over segments of prompts.

On an NVIDIA GPU, the kernels of ``jspec.pallas.delta_net.prepare`` do for all chunks at once what does not depend on the
state. The one here goes through the chunks of a head one after the other, all segments of a chain, with some columns of S in
registers. With the formulas and letters of ``jspec.pallas.delta_net.chunked``, U = X (beta V - beta exp(G) K S), where X is
(I + A)^-1."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.delta_net.chunked import CHUNK, chunked
from jspec.pallas.delta_net.prepare import Prepared, dot, load_tokens, prepare, split
from jspec.pallas.delta_net.projections import split_heads
from jspec.pallas.delta_net.state import DeltaState, PrefillRows, per_row
from jspec.pallas.delta_net.verify import has_kernel
from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import kernel_call, tile_indices


class PrefillTiling(NamedTuple):
    """How the work of the kernels is cut.

    Attributes:
      values: columns of S that a program instance has, a power of two.
      keys: places of keys that are read at a time, lines of S in a tile; a power of two.
      prepare_keys, prepare_warps: ``keys`` and ``num_warps`` of ``prepare``.
      num_warps: warps of 32 threads that run one instance.
      num_stages: with 2 an instance reads what the next chunk needs while it computes one.
    """

    values: int
    keys: int
    prepare_keys: int
    prepare_warps: int
    num_warps: int
    num_stages: int


TILING = PrefillTiling(values=64, keys=32, prepare_keys=128, prepare_warps=4, num_warps=4, num_stages=2)
_MIN_VALUES = 16
_INSTANCES = 2 * 132  # which the multiprocessors of an H100 or H200 run at once


def tiling_of(Nv: int, Dv: int) -> PrefillTiling:
    """The tiling for so many value heads of this size.

    An instance goes through all chunks of a chain, so a prompt takes as long as one instance. Instances have as few columns
    of S as possible while all of them run at once. Rows and tokens of a pass do not count here, because numbers are added up
    as the tiling says."""
    values = TILING.values
    while values > _MIN_VALUES and Nv * pl.cdiv(Dv, values // 2) <= _INSTANCES:
        values //= 2
    return TILING._replace(values=values)


def prefill(state: DeltaState, rows: PrefillRows, qkv, g, beta) -> tuple[jax.Array, DeltaState]:
    """``prefill_reference``, and on an NVIDIA GPU the kernels, which are for sizes of keys and values that are powers of
    two."""
    supported = has_kernel(*state.S.shape[2:])
    return by_platform(prefill_kernel, prefill_reference, state, rows, qkv, g, beta, supported=supported)


def prefill_reference(state: DeltaState, rows: PrefillRows, qkv, g, beta) -> tuple[jax.Array, DeltaState]:
    """Outputs of the segments of a pass, and the state with S behind the valid tokens of each chain.

    A row has nothing pending behind a segment: ``accepted`` of its first verify pass is 0.

    Args:
      state: of the layer; its columns belong to ``convolve_prefill`` and stay as they are.
      rows: of the pass.
      qkv, g, beta: as of ``verify_reference``, with any T.

    Returns:
      outputs ``[B, T, Nv, Dv]`` in the dtype of qkv, which are 0 for tokens that are not valid, and the state.
    """
    Bs = state.S.shape[0]
    S = jnp.where(per_row(rows.fresh, state.S), 0.0, state.S[jnp.clip(rows.row, 0, Bs - 1)])
    tokens = jnp.where(rows.is_live(Bs), rows.tokens, 0)
    o, S = chunked(*split_heads(qkv, state.heads), g, beta, S, tokens, rows.follows)
    return o.astype(qkv.dtype), dataclasses.replace(state, S=state.S.at[rows.written(Bs)].set(S, mode="drop"))


class _Chains(NamedTuple):
    """What ``_run_chunks`` needs of the rows of a pass, int32 ``[B]``.

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
    state: DeltaState, rows: PrefillRows, qkv, g, beta, *, tiling: PrefillTiling | None = None, interpret=False
) -> tuple[jax.Array, DeltaState]:
    """``prefill_reference`` as three kernels. S is updated in place if the caller donates it.

    Args:
      tiling: ``tiling_of`` the heads by default.
    """
    (B, T, _), (Nk, Nv, Dk, Dv), Bs = qkv.shape, state.heads, state.S.shape[0]
    tiling = tiling or tiling_of(Nv, Dv)
    values = min(tiling.values, Dv)
    tokens = jnp.where(rows.is_live(Bs), rows.tokens, 0)
    chains = _Chains(rows.row, tokens, rows.fresh.astype(jnp.int32), rows.chain_lengths(Bs))
    prepared = prepare(
        *(tokens, qkv, g, beta, (Nk, Dk)),
        keys=min(tiling.prepare_keys, Dk),
        num_warps=tiling.prepare_warps,
        interpret=interpret,
    )
    before = (chains, qkv, prepared)
    made: Any = kernel_call(
        _run_chunks,
        *before,
        state.S,
        grid=(Dv // values, Nv, B),
        out_shape=[jax.ShapeDtypeStruct((B, T, Nv, Dv), qkv.dtype), jax.ShapeDtypeStruct(state.S.shape, state.S.dtype)],
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages if qkv.dtype == jnp.bfloat16 else 1,  # shared memory has room for no more
        interpret=interpret,
        aliases={len(jax.tree.leaves(before)): 1},
        values=values,
        keys=min(tiling.keys, Dk),
        num_key_heads=Nk,
    )
    o, S = made
    return o, dataclasses.replace(state, S=S)


def _run_chunks(
    chains: _Chains,
    qkv_ref,
    prepared: Prepared,
    S_ref,
    o_ref,
    S_out_ref,
    *,
    values: int,
    keys: int,
    num_key_heads: int,
):
    """The chunks of one head of one chain, one after the other, for some columns of S.

    Everything is transposed: a tile of S is ``[values, keys]``. A product reads its left factor from registers, where S
    is, and its right one, of the chunk, from shared memory."""
    (_, Nv, Dk, _), T, Nk = S_ref.shape, qkv_ref.shape[1], num_key_heads
    most = pl.cdiv(T, CHUNK)  # chunks of a segment
    head, first = pl.program_id(1), pl.program_id(2)
    length = chains.length[first]
    last = first + jnp.maximum(length - 1, 0)
    is_live = (length > 0) & (chains.tokens[first] > 0)
    row = jnp.where(is_live, chains.row[first], 0)
    first_key = jax.lax.div(head, jnp.int32(Nv // Nk)) * Dk
    value = pl.program_id(0) * values + jnp.arange(values, dtype=jnp.int32)
    places = [start + jnp.arange(keys, dtype=jnp.int32) for start in range(0, Dk, keys)]
    chunk = jnp.arange(CHUNK, dtype=jnp.int32)

    def write(b, token, x):
        column, line = tile_indices(value, token)
        # An interpreted kernel writes masked elements back as they were, which must not be where others are written.
        line = jnp.where(line < T, line, T) if T % CHUNK else line
        pltriton.store(o_ref.at[b, line, head, column], x.astype(o_ref.dtype), mask=line < T if T % CHUNK else None)

    def advance(i, tiles):
        b, c = first + jax.lax.div(i, jnp.int32(most)), jax.lax.rem(i, jnp.int32(most))
        token, tokens = c * CHUNK + chunk, chains.tokens[b]
        of_q, of_k, of_write, beta = (
            pltriton.load(prepared.factors.at[b, head, kind, token])[None, :] for kind in (0, 1, 2, 4)
        )
        decay = prepared.factors[b, head, 3, c * CHUNK + CHUNK - 1]
        matrix = lambda ref: tuple(  # noqa: E731
            pltriton.load(ref.at[(b, head, part, *tile_indices(token, chunk))]) for part in range(ref.shape[2])
        )
        lines = lambda start, place: split(load_tokens(qkv_ref, b, token, start + first_key + place, tokens))  # noqa: E731
        read: Any = None
        o: Any = None
        for place, tile in zip(places, tiles, strict=True):
            parts = split(tile)
            read = dot(parts, lines(Nk * Dk, place), onto=read)
            o = dot(parts, lines(0, place), onto=o)
        column, line = tile_indices(2 * Nk * Dk + head * values * pl.num_programs(0) + value, token)
        v = pltriton.load(qkv_ref.at[b, line, column], mask=line < tokens, other=0.0).astype(jnp.float32)
        U = dot(split(v * beta - read * of_k), matrix(prepared.inverse))
        written = split(U * of_write)
        tiles = tuple(
            dot(written, lines(Nk * Dk, place), b_axis=0, onto=decay * tile)
            for place, tile in zip(places, tiles, strict=True)
        )
        write(b, token, dot(split(U), matrix(prepared.scores), onto=o * of_q))
        return tiles

    of_S = [(row, head, *reversed(tile_indices(value, place))) for place in places]
    known = jnp.broadcast_to(is_live & (chains.fresh[first] == 0), (values, keys))
    tiles = tuple(pltriton.load(S_ref.at[at], mask=known, other=0.0) for at in of_S)
    # All segments of a chain are full but the last one.
    of_last = jnp.where(length > 0, jax.lax.div(chains.tokens[last] + (CHUNK - 1), jnp.int32(CHUNK)), most)
    trips = jnp.where(is_live, (length - 1) * most + of_last, 0)
    tiles = jax.lax.fori_loop(jnp.int32(0), trips, advance, tiles)

    @pl.when(is_live)
    def _():
        for at, tile in zip(of_S, tiles, strict=True):
            pltriton.store(S_out_ref.at[at], tile)

    def write_zeros(c, nothing):
        write(last, c * CHUNK + chunk, jnp.zeros((values, CHUNK), jnp.float32))
        return nothing

    jax.lax.fori_loop(of_last, jnp.int32(most), write_zeros, jnp.int32(0))
