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


def verify(state: DeltaState, rows: VerifyRows, qkv, g, beta) -> tuple[jax.Array, DeltaState]:
    """``verify_reference``, and on an NVIDIA GPU the kernel, which is for sizes of keys and values that are powers of
    two."""
    supported = has_kernel(*state.S.shape[2:])
    return by_platform(verify_kernel, verify_reference, state, rows, qkv, g, beta, supported=supported)


def has_kernel(Dk: int, Dv: int) -> bool:
    """Whether heads of this size are for the kernel."""
    return all(pl.next_power_of_2(size) == size and 16 <= size <= 256 for size in (Dk, Dv))


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def verify_kernel(
    state: DeltaState,
    rows: VerifyRows,
    qkv,
    g,
    beta,
    *,
    tiling: VerifyTiling = TILING,
    interpret=False,
) -> tuple[jax.Array, DeltaState]:
    """``verify_reference`` as a kernel; a program instance has some columns of the S of one head of one row.

    S, k, u and g are updated in place if the caller donates them. A pass that appends only reads S."""
    (B, T, _), (_, Nv, Dk, Dv) = qkv.shape, state.S.shape
    values, keys = min(tiling.values, Dv), min(tiling.keys, Dk)
    outputs = jax.ShapeDtypeStruct((B, T, Nv, Dv), qkv.dtype)
    kept = state.k, state.u, state.g
    numbers = dataclasses.replace(rows, fresh=rows.fresh.astype(jnp.int32)), qkv, g, beta
    numbers, kept = ((*numbers, state.S), kept) if rows.append else (numbers, (state.S, *kept))
    before = len(jax.tree.leaves(numbers))
    made: Any = kernel_call(
        _append_delta_net if rows.append else _verify_delta_net,
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
    return o, dataclasses.replace(state, S=state.S if rows.append else S[0], k=k, u=u, g=g)


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


class _Triple(NamedTuple):
    """What a token adds to S, in float32. Vectors along keys are in parts, one for each tile of S.

    Attributes:
      k: normed.
      u: ``[values]``.
      g: ``[]``, the logarithm of what S is multiplied by before.
    """

    k: tuple
    u: Any
    g: Any


class _Query(NamedTuple):
    """A query token as it is stored: q, k in parts, not normed, the value ``[values]``, and g and beta ``[]``."""

    q: tuple
    k: tuple
    value: Any
    g: Any
    beta: Any


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
    """A loop over the accepted tokens of the last pass, and one over those of this pass; S stays in registers.

    Both fold triples into S by the same instructions, which are the same for every T. How many trips they have is known only
    when they run. A trip asks for what it loads first, and folds the triple of the token before while that is under way. The
    triple of the last token is not folded: its output is that of S before it, ``decay S^T q + (q k) u``. A pass that appends
    has no ``S_out_ref``. It may write to the half that it reads, because no instance uses a triple behind the accepted
    ones."""
    (Bs, Nv, Dk, Dv), (T, Nk) = S_ref.shape, (qkv_ref.shape[1], k_kept_ref.shape[3])
    block, head, b = (pl.program_id(axis) for axis in range(3))
    row, tokens, fresh = rows.row[b], rows.tokens[b], rows.fresh[b] != 0
    is_live = (row >= 0) & (row < Bs) & (tokens > 0)
    tokens, accepted = jnp.where(is_live, tokens, 0), jnp.where(is_live & ~fresh, rows.accepted[b], 0)
    row, key_head = jnp.where(is_live, row, 0), jax.lax.div(head, jnp.int32(Nv // Nk))
    value = block * values + jnp.arange(values, dtype=jnp.int32)
    lines = [start + jnp.arange(keys, dtype=jnp.int32) for start in range(0, Dk, keys)]
    half = jnp.where(is_live, rows.half[b], 0)
    here = _Here(block, head, b, row, half, key_head, value, lines)
    places = [(row, head, *tile_indices(line, value)) for line in lines]
    kept, append = (k_kept_ref, u_kept_ref, g_kept_ref), S_out_ref is None

    def fold_pending(i, carried):
        tiles, triple = carried
        following = _pending_triple(*kept, here, i)
        return _folded(tiles, triple), following

    def advance(t, carried):
        tiles, triple = carried
        query = _query_token(qkv_ref, g_ref, beta_ref, here, t, (Nk, Dk, Dv))
        tiles = _folded(tiles, triple)
        if not append:

            @pl.when(t == 0)
            def _():
                for at, tile in zip(places, tiles, strict=True):
                    pltriton.store(S_out_ref.at[at], tile)

        o, triple = _answer(tiles, query, Dk)
        pltriton.store(o_ref.at[b, t, head, value], o.astype(o_ref.dtype))
        place = (here.half, here.row, accepted + t) if append else (1 - here.half, here.row, t)
        _keep(*kept, here, place, triple, Nv // Nk)
        return tiles, triple

    known = jnp.broadcast_to(is_live & ~fresh, (keys, values))
    tiles = tuple(pltriton.load(S_ref.at[at], mask=known, other=0.0) for at in places)
    first = _pending_triple(*kept, here, jnp.int32(0), exists=accepted > 0)
    carried = jax.lax.fori_loop(jnp.int32(1), accepted, fold_pending, (tiles, first))
    jax.lax.fori_loop(jnp.int32(0), tokens, advance, carried)

    def write_zeros(t, _):
        pltriton.store(o_ref.at[b, t, head, value], jnp.zeros(values, o_ref.dtype))

    jax.lax.fori_loop(tokens, jnp.int32(T), write_zeros, None)


def _folded(tiles, triple: _Triple) -> tuple:
    """In a kernel: the tiles of S after a token."""
    decay = jnp.exp(triple.g)
    return tuple(
        multiply_add(k[:, None], triple.u[None, :], decay * tile) for k, tile in zip(triple.k, tiles, strict=True)
    )


def _answer(tiles, query: _Query, Dk: int) -> tuple[Any, _Triple]:
    """In a kernel: the output ``[values]`` of a query token and its triple, from tiles of S before it."""
    q, k = (tuple(part.astype(jnp.float32) for part in parts) for parts in (query.q, query.k))
    factor = _inverse_norm(k)
    k, decay = tuple(part * factor for part in k), jnp.exp(query.g)
    u = query.beta * (query.value.astype(jnp.float32) - decay * _read(tiles, k))
    o = (_inverse_norm(q) * Dk**-0.5) * (decay * _read(tiles, q) + _dot(q, k) * u)
    return o, _Triple(k, u, query.g)


def _read(tiles, x):
    """In a kernel: ``S^T x``, float32 ``[values]``, of tiles of S and parts of x. The parts are added up first."""
    total = tiles[0] * x[0][:, None]
    for tile, part in zip(tiles[1:], x[1:], strict=True):
        total = multiply_add(tile, part[:, None], total)
    return jnp.sum(total, axis=0)


def _dot(x, y):
    """In a kernel: the dot product of two vectors in parts, float32 ``[]``."""
    total = x[0] * y[0]
    for a, b in zip(x[1:], y[1:], strict=True):
        total = multiply_add(a, b, total)
    return jnp.sum(total)


def _inverse_norm(x):
    """In a kernel: what ``l2_norm`` multiplies a vector in parts by."""
    return jax.lax.rsqrt(_dot(x, x) + NORM_EPS)


def _query_token(qkv_ref, g_ref, beta_ref, here: _Here, t, sizes: tuple[int, int, int]) -> _Query:
    """In a kernel: query token t of the pass."""
    Nk, Dk, Dv = sizes
    load = lambda channel: pltriton.load(qkv_ref.at[here.b, t, channel])  # noqa: E731
    q, k = (tuple(load(first + here.key_head * Dk + key) for key in here.keys) for first in (0, Nk * Dk))
    value = load(2 * Nk * Dk + here.head * Dv + here.value)
    return _Query(q, k, value, g_ref[here.b, t, here.head], beta_ref[here.b, t, here.head])


def _pending_triple(k_kept_ref, u_kept_ref, g_kept_ref, here: _Here, i, exists=None) -> _Triple:
    """In a kernel: the triple of token i of the last pass; one that changes nothing where it does not ``exist``."""
    at = here.half, here.row, i

    def load(ref, *indices):
        mask = None if exists is None else jnp.broadcast_to(exists, indices[-1].shape)
        return pltriton.load(ref.at[(*at, *indices)], mask=mask, other=None if mask is None else 0.0)

    k = tuple(load(k_kept_ref, here.key_head, key) for key in here.keys)
    g = g_kept_ref[(*at, here.head)]
    return _Triple(k, load(u_kept_ref, here.head, here.value), g if exists is None else jnp.where(exists, g, 0.0))


def _keep(k_kept_ref, u_kept_ref, g_kept_ref, here: _Here, at, triple: _Triple, shared: int):
    """In a kernel: write the triple of a query token to ``at``, each number of it by one of the instances that have it."""
    is_first = here.block == 0
    pltriton.store(u_kept_ref.at[(*at, here.head, here.value)], triple.u)

    @pl.when(is_first & (jax.lax.rem(here.head, jnp.int32(shared)) == 0))
    def _():
        for key, part in zip(here.keys, triple.k, strict=True):
            pltriton.store(k_kept_ref.at[(*at, here.key_head, key)], part)

    @pl.when(is_first)
    def _():
        g_kept_ref[(*at, here.head)] = triple.g
