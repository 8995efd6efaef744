"""Attention of prefill over up-projected keys and values (DeepSeek-V2, 2024).

With keys and values of every head, a query and a key have Hn + Hr numbers and a value Hv: a pair of them takes half as
many products as in attention over latents, whose keys have Ck + Hr numbers and whose values Ck. Each layer of a prefill
program computes the keys and values of all texts that it reads, from their first token on, and discards them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jspec.pallas.attention.fp8 import STORED, KVScales
from jspec.pallas.attention.paged import attend_slots, gather_pages, gather_scales
from jspec.pallas.attention.pages_in_use import max_prefill_pages, pages_in_use
from jspec.pallas.attention.prefill_launch import suits_prefill, tile_slots_of
from jspec.pallas.attention.prefill_sm90 import prefill_attention_kernel
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.dispatch import KernelRow, by_platform, on_hopper
from jspec.pallas.mla.up_project import has_up_project_kernel, keys_and_values, up_project_kernel
from jspec.pallas.weights.head_maps import HeadMaps


def up_projected_attention(
    q, pool, queries: PagedQueries, maps: HeadMaps, scales: KVScales | None = None, *, scale: float
) -> jax.Array:
    """``up_projected_attention_reference``, and on a Hopper GPU ``up_projected_attention_kernel``."""
    queries.require_tree(supported=False)
    functions = up_projected_attention_kernel, up_projected_attention_reference
    return by_platform(*functions, q, pool, queries, maps, scales, scale=scale)


def up_projected_attention_reference(
    q, pool, queries: PagedQueries, maps: HeadMaps, scales: KVScales | None = None, *, scale: float
) -> jax.Array:
    """Attention of T query tokens per row over keys and values of all heads, computed from the latents of the row's
    pages.

    Args:
      q: ``[B, T, N, Hn + Hr]``, the last Hr numbers rotated.
      maps: the up-projection to keys and values.
      pool, queries, scales, scale: as of ``latent_attention_reference``.

    Returns:
      ``[B, T, N, Hv]`` in the dtype of q.
    """
    [latents], scales = gather_pages(pool, queries.table), gather_scales(scales, queries.table)  # [B, S, Ck + Hr]
    k, v = (jnp.moveaxis(part, 2, 0) for part in keys_and_values(latents, maps, scales and scales.k[0], q.dtype))
    return attend_slots(q, k, v, queries, AttentionSpec(scale=scale))


@functools.partial(jax.jit, static_argnames=("scale", "num_stages", "instances", "interpret"))  # layers share one trace
def up_projected_attention_kernel(
    q,
    pool,
    queries: PagedQueries,
    maps: HeadMaps,
    scales: KVScales | None = None,
    *,
    scale: float,
    num_stages=None,
    instances=None,
    interpret=None,
):
    """``up_projected_attention_reference``, as three kernels; the attention of an invalid query token is 0.

    The texts of a prefill batch may have ``max_prefill_pages(B, T, M, P)`` pages in all, pages that they share counted
    once. If they have more, all results are NaN."""
    (B, T, *_), P, M = q.shape, pool.shape[2], queries.table.shape[1]
    newest = jnp.max(queries.last_slots(P), axis=1)
    in_use = pages_in_use(queries.table, newest, pool.shape[1:3], max_prefill_pages(B, T, M, P))
    of_pages = pool, in_use.numbers, in_use.total
    k, v = up_project_kernel(*of_pages, maps, scales, dtype=q.dtype, interpret=interpret is not None)
    options = {"num_stages": num_stages, "interpret": interpret} | (
        {} if instances is None else {"instances": instances}
    )
    queries, spec = queries._replace(table=in_use.table), AttentionSpec(scale=scale)
    return prefill_attention_kernel(q, k, v, queries, spec, pages_first=True, **options)


def _conditions(q, pool, queries: PagedQueries, maps: HeadMaps) -> Iterator[tuple[bool, str]]:
    """Bytes in the pool become bfloat16 where keys and values are computed. Rows have multiples of 128 query tokens."""
    (B, T, N, H), (_, _, P, size), Hv, Ck = q.shape, pool.shape, *maps.values.shape[1:]
    numbers = max_prefill_pages(B, T, queries.table.shape[1], P) * P * N * H
    yield on_hopper(), "this is no Hopper GPU"
    sizes = H % 64 == 0 and Hv % 64 == 0 and Hv <= H <= 256
    yield sizes, f"keys have {H} numbers and values {Hv}, not multiples of 64 up to 256"
    yield has_up_project_kernel(Ck, size - Ck), f"latents have {Ck} numbers, and rotated keys {size - Ck}"
    yield P == 64 or P == 128 == tile_slots_of(H, Hv), f"pages of {P} slots make no tiles"
    yield numbers < 2**31, f"{numbers} numbers of all keys are 2^31 or more"
    dtypes = q.dtype == jnp.bfloat16 and pool.dtype in (q.dtype, STORED)
    yield dtypes, f"queries are {q.dtype}, and the pool is {pool.dtype}"
    yield suits_prefill(B, T, N, R=1), f"{B} rows of {T} tokens do not make enough blocks"


UP_PROJECTED = KernelRow("up-projected keys and values", up_projected_attention_kernel, _conditions)
