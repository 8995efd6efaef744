"""Which kernel computes attention over keys and values in pages: ``paged_attention``, and the table that it reads.

Attention over latents has kernels of its own (``jspec.pallas.mla``)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas.attention.decode import MOST_QUERIES, decode_attention_kernel
from jspec.pallas.attention.fp8 import STORED, KVScales
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.pages_in_use import max_prefill_pages
from jspec.pallas.attention.prefill_launch import ORDERED_TILE_SLOTS, suits_prefill, tile_slots_of
from jspec.pallas.attention.prefill_sm90 import prefill_attention_kernel
from jspec.pallas.attention.rope_and_write_kv import rope_and_write_kv_kernel
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.tiling import tiling_of
from jspec.pallas.attention.widened import widened_attention_kernel
from jspec.pallas.dispatch import KernelRow, by_platform, on_hopper, row_of, wants_one_order

# How many attention heads a KV head may have, by head dimension, for many query tokens to have a kernel of their own. Both
# were timed with 4 heads of 128 and 6 of 256 (benchmarks/log/attention.md). The other entries make blocks of that size, but
# were not timed with both, and nothing without an entry was; of heads of 256 with R = 1, the kernel for many query tokens
# alone was timed (benchmarks/log/mla.md). ``python -m benchmarks.kernels.prefill_attention`` times both and tells what to
# enter.
CHOSEN = {64: (1, 2, 4, 8, 16), 128: (1, 2, 4, 8, 16), 256: (6, 8)}


def paged_attention(
    q,
    k_pool,
    v_pool,
    queries: PagedQueries,
    spec: AttentionSpec,
    scales: KVScales | None = None,
    may_widen: bool = False,
) -> jax.Array:
    """``paged_attention_reference``, and on an NVIDIA GPU the first row of ``TABLE`` that serves it.

    Args:
      q, k_pool, v_pool, queries, spec, scales: as of the reference implementation.
      may_widen: whether keys and values of all pages may be computed before attention begins. Then the rows' texts have no
        more pages than ``max_prefill_pages``.
    """
    kernel = row_of(TABLE, Attention(q, k_pool, queries, spec, may_widen), wants_one_order()).kernel
    args = q, k_pool, v_pool, queries, spec, scales
    return by_platform(kernel, paged_attention_reference, *args, supported=kernel is not paged_attention_reference)


class Attention(NamedTuple):
    """Attention by which a row is chosen; see ``paged_attention``. It may have shapes in place of arrays.

    For ``ONE_LAUNCH`` and ``ROPE_AND_WRITE_KV``, ``q`` are stacked queries, keys and values ``[B, T, N + 2G, H]``."""

    q: Any
    pool: Any
    queries: Any = None
    spec: AttentionSpec = AttentionSpec()
    may_widen: bool = False


def _in_pages(a: Attention) -> Iterator[tuple[bool, str]]:
    H = a.q.shape[-1]
    yield a.pool.dtype in (a.q.dtype, STORED), f"queries are {a.q.dtype}, and the pool is {a.pool.dtype}"
    yield tiling_of(a.q.dtype, H) is not None, f"heads have {H} numbers of {a.q.dtype}"


def _of_few_tokens(a: Attention) -> Iterator[tuple[bool, str]]:
    yield from _in_pages(a)
    T, R = a.queries.positions.shape[1], a.q.shape[2] // a.pool.shape[0] - 2
    yield MOST_QUERIES >= T * R, f"{T} tokens of {R} heads are more than {MOST_QUERIES} queries of a KV head"


def _of_many_tokens(a: Attention) -> Iterator[tuple[bool, str]]:
    """The query tokens of a row have to fill blocks: they are a multiple of 128 / ``block_heads_of(R)``, so of 16 with R = 8
    and of 64 with R = 6. With R = 3, 5 or 7 it is 128, but ``prefill_chunk`` is less by default."""
    (B, T, N, H), (G, _, P, _) = a.q.shape, a.pool.shape
    yield on_hopper(), "this is no Hopper GPU"
    yield a.queries is None or a.queries.tree is None, "query tokens are a tree, whose masks the kernel has not"
    yield a.spec.softcap is None, "scores have a soft cap, for which the kernel's hyperbolic tangent is too coarse"
    yield a.q.dtype == a.pool.dtype == jnp.bfloat16, f"queries are {a.q.dtype}, and the pool is {a.pool.dtype}"
    yield P == 64 or P == 128 == tile_slots_of(H, H), f"pages of {P} slots make no tiles"
    yield N // G in CHOSEN.get(H, ()), f"not chosen for {N // G} heads of {H} numbers that share a KV head"
    yield suits_prefill(B, T, N, N // G), f"{B} rows of {T} tokens do not make enough blocks"


def _of_many_tokens_in_order(a: Attention) -> Iterator[tuple[bool, str]]:
    H, P, tiling = a.q.shape[-1], a.pool.shape[2], tiling_of(a.q.dtype, a.q.shape[-1])
    yield P == ORDERED_TILE_SLOTS, f"pages have {P} slots, not {ORDERED_TILE_SLOTS}"
    ordered = tiling is not None and tiling.tile_slots(2 * H) == ORDERED_TILE_SLOTS
    yield ordered, f"tiles of heads of {H} numbers have no {ORDERED_TILE_SLOTS} slots in other kernels"
    yield from _of_many_tokens(a)


def _of_many_tokens_over_bytes(a: Attention) -> Iterator[tuple[bool, str]]:
    yield a.may_widen, "the pages that are in use have no limit"
    yield a.pool.dtype == STORED, f"the pool is {a.pool.dtype}"
    (B, T, *_), (G, _, P, H) = a.q.shape, a.pool.shape
    numbers = max_prefill_pages(B, T, a.queries.table.shape[1], P) * P * G * H
    yield numbers < 2**31, f"{numbers} numbers of the pages in use are 2^31 or more"
    yield from _of_many_tokens(a._replace(pool=jax.ShapeDtypeStruct(a.pool.shape, a.q.dtype)))


_IN_PARTS = "parts of a row"  # the order of sums of ``jspec.pallas.attention.softmax``
TABLE = (
    KernelRow("many tokens over bytes", widened_attention_kernel, _of_many_tokens_over_bytes),
    KernelRow("many tokens", lambda *args: prefill_attention_kernel(*args[:5]), _of_many_tokens),
    KernelRow(
        "many tokens in one order",
        lambda *args: prefill_attention_kernel(*args[:5], one_order=True),
        _of_many_tokens_in_order,
        _IN_PARTS,
    ),
    KernelRow("pages", paged_attention_kernel, _in_pages, _IN_PARTS),
    KernelRow("gathered pages", paged_attention_reference, lambda _: iter(())),
)
# What ``PagedView`` (``jspec.models.kv_cache``) does in one launch: ``extend`` of few tokens, and ``rope_and_write_kv``.
ONE_LAUNCH = KernelRow("one launch", decode_attention_kernel, _of_few_tokens, _IN_PARTS)
ROPE_AND_WRITE_KV = KernelRow("RoPE and writes", rope_and_write_kv_kernel, _in_pages)
