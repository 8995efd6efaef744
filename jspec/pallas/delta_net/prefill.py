"""Prefill of a gated delta net: the recurrence over segments of prompts.

On an NVIDIA GPU, one kernel does for all chunks at once what does not depend on the state. With the formulas and letters of
``jspec.pallas.delta_net.chunked``, it makes X = (I + A)^-1 beta and Q K^T * D, and factors of the lines of Q and K. A second
one goes through the chunks of a head one after the other, all segments of a chain, with some columns of S in registers,
where U = X (V - exp(G) K S).

Tensor cores multiply bfloat16 numbers. A float32 number is the sum of three of them, and a product of two takes the six
products that count. Queries, keys and values are mostly bfloat16 already, and both kernels multiply them as they are, not
normed: that takes three products with float32, and one between them. What norms and decays multiply them by is a factor of
each token."""

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
    """How the work of the kernels is cut.

    Attributes:
      values: columns of S that a program instance of the second kernel has, a power of two.
      keys: places of keys that either kernel reads at a time, lines of S in a tile; a power of two.
      prepare_warps, num_warps: warps of 32 threads that run one instance of the first and of the second kernel.
      num_stages: of the second kernel; with 2 it reads what the next chunk needs while it computes one.
    """

    values: int
    keys: int
    prepare_warps: int
    num_warps: int
    num_stages: int


TILING = PrefillTiling(values=64, keys=32, prepare_warps=8, num_warps=4, num_stages=2)
PARTS = 3  # bfloat16 numbers that add up to one of float32
_BLOCK = 16  # lines of the blocks of a matrix that are inverted a line at a time


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
    padded, keys = count * CHUNK, min(tiling.keys, Dk)
    split = jax.ShapeDtypeStruct((B, Nv, 1, padded, CHUNK), jnp.float32)
    if not interpret:
        split = jax.ShapeDtypeStruct((B, Nv, PARTS, padded, CHUNK), jnp.bfloat16)
    prepared: Any = kernel_call(
        _prepare_chunks,
        *(tokens, qkv, g, beta),
        grid=(count, Nv, B),
        out_shape=[split, split, jax.ShapeDtypeStruct((B, Nv, 4, padded), jnp.float32)],
        num_warps=tiling.prepare_warps,
        num_stages=1,
        interpret=interpret,
        keys=keys,
        sizes=(Nk, Dk),
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
        num_stages=tiling.num_stages if qkv.dtype == jnp.bfloat16 else 1,  # shared memory has room for no more
        interpret=interpret,
        aliases={len(jax.tree.leaves(before)): 1},
        values=values,
        keys=keys,
        num_key_heads=Nk,
    )
    o, S = made
    return o, dataclasses.replace(state, S=S)


