"""Attention over latents in the pages of the KV cache: one KV head for all attention heads, whose values are parts of
its keys (DeepSeek-V2, 2024)."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import (
    AttentionLaunch,
    QueryBlock,
    attend_pages,
    launch_attention,
    times_value_scale,
)
from jspec.pallas.attention.fp8 import STORED, KVScales, decode_in_kernel
from jspec.pallas.attention.paged import attend_slots, gather_pages, gather_scales, in_slots
from jspec.pallas.attention.softmax import KVTile
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.tiling import AttentionTiling
from jspec.pallas.dispatch import KernelRow, by_platform
from jspec.pallas.triton import MMA_SIZE, broadcast_columns, line_indices

_LARGEST_RANK = 512
# A program instance has the sums of 512 numbers for each query in registers: it has fewer queries than in other attention.
# These were the fastest in benchmarks/log/mla.md: the first for 64 rows of 20 and 80 queries, and for 640 queries of a
# prefill batch, the others for up to 16 rows.
_MANY = AttentionTiling(tile_bytes=73728, queries=32, num_warps=4, num_stages=2, split_slots=2048, parts=None)
_FEW = dataclasses.replace(_MANY, queries=16, instances=264)
_FEW_OF_LONG = dataclasses.replace(_MANY, instances=264)
_FLOAT32 = dataclasses.replace(_FEW, tile_bytes=18432, num_warps=8)
_FEW_ROWS, _FEW_QUERIES, _ONE_TOKEN, _SHORT = 16, 128, 32, 8192


def tiling_of(B: int, queries: int, slots: int, dtype) -> AttentionTiling:
    """The tiling for B rows of T N = ``queries`` queries each, whose pages have so many slots."""
    if dtype == jnp.float32:
        return _FLOAT32
    if B > _FEW_ROWS or queries > _FEW_QUERIES:
        return _MANY
    # Each block of queries reads the row's slots again. That costs more than wider blocks do if there are many slots.
    return _FEW if queries <= _ONE_TOKEN or slots <= _SHORT else _FEW_OF_LONG


def latent_attention(
    q, pool, queries: PagedQueries, scales: KVScales | None = None, *, rank: int, scale: float
) -> jax.Array:
    """``latent_attention_reference``, and on an NVIDIA GPU the kernel, which reads only live slots.

    The kernel is for bfloat16 and float32, and for latents and rotated keys whose sizes are powers of two of at least
    16; that of latents is at most 512. Other models run the reference implementation, on a GPU as well."""
    queries.require_tree(supported=False)
    args, supported = (q, pool, queries, scales), IN_PAGES.serves(q, pool, rank)
    functions = latent_attention_kernel, latent_attention_reference
    return by_platform(*functions, *args, supported=supported, rank=rank, scale=scale)


def latent_attention_reference(
    q, pool, queries: PagedQueries, scales: KVScales | None = None, *, rank: int, scale: float
) -> jax.Array:
    """Attention of T query tokens per row over the latents of the row's pages, up to the query token's own slot.

    Args:
      q: ``[B, T, N, Ck + Hr]``, absorbed.
      pool: ``[1, pages, P, Ck + Hr]``, latents and rotated keys, in the dtype of q, or bytes with ``scales``.
      queries: the query tokens.
      scales: of latents, or of the tokens in the pool (``jspec.pallas.attention.fp8``).
      rank: Ck, how many numbers of a key are its value: the first ones.
      scale: the factor of products of queries and keys.

    Returns:
      weighted sums of latents ``[B, T, N, Ck]`` in the dtype of q.
    """
    keys, scales = gather_pages(pool, queries.table), gather_scales(scales, queries.table)
    return attend_slots(q, keys, keys[..., :rank], queries, AttentionSpec(scale=scale), scales and scales.of_both)


@functools.partial(jax.jit, static_argnames=("rank", "scale", "tiling", "interpret"))  # layers share one trace
def latent_attention_kernel(
    q,
    pool,
    queries: PagedQueries,
    scales: KVScales | None = None,
    *,
    rank: int,
    scale: float,
    tiling: AttentionTiling | None = None,
    interpret=False,
):
    """``latent_attention_reference`` as a kernel; the attention of an invalid query token is 0."""
    (B, T, N, H), (_, pages, P, _) = q.shape, pool.shape
    tiling = tiling or tiling_of(B, T * N, queries.table.shape[1] * P, q.dtype)
    launch = dataclasses.replace(AttentionLaunch.of(queries, N, pool, AttentionSpec(scale=scale), tiling), H=rank)
    last = queries.last_slots(P)
    args = q.reshape(B, T * N, H), pool.reshape(pages * P, H), in_slots(scales), queries.table, last
    (out,) = launch_attention(_attend_split, launch, args, last, q.dtype, tiling, interpret=interpret)
    return out


def _attend_split(q_ref, pool_ref, scale_refs, table_ref, last_ref, *out_refs, launch: AttentionLaunch):
    queries, parts = QueryBlock.of(launch, last_ref), (launch.H, q_ref.shape[-1] - launch.H)
    of_tokens = scale_refs is not None and scale_refs.of_tokens
    scale_refs = scale_refs and scale_refs.of_both

    def load(ref, at, real, *before):
        """Lines ``at`` of a matrix, the latent and the rotated part of each; zeros where ``real`` is false."""
        (line, latent), (rotated_line, rotated) = (line_indices(at, size) for size in parts)
        where = (line, latent), (rotated_line, rotated + launch.H)
        return tuple(
            pltriton.load(ref.at[(*before, *index)], mask=broadcast_columns(real, size), other=0)
            for index, size in zip(where, parts, strict=True)
        )

    def tile(at, live):
        keys = load(pool_ref, at, live)
        if scale_refs is None:
            return KVTile(keys, keys[0])
        keys = tuple(decode_in_kernel(part, q_ref.dtype, nan=not of_tokens, as_loaded=True) for part in keys)
        if not of_tokens:
            return KVTile(keys, keys[0], scale_refs.k[0])
        scale = pltriton.load(scale_refs.k.at[0, at], mask=live, other=0.0)
        return KVTile(keys, keys[0], scale, scale)

    q = load(q_ref, queries.lines_among(launch.N, launch.R), queries.real, queries.b)
    finish = functools.partial(times_value_scale, scale_refs=scale_refs, g=0)
    attend_pages(q, queries, jnp.max(queries.last), tile, table_ref, launch, out_refs, finish=finish)


def _conditions(q, pool, rank: int) -> Iterator[tuple[bool, str]]:
    parts = rank, pool.shape[-1] - rank
    sizes = all(pl.next_power_of_2(size) == size >= MMA_SIZE for size in parts) and rank <= _LARGEST_RANK
    yield sizes, f"latents have {rank} numbers, and rotated keys {parts[1]}"
    yield pool.dtype in (q.dtype, STORED), f"queries are {q.dtype}, and the pool is {pool.dtype}"
    yield q.dtype in (jnp.bfloat16, jnp.float32), f"queries are {q.dtype}"


IN_PAGES = KernelRow("latents in pages", latent_attention_kernel, _conditions)
