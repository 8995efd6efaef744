"""Attention over the pages of the KV cache that reads only the live slots of each row.

The T query tokens of a row times the R attention heads of one KV head make one matrix, so keys and values are read once
for all of them (Ainslie et al., 2023). Several program instances share the live slots of a row, and their partial
softmaxes are merged afterwards (Dao et al., 2023), so even a single row keeps a whole GPU busy."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import (
    AttentionLaunch,
    QueryBlock,
    attend_pages,
    launch_attention,
    tile_loader,
    times_value_scale,
)
from jspec.pallas.attention.fp8 import KVScales
from jspec.pallas.attention.reference import causal_mask, grouped_attention
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.tiling import AttentionTiling, tiling_of, tiling_of_bytes
from jspec.pallas.triton import broadcast_columns, line_indices


def paged_attention_reference(
    q, k_pool, v_pool, queries: PagedQueries, spec: AttentionSpec, scales: KVScales | None = None
) -> jax.Array:
    """Attention of T query tokens per row over the slots of the row's pages, up to the query token's own slot; of a
    ``tree``, over those of the text and of the query token's ancestors.

    Args:
      q: ``[B, T, N, H]``.
      k_pool, v_pool: ``[G, pages, P, H]``, in the dtype of q, or bytes with ``scales``.
      queries: the query tokens.
      spec: how they attend.
      scales: of heads, or of the tokens in the pools (``jspec.pallas.attention.fp8``).

    Returns:
      ``[B, T, N, H]`` in the dtype of q.
    """
    k, v = (gather_pages(pool, queries.table) for pool in (k_pool, v_pool))
    return attend_slots(q, k, v, queries, spec, gather_scales(scales, queries.table))


def attend_slots(q, k, v, queries: PagedQueries, spec: AttentionSpec, scales: KVScales | None = None) -> jax.Array:
    """``paged_attention_reference`` over keys ``[G, B, S, H]`` and values ``[G, B, S, Hv]`` that were gathered from
    pages: ``[B, T, N, Hv]``. Scales of tokens are ``[G, B, S]``."""
    queries.require_tree()
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)
    # Slots past the newest query token may hold numbers of an earlier request, NaN included, and 0 x NaN is NaN.
    newest = jnp.max(jnp.where(queries.valid, queries.positions, -1), axis=1, keepdims=True)
    known = slots[None] <= newest  # [B, S]
    v = jnp.where(known[None, :, :, None], v, jnp.zeros((), v.dtype))
    if scales is not None and scales.of_tokens:
        scales = scales._replace(v=jnp.where(known[None], scales.v, 0.0))
    mask = causal_mask(queries.positions, slots, spec.window, queries.tree)
    return grouped_attention(q, k, v, mask, spec, scales)


def gather_pages(pool, table) -> jax.Array:
    """All slots of each row: ``[G, pages, P, H]``, int32 ``[B, M] -> [G, B, M P, H]``."""
    G, _, P, H = pool.shape
    B, M = table.shape
    return pool[:, table].reshape(G, B, M * P, H)


def gather_scales(scales: KVScales | None, table) -> KVScales | None:
    """Scales beside keys that were gathered: those of tokens ``[G, B, M P]``."""
    if scales is None or not scales.of_tokens:
        return scales
    return jax.tree.map(lambda pool: gather_pages(pool[..., None], table)[..., 0], scales)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))  # layers share one trace
def paged_attention_kernel(
    q,
    k_pool,
    v_pool,
    queries: PagedQueries,
    spec: AttentionSpec,
    scales: KVScales | None = None,
    *,
    tiling: AttentionTiling | None = None,
    interpret=False,
):
    """``paged_attention_reference`` as a kernel; the attention of an invalid query token is 0."""
    (B, T, N, H), P = q.shape, k_pool.shape[2]
    if tiling is None:
        tiling = tiling_of(q.dtype, H) if scales is None else tiling_of_bytes(q.dtype, H, N // len(k_pool), T)
    assert tiling is not None, f"no kernel for heads of {H} numbers in {q.dtype}"
    launch = AttentionLaunch.of(queries, N, k_pool, spec, tiling)
    last = queries.last_slots(P)
    tokens = queries.table, last, spec.sinks, queries.tree
    args = q.reshape(B, T * N, H), *flat_pools(k_pool, v_pool), in_slots(scales), *tokens
    how = {"sinks": spec.sinks, "tree": queries.tree, "interpret": interpret}
    (out,) = launch_attention(_attend_split, launch, args, last, q.dtype, tiling, **how)
    return out


def flat_pools(*pools) -> list[jax.Array]:
    """Pools ``[G, pages, P, H]`` as kernels read them, by slots: ``[G, pages * P, H]``."""
    return [pool.reshape(pool.shape[0], -1, pool.shape[-1]) for pool in pools]


def as_pools(written, k_pool) -> tuple:
    """What a kernel has written of ``flat_pools`` and of ``in_slots``: the pools in the shape of ``k_pool``, and as a third
    one the scales if those are of tokens."""
    k, v, *of_tokens = (array.reshape(k_pool.shape[: 1 + array.ndim]) for array in written)
    return (k, v, KVScales(*of_tokens)) if of_tokens else (k, v)


def in_slots(scales: KVScales | None) -> KVScales | None:
    """Scales as kernels read them: those of tokens ``[G, pages * P]``."""
    if scales is None or not scales.of_tokens:
        return scales
    return jax.tree.map(lambda scale: scale.reshape(scale.shape[0], -1), scales)


def _attend_split(
    q_ref, k_ref, v_ref, scale_refs, table_ref, last_ref, sinks_ref, tree_refs, *out_refs, launch: AttentionLaunch
):
    queries = QueryBlock.of(launch, last_ref, tree_refs)
    at = line_indices(queries.lines_among(launch.N, launch.R), launch.H)
    q = pltriton.load(q_ref.at[queries.b, *at], mask=broadcast_columns(queries.real, launch.H), other=0.0)
    load = tile_loader(k_ref, v_ref, scale_refs, queries.g, launch.H, q.dtype)
    finish = functools.partial(times_value_scale, scale_refs=scale_refs, g=queries.g)
    read = (q,), queries, jnp.max(queries.last), load, table_ref, launch, out_refs
    attend_pages(*read, finish=finish, sinks_ref=sinks_ref)
