"""Attention of many query tokens over keys and values in eight bits, on Hopper GPUs.

Their kernel for prefill reads keys and values of bfloat16 from memory. So each layer of a prefill program first computes
what the bytes of all texts that it reads stand for, in bfloat16, and discards it afterwards: one launch, which reads half of
what it writes, before attention reads every number many times. The work grows with the number of pages in use."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.fp8 import KVScales, decode_in_kernel
from jspec.pallas.attention.paged import flat_pools, in_slots
from jspec.pallas.attention.pages_in_use import max_prefill_pages, pages_in_use
from jspec.pallas.attention.prefill_sm90 import prefill_attention_kernel
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.triton import block_ids, broadcast_columns, kernel_call, line_indices

_SLOTS, _WARPS = 64, 4  # of a program instance


@functools.partial(jax.jit, static_argnames=("num_stages", "instances", "interpret"))  # layers share one trace
def widened_attention_kernel(
    q, k_pool, v_pool, queries: PagedQueries, spec: AttentionSpec, scales: KVScales, *, interpret=None, **options
):
    """``paged_attention_reference`` over bytes, as two kernels; the attention of an invalid query token is 0.

    What a byte stands for is rounded to bfloat16, which changes it where the scale is no power of two. The texts of a
    prefill batch may have ``max_prefill_pages(B, T, M, P)`` pages in all, pages that they share counted once. If they have
    more, all results are NaN."""
    (B, T, *_), P, M = q.shape, k_pool.shape[2], queries.table.shape[1]
    newest = jnp.max(queries.last_slots(P), axis=1)
    in_use = pages_in_use(queries.table, newest, k_pool.shape[1:3], max_prefill_pages(B, T, M, P))
    k, v = widen_kernel(k_pool, v_pool, scales, in_use.numbers, in_use.total, q.dtype, interpret=interpret is not None)
    return prefill_attention_kernel(q, k, v, queries._replace(table=in_use.table), spec, interpret=interpret, **options)


def widen_kernel(k_pool, v_pool, scales: KVScales, numbers, count, dtype, *, interpret=False):
    """What the bytes of the listed pages stand for, keys and values ``[G, U, P, H]`` of ``dtype``, one launch.

    Args:
      k_pool, v_pool: bytes ``[G, pages, P, H]``.
      scales: of heads, or of the tokens in the pools.
      numbers: int32 ``[U]``, pages of the pools.
      count: int32, how many of them are listed, the first ones; results of the others are arbitrary. If it is more than U,
        all results are NaN.
      dtype: of the results.
      interpret: run on any platform, slowly.
    """
    (G, _, P, H), [U] = k_pool.shape, numbers.shape
    wide = jax.ShapeDtypeStruct((G, U * P, H), dtype)
    k, v = kernel_call(
        _widen,
        *(*flat_pools(k_pool, v_pool), in_slots(scales), numbers, count.reshape(1)),
        grid=(pl.cdiv(U * P, _SLOTS), G),
        out_shape=[wide, wide],
        num_warps=_WARPS,
        interpret=interpret,
        P=P,
    )
    return k.reshape(G, U, P, H), v.reshape(G, U, P, H)


def _widen(k_ref, v_ref, scale_refs, numbers_ref, count_ref, k_out_ref, v_out_ref, *, P: int):
    tile, g, count = pl.program_id(0), pl.program_id(1), count_ref[jnp.int32(0)]
    _, slots, H = k_out_ref.shape

    @pl.when(tile * _SLOTS < count * P)
    def _():
        slot = block_ids(tile, _SLOTS)
        in_list = slot < slots
        page = pltriton.load(numbers_ref.at[jax.lax.div(slot, jnp.int32(P))], mask=in_list, other=0)
        line, mask = page * P + jax.lax.rem(slot, jnp.int32(P)), broadcast_columns(in_list, H)
        for ref, scale_ref, out_ref in zip((k_ref, v_ref), scale_refs, (k_out_ref, v_out_ref), strict=True):
            codes = pltriton.load(ref.at[g, *line_indices(line, H)])
            numbers = decode_in_kernel(codes, jnp.float32, nan=not scale_refs.of_tokens)
            if scale_refs.of_tokens:
                numbers *= broadcast_columns(pltriton.load(scale_ref.at[g, line]), H)
            else:
                numbers *= scale_ref[g]
            numbers = jnp.where(jnp.full(numbers.shape, count * P <= slots), numbers, jnp.nan)
            pltriton.store(out_ref.at[g, *line_indices(slot, H)], numbers.astype(out_ref.dtype), mask=mask)
