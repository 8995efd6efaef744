"""RoPE, KV writes and attention in one launch, for rows with few new tokens.

Every program instance rotates its queries. Those whose slots will have new keys and values write them first, and then read
all of their slots, new and old, in the order in which any other pass reads them. An instance writes whatever it reads of
this pass, so none waits for another; two that write one slot write the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import (
    AttentionLaunch,
    OwnTiles,
    QueryBlock,
    attend_pages,
    launch_attention,
    tile_loader,
    times_value_scale,
)
from jspec.pallas.attention.fp8 import KVScales, encode_in_kernel, token_scales
from jspec.pallas.attention.paged import as_pools, flat_pools, in_slots
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.rope import apply_rope_in_kernel, load_rope_operands
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries, RaggedLayout
from jspec.pallas.attention.tiling import AttentionTiling, tiling_of, tiling_of_bytes
from jspec.pallas.triton import MMA_SIZE, broadcast_columns, is_interpreted, line_indices

MOST_QUERIES = 64  # of a KV head (T R): one program instance has them all, and all new keys as well
_ROTATED_BESIDE_KEYS = 32  # of an instance, queries at most: with more, registers hold these or new keys
_RAGGED_QUERIES = 16  # of an instance in a ragged view, where most rows have few tokens: empty instances end at once


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def decode_attention_kernel(
    qkv,
    rotation: Rotation | None,
    k_pool,
    v_pool,
    queries: PagedQueries,
    spec: AttentionSpec,
    ragged: RaggedLayout | None = None,
    scales: KVScales | None = None,
    *,
    tiling: AttentionTiling | None = None,
    interpret=False,
):
    """``View.extend`` of a ``PagedView`` (``jspec.models.kv_cache``) as a kernel; with ``ragged``, of a ``RaggedView``
    (``jspec.models.ragged_view``), whose tokens it reads and writes where they lie.

    Args:
      qkv: ``[B, T, N + 2G, H]``, queries, keys and values, not rotated; ``[1, Q, N + 2G, H]`` with ``ragged``.
      rotation: the rotary embedding of the tokens' positions, None if nothing is rotated.
      k_pool, v_pool: ``[G, pages, P, H]``, in the dtype of qkv, or bytes with ``scales``; updated in place.
      queries: the new tokens.
      spec: how they attend.
      ragged: where the query tokens of a ragged view lie; None if they are in rows.
      scales: of heads, or of the tokens in the pools, which are updated too (``jspec.pallas.attention.fp8``).

    Returns:
      attention ``[B, T, N, H]``, which is 0 for invalid tokens, the two pools, and scales if those are of tokens. With
      ``ragged`` attention is ``[1, Q, N, H]``, with arbitrary finite numbers in the padding.
    """
    assert ragged is None or queries.tree is None, "a ragged view has no trees"
    (heads, H), (G, _, P, _) = qkv.shape[2:], k_pool.shape
    N, T, ragged_tokens = heads - 2 * G, queries.positions.shape[1], None if ragged is None else qkv.shape[1]
    if tiling is None:
        tiling = tiling_of(qkv.dtype, H) if scales is None else tiling_of_bytes(qkv.dtype, H, N // G, T)
    assert tiling is not None, f"no kernel for heads of {H} numbers in {qkv.dtype}"
    if ragged is not None:
        tiling = dataclasses.replace(tiling, queries=min(tiling.queries, _RAGGED_QUERIES))
    launch = AttentionLaunch.of(queries, N, k_pool, spec, tiling, ragged_tokens)
    pools, last = flat_pools(k_pool, v_pool), queries.written_slots(P)
    angles, scales = rotation or (), in_slots(scales)
    updated = [*pools, *(scales if scales is not None and scales.of_tokens else ())]
    tokens = queries.table, last, spec.sinks, ragged and ragged.start, queries.tree
    *written, out = launch_attention(
        _decode_split,
        launch,
        (qkv.reshape(len(qkv), -1, H), angles, *pools, scales, *tokens),
        last,
        qkv.dtype,
        tiling,
        sinks=spec.sinks,
        tree=queries.tree,
        others=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in updated],
        aliases={len(angles) + 1 + i: i for i in range(len(updated))},
        interpret=interpret,
    )
    if ragged is not None and launch.sharing.splits > 1:
        out = ragged.from_rows(out)
    return out, *as_pools(written, k_pool)


def _decode_split(
    qkv_ref,
    angle_refs,
    k_ref,
    v_ref,
    scale_refs,
    table_ref,
    last_ref,
    sinks_ref,
    start_ref,
    tree_refs,
    k_out_ref,
    v_out_ref,
    *out_refs,
    launch: AttentionLaunch,
):
    of_tokens = scale_refs is not None and scale_refs.of_tokens
    scale_out_refs, out_refs = (out_refs[:2], out_refs[2:]) if of_tokens else ((), out_refs)
    if of_tokens:  # what is read is what was written
        scale_refs = KVScales(*scale_out_refs)
    queries, heads, H = QueryBlock.of(launch, last_ref, tree_refs), launch.N + 2 * launch.G, launch.H
    b, g, sharing, newest = queries.b, queries.g, launch.sharing, jnp.max(queries.last)
    own = OwnTiles.of(queries, newest, launch)
    row, first = (b, 0) if start_ref is None else (0, start_ref[b])  # where the row's tokens lie
    load = functools.partial(load_rope_operands, qkv_ref, angle_refs, row)

    def write(i, carry=None):
        """Write the i-th new keys and values of the row, so many as tensor cores multiply, if this instance reads them."""
        token = i * MMA_SIZE + jnp.arange(MMA_SIZE, dtype=jnp.int32)
        slot = pltriton.load(last_ref.at[b, token], mask=token < launch.T, other=-1)
        # Slots behind those that this block of queries sees are written by the next block.
        written = (slot >= 0) & (slot <= newest) & own.have(slot, launch)
        k_at = (token + first) * heads + launch.N + g
        k_operands = load(k_at, token + first, written)
        v = pltriton.load(
            qkv_ref.at[row, *line_indices(k_at + launch.G, H)], mask=broadcast_columns(written, H), other=0.0
        )
        k, v, *scales = _as_stored(apply_rope_in_kernel(k_operands), v, scale_refs, g)

        # An interpreted kernel writes masked elements back as they were; slot 0 and page 0 send those to the null page.
        place = jnp.maximum(slot, 0)
        page = pltriton.load(table_ref.at[b, jax.lax.div(place, jnp.int32(launch.P))], mask=written, other=0)
        at, mask = page * launch.P + jax.lax.rem(place, jnp.int32(launch.P)), written & (page != 0)
        for ref, x in ((k_out_ref, k), (v_out_ref, v)):
            pltriton.store(ref.at[g, *line_indices(at, H)], x, mask=broadcast_columns(mask, H))
        for ref, x in zip(scale_out_refs, scales, strict=True):
            pltriton.store(ref.at[g, at], x, mask=mask)
        return carry

    def attend():
        # The tokens behind a row's valid ones are the next row's.
        has_query = queries.real if start_ref is None else queries.real & (queries.last >= 0)
        q_operands = load(queries.lines_among(heads, launch.R) + first * heads, queries.token + first, has_query)
        if launch.T <= MMA_SIZE and launch.block_queries <= _ROTATED_BESIDE_KEYS:
            write(0)  # while the queries are on their way
            q = apply_rope_in_kernel(q_operands)
        else:  # one after the other: the operands of all of them would not fit into registers
            q = apply_rope_in_kernel(q_operands)
            jax.lax.fori_loop(0, pl.cdiv(launch.T, MMA_SIZE), write, jnp.int32(0))
        if not is_interpreted():
            pltriton.debug_barrier()  # all threads have stored what any of them loads

        load_tile = tile_loader(k_out_ref, v_out_ref, scale_refs, g, H, q.dtype)
        finish = functools.partial(times_value_scale, scale_refs=scale_refs, g=g)
        read = (q,), queries, newest, load_tile, table_ref, launch, out_refs
        attend_pages(*read, finish=finish, sinks_ref=sinks_ref, start_ref=start_ref)

    if sharing.splits == 1:
        attend()
    else:
        pl.when(own.first < own.end)(attend)


def _as_stored(k, v, scale_refs, g):
    """In a kernel: new keys and values ``[n, H]`` of KV head g as they are stored, and their scales ``[n]`` if they have
    some."""
    if scale_refs is None:
        return k, v
    if not scale_refs.of_tokens:
        return tuple(encode_in_kernel(x, ref[g]) for x, ref in zip((k, v), scale_refs, strict=True))
    scales = [token_scales(x) for x in (k, v)]  # [n, 1]
    codes = (encode_in_kernel(x, jnp.broadcast_to(scale, x.shape)) for x, scale in zip((k, v), scales, strict=True))
    return *codes, *(scale.reshape(-1) for scale in scales)