def _prepare_chunks(
    tokens_ref, qkv_ref, g_ref, beta_ref, X_ref, scores_ref, factors_ref, *, keys: int, sizes: tuple[int, int]
):
    """What a chunk of one head contributes without regard to the state."""
    (Nk, Dk), Nv, start = sizes, X_ref.shape[1], pl.program_id(0) * CHUNK
    head, b, tokens = pl.program_id(1), pl.program_id(2), tokens_ref[pl.program_id(2)]
    token = start + jnp.arange(CHUNK, dtype=jnp.int32)
    first_key = jax.lax.div(head, jnp.int32(Nv // Nk)) * Dk

    @pl.when(start < tokens)
    def _():
        of_token = lambda ref: pltriton.load(ref.at[b, token, head], mask=token < tokens, other=0.0)  # noqa: E731
        g, beta = of_token(g_ref), of_token(beta_ref)
        products, lengths = _products_of_keys(qkv_ref, (b, token, first_key, tokens), keys, (Nk, Dk))
        of_q, of_k = (jax.lax.rsqrt(x + NORM_EPS) for x in lengths)
        of_q = of_q * Dk**-0.5
        line, column = (jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
        until = jnp.where(column <= line, jnp.broadcast_to(g[None, :], (CHUNK, CHUNK)), 0.0)
        total, last = jnp.sum(until, axis=1), jnp.sum(g)
        decay = jnp.exp(jnp.where(column <= line, total[:, None] - total[None, :], -jnp.inf)) * of_k[None, :]
        A = jnp.where(column < line, (beta * of_k)[:, None] * products[1] * decay, 0.0)
        X = _inverse(A, line, column) * beta[None, :]
        for ref, x in ((X_ref, X), (scores_ref, of_q[:, None] * products[0] * decay)):
            for part, number in enumerate(_split(x)):
                pltriton.store(ref.at[(b, head, part, *tile_indices(token, token - start))], number)
        grown = jnp.exp(total)
        for kind, x in enumerate((grown * of_q, grown * of_k, jnp.exp(last - total) * of_k, grown)):
            pltriton.store(factors_ref.at[b, head, kind, token], x)


def _products_of_keys(qkv_ref, at, keys: int, sizes: tuple[int, int]):
    """In a kernel: ``Q K^T`` and ``K K^T`` of a chunk, and the sums of squares of its queries and keys, none of them normed.

    Args:
      at: the entry of the pass, the tokens, the first channel of the keys' head, and how many tokens are valid.
      keys: how many places of a key are read at a time.
      sizes: Nk and Dk.
    """
    (b, token, first_key, tokens), (Nk, Dk) = at, sizes
    products: list[Any] = [None, None]
    lengths: list[Any] = [0.0, 0.0]
    for start in range(0, Dk, keys):
        channel = first_key + start + jnp.arange(keys, dtype=jnp.int32)
        parts = [_load_tokens(qkv_ref, b, token, first + channel, tokens) for first in (0, Nk * Dk)]
        right = _split(parts[1])
        for i, x in enumerate(parts):
            numbers = x.astype(jnp.float32)
            lengths[i] += jnp.sum(numbers * numbers, axis=1)
            products[i] = _dot(_split(x), right, onto=products[i])
    return products, lengths


def _inverse(A, line, column):
    """In a kernel: ``(I + A)^-1`` of a strictly lower triangular matrix.

    Forward substitution, all blocks on the diagonal at once, inverts blocks of 16. From the inverses X and Y of two
    blocks on the diagonal, and B, the one below X and left of Y, follows that of both: it has -Y B X in place of B."""
    block = lambda ids, size: jax.lax.div(ids, jnp.int32(size))  # noqa: E731
    place = lambda ids: jax.lax.rem(ids, jnp.int32(_BLOCK))  # noqa: E731
    inner = jnp.where(block(line, _BLOCK) == block(column, _BLOCK), A, 0.0)

    def eliminate(i, X):
        of_column = jnp.sum(jnp.where(place(column) == i, inner, 0.0), axis=1)
        of_line = jnp.sum(jnp.where(place(line) == i, X, 0.0), axis=0)
        changed = multiply_add(-of_column[:, None], of_line[None, :], X)
        return jnp.where(block(line, _BLOCK) == block(column, _BLOCK), changed, 0.0)

    X = jax.lax.fori_loop(0, _BLOCK - 1, eliminate, jnp.where(line == column, 1.0, 0.0))
    size = _BLOCK
    while size < CHUNK:
        below = (block(line, 2 * size) == block(column, 2 * size)) & (block(line, size) > block(column, size))
        parts = _split(X)
        X = X - _dot(parts, _split(_dot(_split(jnp.where(below, A, 0.0)), parts, b_axis=0)), b_axis=0)
        size *= 2
    return X


def _split(x) -> tuple:
    """In a kernel: what products on tensor cores read in place of x, of any shape.

    That are bfloat16 numbers which add up to x: x itself, or three if it is float32. An interpreted kernel multiplies
    float32 numbers as they are."""
    if x.dtype == jnp.bfloat16 or is_interpreted():
        return (x,)
    parts = []
    for _ in range(PARTS):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return tuple(parts)


def _dot(a: tuple, b: tuple, b_axis: int = 1, onto: Any = None) -> Any:
    """In a kernel: the product of two matrices that are split, as exact as products of float32 are.

    Products of parts that are less than the rounding of float32 are left out, and the smallest come first.

    Args:
      a, b: as ``_split`` gives them; a is summed along its lines.
      b_axis: along which b is summed.
      onto: float32, what the product is added to, or None.
    """
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < PARTS]
    precision = jax.lax.Precision.HIGHEST if is_interpreted() else None
    for i, j in sorted(pairs, key=lambda pair: -sum(pair)):
        x, y = (z.astype(jnp.float32) if is_interpreted() else z for z in (a[i], b[j]))
        axes = (((1,), (b_axis,)), ((), ()))
        product = jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)
        onto = product if onto is None else product + onto
    return onto


def _load_tokens(qkv_ref, b, token, channel, tokens):
    """In a kernel: some channels of some tokens, ``[tokens, channels]``; zeros for tokens that are not valid."""
    token, channel = tile_indices(token, channel)
    return pltriton.load(qkv_ref.at[b, token, channel], mask=token < tokens, other=0.0)


def _run_chunks(
    chains: _Chains,
    qkv_ref,
    X_ref,
    scores_ref,
    factors_ref,
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
        of_q, of_k, of_write = (pltriton.load(factors_ref.at[b, head, kind, token])[None, :] for kind in range(3))
        decay = factors_ref[b, head, 3, c * CHUNK + CHUNK - 1]
        prepared = lambda ref: tuple(  # noqa: E731
            pltriton.load(ref.at[(b, head, part, *tile_indices(token, chunk))]) for part in range(ref.shape[2])
        )
        lines = lambda start, place: _split(_load_tokens(qkv_ref, b, token, start + first_key + place, tokens))  # noqa: E731
        read: Any = None
        o: Any = None
        for place, tile in zip(places, tiles, strict=True):
            parts = _split(tile)
            read = _dot(parts, lines(Nk * Dk, place), onto=read)
            o = _dot(parts, lines(0, place), onto=o)
        column, line = tile_indices(2 * Nk * Dk + head * values * pl.num_programs(0) + value, token)
        v = pltriton.load(qkv_ref.at[b, line, column], mask=line < tokens, other=0.0).astype(jnp.float32)
        U = _dot(_split(v - read * of_k), prepared(X_ref))
        written = _split(U * of_write)
        tiles = tuple(
            _dot(written, lines(Nk * Dk, place), b_axis=0, onto=decay * tile)
            for place, tile in zip(places, tiles, strict=True)
        )
        write(b, token, _dot(_split(U), prepared(scores_ref), onto=o * of_q))
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
