"""The verify pass of a gated delta net in one launch, which reads and writes S once, or reads it if the pass appends."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.delta_net.reference import NORM_EPS, verify_reference
from jspec.pallas.delta_net.state import DeltaState, VerifyRows
from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import kernel_call, multiply_add, tile_indices


class VerifyTiling(NamedTuple):
    """How the work is cut. It does not depend on T or B, because it decides in which order numbers are added.

    Attributes:
      values: columns of S that a program instance has, a power of two.
      keys: lines of S in a tile, a power of two. A sum over keys adds up equal places of all tiles first, which takes
        one multiply-add each, and then the places of a tile.
      num_warps: warps of 32 threads that run one instance.
    """

    values: int
    keys: int
    num_warps: int


TILING = VerifyTiling(32, 32, 1)


def verify(state: DeltaState, rows: VerifyRows, qkv, g, beta, *, append: bool = False) -> tuple[jax.Array, DeltaState]:
    """``verify_reference``, and on an NVIDIA GPU the kernel, which is for sizes of keys and values that are powers of
    two."""
    kernel, reference = (functools.partial(f, append=append) for f in (verify_kernel, verify_reference))
    if not has_kernel(*state.S.shape[2:]):
        return reference(state, rows, qkv, g, beta)
    return by_platform(kernel, reference, state, rows, qkv, g, beta)


def has_kernel(Dk: int, Dv: int) -> bool:
    """Whether heads of this size are for the kernel."""
    return all(pl.next_power_of_2(size) == size and 16 <= size <= 256 for size in (Dk, Dv))


@functools.partial(jax.jit, static_argnames=("append", "tiling", "interpret"))  # layers share one trace
def verify_kernel(
    state: DeltaState,
    rows: VerifyRows,
    qkv,
    g,
    beta,
    *,
    append: bool = False,
    tiling: VerifyTiling = TILING,
    interpret=False,
) -> tuple[jax.Array, DeltaState]:
    """``verify_reference`` as a kernel; a program instance has some columns of the S of one head of one row.

    S, k, u and g are updated in place if the caller donates them. A pass that appends only reads S."""
    (B, T, _), (_, Nv, Dk, Dv) = qkv.shape, state.S.shape
    values, keys = min(tiling.values, Dv), min(tiling.keys, Dk)
    outputs = jax.ShapeDtypeStruct((B, T, Nv, Dv), qkv.dtype)
    kept = state.k, state.u, state.g
    numbers = rows._replace(fresh=rows.fresh.astype(jnp.int32)), qkv, g, beta
    numbers, kept = ((*numbers, state.S), kept) if append else (numbers, (state.S, *kept))
    before = len(jax.tree.leaves(numbers))
    made: Any = kernel_call(
        _append_delta_net if append else _verify_delta_net,
        *numbers,
        *kept,
        grid=(Dv // values, Nv, B),
        out_shape=[outputs, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kept)],
        num_warps=tiling.num_warps,
        interpret=interpret,
        aliases={before + i: 1 + i for i in range(len(kept))},
        values=values,
        keys=keys,
    )
    o, *S, k, u, g = made
    return o, dataclasses.replace(state, S=state.S if append else S[0], k=k, u=u, g=g)


class _Here(NamedTuple):
    """Where a program instance works.

    Attributes:
      block, head, b: of the grid: which columns of S, which value head, which row of the pass.
      row, half: where the state has that row, and its pending triples.
      key_head: which the value head reads.
      value: int32 ``[values]``, the columns of S.
      keys: its lines: of each tile int32 ``[keys]``.
    """

    block: Any
    head: Any
    b: Any
    row: Any
    half: Any
    key_head: Any
    value: Any
    keys: list


class _Token(NamedTuple):
    """What one trip of the loop needs of its token, in float32. Vectors along keys are in parts, one for each tile of S.

    Attributes:
      k, q: normed. A pending token has no q.
      x: ``[values]``, the value, or of a pending token u.
      g: ``[]``.
    """

    k: tuple
    q: tuple
    x: Any
    g: Any


def _append_delta_net(rows: VerifyRows, *refs, values: int, keys: int):
    *read, o_ref, k_kept_ref, u_kept_ref, g_kept_ref = refs
    _verify_delta_net(rows, *read, o_ref, None, k_kept_ref, u_kept_ref, g_kept_ref, values=values, keys=keys)  # pyright: ignore


def _verify_delta_net(
    rows: VerifyRows,
    qkv_ref,
    g_ref,
    beta_ref,
    S_ref,
    _k_kept_ref,
    _u_kept_ref,
    _g_kept_ref,
    o_ref,
    S_out_ref,
    k_kept_ref,
    u_kept_ref,
    g_kept_ref,
    *,
    values: int,
    keys: int,
):
    """One loop over the accepted tokens of the last pass and then those of this one; S stays in registers.

    S changes by the same instructions for both, and those are the same for every T. How many trips the loop has is known
    only when it runs. A pass that appends has no ``S_out_ref``. It may write to the half that it reads, because no instance
    reads a triple behind the accepted ones."""
    (Bs, Nv, Dk, Dv), (T, Nk) = S_ref.shape, (qkv_ref.shape[1], k_kept_ref.shape[3])
    block, head, b = (pl.program_id(axis) for axis in range(3))
    row, tokens, fresh = rows.row[b], rows.tokens[b], rows.fresh[b] != 0
    is_live = (row >= 0) & (row < Bs) & (tokens > 0)
    tokens, accepted = jnp.where(is_live, tokens, 0), jnp.where(is_live & ~fresh, rows.accepted[b], 0)
    row, key_head = jnp.where(is_live, row, 0), jax.lax.div(head, jnp.int32(Nv // Nk))
    value = block * values + jnp.arange(values, dtype=jnp.int32)
    lines = [start + jnp.arange(keys, dtype=jnp.int32) for start in range(0, Dk, keys)]
    here = _Here(block, head, b, row, rows.half[b], key_head, value, lines)
    places = [(row, head, *tile_indices(line, value)) for line in lines]
    kept, append = (k_kept_ref, u_kept_ref, g_kept_ref), S_out_ref is None

    def advance(i, tiles):
        t = i - accepted

        if not append:

            @pl.when(t == 0)
            def _():
                for at, tile in zip(places, tiles, strict=True):
                    pltriton.store(S_out_ref.at[at], tile)

        is_new = t >= 0
        token = jax.lax.cond(
            is_new,
            lambda: _query_token(qkv_ref, g_ref, here, t, (Nk, Dk, Dv)),
            lambda: _pending_token(*kept, here, i),
        )
        decay = jnp.exp(token.g)
        tiles = tuple(decay * tile for tile in tiles)
        u = jax.lax.cond(is_new, lambda: beta_ref[b, t, head] * (token.x - _read(tiles, token.k)), lambda: token.x)
        tiles = tuple(multiply_add(k[:, None], u[None, :], tile) for k, tile in zip(token.k, tiles, strict=True))

        @pl.when(is_new)
        def _():
            pltriton.store(o_ref.at[b, t, head, value], _read(tiles, token.q).astype(o_ref.dtype))
            place = (here.half, here.row, i) if append else (1 - here.half, here.row, t)
            _keep(*kept, here, place, token, u, Nv // Nk)

        return tiles

    known = jnp.broadcast_to(is_live & ~fresh, (keys, values))
    tiles = tuple(pltriton.load(S_ref.at[at], mask=known, other=0.0) for at in places)
    jax.lax.fori_loop(jnp.int32(0), accepted + tokens, advance, tiles)

    def write_zeros(t, _):
        pltriton.store(o_ref.at[b, t, head, value], jnp.zeros(values, o_ref.dtype))

    jax.lax.fori_loop(tokens, jnp.int32(T), write_zeros, None)


def _read(tiles, x):
    """In a kernel: ``S^T x``, float32 ``[values]``, of tiles of S and parts of x. The parts are added up first."""
    total = tiles[0] * x[0][:, None]
    for tile, part in zip(tiles[1:], x[1:], strict=True):
        total = multiply_add(tile, part[:, None], total)
    return jnp.sum(total, axis=0)


def _normed(parts) -> tuple:
    """In a kernel: the parts of ``l2_norm`` of a vector."""
    parts = [x.astype(jnp.float32) for x in parts]
    squares = parts[0] * parts[0]
    for x in parts[1:]:
        squares = multiply_add(x, x, squares)
    factor = jax.lax.rsqrt(jnp.sum(squares) + NORM_EPS)
    return tuple(x * factor for x in parts)


def _query_token(qkv_ref, g_ref, here: _Here, t, sizes: tuple[int, int, int]) -> _Token:
    """In a kernel: query token t of the pass."""
    Nk, Dk, Dv = sizes
    load = lambda channel: pltriton.load(qkv_ref.at[here.b, t, channel])  # noqa: E731
    q, k = ([load(first + here.key_head * Dk + key) for key in here.keys] for first in (0, Nk * Dk))
    x = load(2 * Nk * Dk + here.head * Dv + here.value).astype(jnp.float32)
    return _Token(_normed(k), tuple(part * Dk**-0.5 for part in _normed(q)), x, g_ref[here.b, t, here.head])


def _pending_token(k_kept_ref, u_kept_ref, g_kept_ref, here: _Here, i) -> _Token:
    """In a kernel: token i of the last pass."""
    at = here.half, here.row, i
    k = tuple(pltriton.load(k_kept_ref.at[(*at, here.key_head, key)]) for key in here.keys)
    u = pltriton.load(u_kept_ref.at[(*at, here.head, here.value)])
    no_query = tuple(jnp.zeros(part.shape, jnp.float32) for part in k)
    return _Token(k, no_query, u, g_kept_ref[(*at, here.head)])


def _keep(k_kept_ref, u_kept_ref, g_kept_ref, here: _Here, at, token: _Token, u, shared: int):
    """In a kernel: write the triple of a query token to ``at``, each number of it by one of the instances that have it."""
    is_first = here.block == 0
    pltriton.store(u_kept_ref.at[(*at, here.head, here.value)], u)

    @pl.when(is_first & (jax.lax.rem(here.head, jnp.int32(shared)) == 0))
    def _():
        for key, part in zip(here.keys, token.k, strict=True):
            pltriton.store(k_kept_ref.at[(*at, here.key_head, key)], part)

    @pl.when(is_first)
    def _():
        g_kept_ref[(*at, here.head)] = token.g
