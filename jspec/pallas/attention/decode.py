"""Rotation, cache writes and attention in one launch, for rows with few new tokens.

Every program rotates its queries and reads slots that were written before. The first split of a row also has the new keys
and values, in registers: it attends to them from there, and writes them into their pages for later rounds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import (
    SMALLEST,
    TILINGS,
    Packing,
    Plan,
    Queries,
    Tiling,
    add_tile,
    attend_pages,
    each,
    in_window,
    rows,
    run,
    store,
    tile_loader,
)
from jspec.pallas.attention.paged import has_kernel, last_slots
from jspec.pallas.attention.reference import PLAIN, Rotation, Scores
from jspec.pallas.attention.rope import load_turning, turned

_MOST_ROWS = 64  # queries of a KV head (T R): one program has them all, and all new keys as well
_PACKED_ROWS = 16  # queries of a program where most rows have few tokens: the programs of what they lack end at once


def has_extend_kernel(qkv, pool, T: int | None = None) -> bool:
    """Whether the kernel can be used for stacked queries, keys and values ``[B, T, N + 2G, H]`` and such a pool. T is given
    apart if tokens are packed."""
    T, G = T or qkv.shape[1], pool.shape[0]
    R = qkv.shape[2] // G - 2
    return has_kernel(qkv, pool) and T * R <= _MOST_ROWS


@functools.partial(jax.jit, static_argnames=("window", "tiling", "interpret"))  # layers share one trace
def extend_kernel(
    qkv,
    rotation: Rotation | None,
    k_pool,
    v_pool,
    table,
    positions,
    valid,
    window: int | None,
    scores: Scores = PLAIN,
    packing: Packing | None = None,
    *,
    tiling: Tiling | None = None,
    interpret=False,
):
    """``View.extend`` of a ``PagedView`` (``jspec.models.kv_cache``) as a kernel; with a ``packing``, of a
    ``PackedView`` (``jspec.models.ragged_view``), whose tokens it reads and writes where they are.

    Args:
      qkv: ``[B, T, N + 2G, H]``, queries, keys and values, not rotated; ``[1, R, N + 2G, H]`` with a ``packing``.
      rotation: the rotary embedding of the tokens' positions, None if nothing is rotated.
      k_pool, v_pool: ``[G, pages, P, H]``, in the dtype of qkv; updated in place.
      table, positions, valid: as in ``PagedView``.
      window: None, or W: a query token sees W slots, its own included.
      scores: what becomes of products of queries and keys, and the sinks of the attention heads.
      packing: where the tokens of rows are; None if they are in rows.

    Returns:
      attention ``[B, T, N, H]``, which is 0 for invalid tokens, and the two pools. With a ``packing`` it is
      ``[1, R, N, H]``, and finite for padding, where it means nothing.
    """
    (B, T), (heads, H), (G, pages, P, _) = positions.shape, qkv.shape[2:], k_pool.shape
    tiling, packed = tiling or TILINGS[qkv.dtype], None if packing is None else qkv.shape[1]
    if packing is not None:
        tiling = dataclasses.replace(tiling, rows=min(tiling.rows, _PACKED_ROWS))
    plan = Plan.of(B, T, heads - 2 * G, k_pool, table, window, scores, tiling, packed)
    pools = [pool.reshape(G, pages * P, H) for pool in (k_pool, v_pool)]
    last = jnp.where(positions >= 0, last_slots(table, positions, valid, P), -1)
    angles = rotation or ()
    k, v, out = run(
        _extend_split,
        plan,
        (qkv.reshape(len(qkv), -1, H), angles, *pools, table, last, scores.sinks, packing and packing.start),
        last,
        qkv.dtype,
        tiling,
        others=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
        aliases={len(angles) + 1: 0, len(angles) + 2: 1},
        interpret=interpret,
    )
    if packing is not None and plan.splits > 1:
        out = packing.packed(out)
    return out, k.reshape(k_pool.shape), v.reshape(v_pool.shape)


def _extend_split(
    qkv_ref,
    angle_refs,
    k_ref,
    v_ref,
    table_ref,
    last_ref,
    sinks_ref,
    start_ref,
    k_out_ref,
    v_out_ref,
    *out_refs,
    plan: Plan,
):
    queries, heads, H = Queries.of(plan, last_ref), plan.N + 2 * plan.G, plan.H
    b, g = queries.b, queries.g
    token = jnp.arange(max(SMALLEST, pl.next_power_of_2(plan.T)), dtype=jnp.int32)
    slot = pltriton.load(last_ref.at[b, token], mask=token < plan.T, other=-1)
    new, none_before = slot >= 0, jnp.int32(2**31 - 1)
    oldest_new = jnp.min(jnp.where(new, slot, none_before))
    before = jnp.where(oldest_new == none_before, 0, oldest_new) - 1  # the newest slot that was there

    mine = new & (queries.split == 0)
    there = True
    if start_ref is not None:
        there = queries.last >= 0  # what follows the valid tokens of a row is another's
        before = jnp.where(jnp.max(queries.last) >= 0, before, -1)  # a program without queries reads nothing
    row, first = (b, 0) if start_ref is None else (0, start_ref[b])  # where the row's tokens are
    load = functools.partial(load_turning, qkv_ref, angle_refs, row)
    q_turning = load(queries.among(heads, plan.R) + first * heads, queries.token + first, queries.real & there)
    k_at = (token + first) * heads + plan.N + g
    k_turning = load(k_at, token + first, mine)  # needed last, loaded from now on
    v = pltriton.load(qkv_ref.at[row, *rows(k_at + plan.G, H)], mask=each(mine, H), other=0.0)

    q = turned(q_turning)
    old = tile_loader(k_ref, v_ref, g, H)
    softmax = attend_pages((q,), queries, before, old, table_ref, sinks_ref, plan)
    k = turned(k_turning)
    seen = mine[None, :] & (slot[None, :] <= queries.last[:, None])
    softmax = add_tile(softmax, (q,), (k,), v, seen & in_window(slot, queries.last, plan), plan.scores)

    # An interpreted kernel writes masked elements back as they were; slot 0 and page 0 send those to the null page.
    place = jnp.maximum(slot, 0)
    page = pltriton.load(table_ref.at[b, jax.lax.div(place, jnp.int32(plan.P))], mask=mine, other=0)
    at = rows(page * plan.P + jax.lax.rem(place, jnp.int32(plan.P)), H)
    for ref, x in ((k_out_ref, k), (v_out_ref, v)):
        pltriton.store(ref.at[g, *at], x, mask=each(mine & (page != 0), H))
    store(softmax, queries, plan, *out_refs, start_ref=start_ref)
