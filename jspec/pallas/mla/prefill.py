"""Attention over latents in pages, for prefill: keys and values of every head are computed first (DeepSeek-V2, 2024).

A query and a key have Hn + Hr numbers then, and a value Hv: for a pair of them there are half as many products as in
attention to the latents themselves, whose keys have Ck + Hr numbers and whose values Ck. Each layer of a pass computes the
keys and values of all texts that the pass reads, from their first token on, and forgets them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.config import NULL_PAGE
from jspec.pallas.attention.paged import attend_slots, gather_pages, last_slots
from jspec.pallas.attention.prefill_plan import slots_of_tile
from jspec.pallas.attention.prefill_sm90 import prefill_attention_kernel, suits_prefill
from jspec.pallas.attention.reference import Scores
from jspec.pallas.dispatch import by_platform
from jspec.pallas.mla.up_project import HeadMaps, expand_latents_kernel, expanded
from jspec.pallas.mla.up_project import has_kernel as has_expand_kernel


def expanded_attention(q, pool, table, positions, valid, maps: HeadMaps, scores: Scores) -> jax.Array:
    """``expanded_attention_reference``, and on a Hopper GPU ``expanded_attention_kernel``."""
    kernel, reference = (
        functools.partial(f, scores=scores) for f in (expanded_attention_kernel, expanded_attention_reference)
    )
    return by_platform(kernel, reference, q, pool, table, positions, valid, maps)


def expanded_attention_reference(q, pool, table, positions, valid, maps: HeadMaps, scores: Scores) -> jax.Array:
    """Attention of T query tokens per row to the keys of their heads, which follow from the latents of the row's pages.

    Args:
      q: ``[B, T, N, Hn + Hr]``, the last Hr numbers rotated.
      pool: ``[1, pages, P, Ck + Hr]``, latents and rotated keys, in the dtype of q.
      table, positions, valid: as in ``paged_attention_reference``.
      maps: from latents to keys and values.
      scores: what products of queries and keys are multiplied by; neither a soft cap nor sinks.

    Returns:
      ``[B, T, N, Hv]`` in the dtype of q.
    """
    [latents] = gather_pages(pool, table)  # [B, S, Ck + Hr]
    k, v = (jnp.moveaxis(part, 2, 0) for part in expanded(latents, maps))
    return attend_slots(q, k, v, positions, valid, None, scores)


def has_expanded_kernel(q, pool, table, maps: HeadMaps) -> bool:
    """Whether the kernel knows queries and pools like these, and makes enough programs of them.

    It knows bfloat16, heads of keys and of values whose sizes are multiples of 64 up to 256, and pages of 64 slots, or of
    128 where a tile has as many. Rows have to have multiples of 128 query tokens, and keys fewer than 2^31 numbers."""
    (B, T, N, H), (_, _, P, size), (_, Hv, Ck) = q.shape, pool.shape, maps.values.shape
    sizes = H % 64 == 0 and Hv % 64 == 0 and Hv <= H <= 256 and has_expand_kernel(Ck, size - Ck)
    pages = P == 64 or P == 128 == slots_of_tile(H, Hv)
    few = room(B, T, table.shape[1], P) * P * N * H < 2**31
    return sizes and pages and few and q.dtype == pool.dtype == jnp.bfloat16 and suits_prefill(B, T, N, R=1)


@functools.partial(jax.jit, static_argnames=("stages", "programs", "interpret"))  # layers share one trace
def expanded_attention_kernel(
    q, pool, table, positions, valid, maps: HeadMaps, scores: Scores, *, stages=None, programs=None, interpret=None
):
    """``expanded_attention_reference``, as three kernels; the attention of an invalid query token is 0.

    The texts of a pass have room for ``room(B, T, M, P)`` pages in all, pages that they share counted once. If they have
    more, all results are NaN."""
    (B, T, *_), P, M = q.shape, pool.shape[2], table.shape[1]
    newest = jnp.max(last_slots(table, positions, valid, P), axis=1)
    found = pages_in_use(table, newest, pool.shape[1:3], room(B, T, M, P))
    k, v = expand_latents_kernel(pool, found.numbers, found.total, maps, interpret=interpret is not None)
    how = {"stages": stages, "interpret": interpret} | ({} if programs is None else {"programs": programs})
    return prefill_attention_kernel(q, k, v, found.table, positions, valid, None, scores, pages_first=True, **how)


def room(B: int, T: int, M: int, P: int) -> int:
    """For how many pages of its texts a pass of B rows of T query tokens has room, whose tables have M pages of P slots.

    It is enough for one text of any length, and for any number of texts of which nothing was read before if T is a multiple
    of P."""
    return M + -(-B * T // P)


class PagesInUse(NamedTuple):
    """The pages that the rows of a pass attend to, each of them once.

    Attributes:
      numbers: int32 ``[room]``, pages of the pool, padded with the null page.
      table: int32 ``[B, M]``, at which place among ``numbers`` each page of a row is; 0 where the row has none.
      total: int32, how many pages there are. If it is more than ``room``, the others are not listed.
    """

    numbers: jax.Array
    table: jax.Array
    total: jax.Array


def pages_in_use(table, newest, pool: tuple[int, int], most: int) -> PagesInUse:
    """The pages up to the newest slot ``[B]`` that each row attends to; -1 if there is none.

    Args:
      table: int32 ``[B, M]``.
      newest: int32 ``[B]``.
      pool: how many pages the pool has, and the slots of each.
      most: how many pages are listed.
    """
    pages, P = pool
    live = (jnp.arange(table.shape[1], dtype=jnp.int32)[None] * P <= newest[:, None]) & (table != NULL_PAGE)
    used = jnp.zeros(pages, jnp.bool_).at[jnp.where(live, table, pages)].set(True, mode="drop")
    place = jnp.cumsum(used, dtype=jnp.int32) - 1
    at = jnp.where(used & (place < most), place, most)
    numbers = jnp.full(most, NULL_PAGE, jnp.int32).at[at].set(jnp.arange(pages, dtype=jnp.int32), mode="drop")
    return PagesInUse(numbers, jnp.where(live, jnp.minimum(place[table], most - 1), 0), place[-1] + 1)
