"""FlashAttention in a Triton program instance: a running softmax over tiles of keys and values (Dao et al., 2022, 2023).

A KV head is shared by R attention heads. The T query tokens of a row times those R heads are the *queries* of the KV
head, numbered token by token: query i belongs to query token i // R and to attention head i % R of the R. A kernel
computes with matrices that have one line for each query."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.fp8 import STORED, decode_in_kernel
from jspec.pallas.attention.merge_splits import divisor, finite, merge_splits
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.tiling import AttentionTiling
from jspec.pallas.triton import LOG2_E, MMA_SIZE, broadcast_columns, dot, kernel_call, line_indices

_FEW_QUERIES = 64  # of a KV head: those of a round, not of a prefill batch
_WIDE_TILE = 128  # slots of a tile of bytes whose values are converted as they are loaded; with fewer it was no faster


@dataclass(frozen=True)
class AttentionLaunch:
    """The static sizes of a launch. Letters are those of ``jspec.config``.

    Attributes:
      spec: how queries attend; the sinks, which are arrays, are left out.
      block_queries: how many of the T R queries of a KV head a program instance has.
      tile_slots: how many cache slots a tile has.
      num_splits: how many instances there are for the slots of a row.
      min_splits: how many of them every row uses. A row with more than ``split_tiles`` tiles for each uses more.
      split_tiles: how many tiles an instance has at most, unless all instances are used.
      has_parts: whether each instance has ``split_tiles`` tiles of any row (``AttentionTiling.part_slots``).
      ragged_tokens: how many query tokens a ragged view has (``RaggedLayout``); None if every row has T.
    """

    B: int
    T: int
    G: int
    R: int
    H: int
    P: int
    spec: AttentionSpec
    block_queries: int
    tile_slots: int
    num_splits: int
    min_splits: int
    split_tiles: int
    ragged_tokens: int | None = None
    has_parts: bool = False

    @classmethod
    def of(
        cls,
        queries: PagedQueries,
        N: int,
        pool,
        spec: AttentionSpec,
        tiling: AttentionTiling,
        ragged_tokens: int | None = None,
    ) -> "AttentionLaunch":
        """The launch for N attention heads and a pool ``[G, pages, P, H]``."""
        (B, T), (G, _, P, H) = queries.positions.shape, pool.shape
        # Bytes become numbers of two bytes at least in registers, which is what limits the size of a tile.
        count, tile_slots = T * N // G, tiling.tile_slots(H * max(pool.dtype.itemsize, 2))
        block = min(tiling.queries, max(MMA_SIZE, pl.next_power_of_2(count)))
        tiles = pl.cdiv(queries.table.shape[1] * P, tile_slots)
        fewest = splits = tiling.num_splits(B * G * pl.cdiv(count, block), tiles)
        if count <= _FEW_QUERIES and spec.window is None:
            splits = tiling.num_splits_of_long_rows(fewest, tiles * tile_slots)
        split_tiles = pl.cdiv(tiles, splits)
        if tiling.part_slots is not None:
            split_tiles = tiling.part_slots // tile_slots
            fewest, splits = 1, pl.next_power_of_2(pl.cdiv(tiles, split_tiles))
        sizes = block, tile_slots, splits, fewest, split_tiles, ragged_tokens, tiling.part_slots is not None
        return cls(B, T, G, N // G, H, P, replace(spec, sinks=None), *sizes)

    @property
    def N(self) -> int:
        return self.G * self.R


class Softmax(NamedTuple):
    """A running softmax of a block of queries, float32.

    Attributes:
      acc: the weighted sums of the values seen so far, ``[block, H]``.
      peak: the largest score so far, ``[block]``.
      total: the sum of the weights so far, ``[block]``.
    """

    acc: Any
    peak: Any
    total: Any


class KVTile(NamedTuple):
    """In a kernel: keys and values of some slots.

    Attributes:
      k: the keys in parts ``[slots, n]``, whose sizes n add up to that of a query.
      v: values ``[slots, H]``.
      k_scale: what products with the keys have to be multiplied by, float32 ``[]`` or ``[slots]``; None if they are as
        they should be.
      v_scale: what the weights of the values have to be multiplied by, float32 ``[slots]``; None likewise.
    """

    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None


class QueryBlock(NamedTuple):
    """In a kernel: the block of queries of a program instance.

    Attributes:
      b: the row.
      g: the KV head.
      split: which split of the row's slots the instance reads.
      query: int32 ``[block]``, the number of each query, t R + r for query token t and head r of the R.
      token: int32 ``[block]``, the query token.
      real: bool ``[block]``, false past the last query, where the last block ends.
      last: int32 ``[block]``, the last slot that a query sees, -1 if it sees none.
    """

    b: Any
    g: Any
    split: Any
    query: Any
    token: Any
    real: Any
    last: Any

    @classmethod
    def of(cls, launch: AttentionLaunch, last_ref) -> "QueryBlock":
        g, split, b = pl.program_id(1), pl.program_id(2), pl.program_id(3)
        query = pl.program_id(0) * launch.block_queries + jnp.arange(launch.block_queries, dtype=jnp.int32)
        real, token = query < launch.T * launch.R, jax.lax.div(query, jnp.int32(launch.R))
        last = pltriton.load(last_ref.at[b, token], mask=real, other=-1)
        return cls(b, g, split, query, token, real, last)

    def lines_among(self, heads: int, R: int):
        """Where the queries lie in an array ``[T * heads, H]`` of all heads of all query tokens."""
        return self.token * heads + self.g * R + self.query - self.token * R


def launch_attention(
    kernel: Callable,
    launch: AttentionLaunch,
    args,
    last,
    dtype,
    tiling: AttentionTiling,
    *,
    others=(),
    aliases=None,
    interpret: bool,
):
    """Launch ``kernel`` over (block of queries, KV head, split, row), and merge the splits.

    Args:
      kernel: ``kernel(*arg_refs, *other_refs, *out_refs, launch=launch)``; ``store_attention`` writes the last refs.
      launch: the sizes.
      args: arrays, or trees of them, which the kernel gets as refs.
      last: int32 ``[B, T]``, one of them: the last slot that each query token sees, -1 if it sees none.
      dtype: of the attention.
      tiling: how many warps and stages the kernels have.
      others: shapes of further outputs of the kernel, which come before those of ``store_attention``.
      aliases: maps arguments to outputs that take their place in memory.
      interpret: run on any platform, slowly.

    Returns:
      the other outputs, and attention ``[B, T, N, H]``; ``[1, Q, N, H]`` of a ragged view whose rows are not split.
    """
    B, T, N, H = launch.B, launch.T, launch.N, launch.H
    partial = lambda *shape: jax.ShapeDtypeStruct((B, launch.num_splits, T * N, *shape), jnp.float32)  # noqa: E731
    merges = launch.num_splits > 1  # ragged tokens are merged in rows
    rows, tokens = (B, T) if launch.ragged_tokens is None or merges else (1, launch.ragged_tokens)
    attention = jax.ShapeDtypeStruct((rows, tokens * N, H), dtype)
    outputs: Any = kernel_call(
        kernel,
        *args,
        grid=(pl.cdiv(T * launch.R, launch.block_queries), launch.G, launch.num_splits, B),
        out_shape=[*others, *([attention] if launch.num_splits == 1 else [partial(H), partial(), partial()])],
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        aliases=aliases,
        interpret=interpret,
        launch=launch,
    )
    made, attended = outputs[: len(others)], outputs[len(others) :]
    out = attended[0]
    if launch.num_splits > 1:
        _, peak, total = attended
        out = merge_splits(out, peak, total, last, dtype, interpret=interpret)
    return *made, out.reshape(rows, tokens, N, H)


def tile_loader(k_ref, v_ref, scale_refs, g, H: int, dtype) -> Callable:
    """In a kernel: the function that loads tiles of KV head g from pools ``[G, pages * P, H]``, for ``attend_pages``.

    ``scale_refs`` are those of ``jspec.pallas.attention.fp8`` for pools of bytes, which become numbers of ``dtype``, else
    None. The scale of a head's values is left to ``times_value_scale``."""
    of_tokens = scale_refs if scale_refs is not None and scale_refs.of_tokens else ()
    k_scale = None if scale_refs is None or of_tokens else scale_refs.k[g]

    def load(at, live):
        where, mask = (g, *line_indices(at, H)), broadcast_columns(live, H)
        k, v = (pltriton.load(ref.at[where], mask=mask, other=0) for ref in (k_ref, v_ref))
        if k_ref.dtype == STORED:
            k = decode_in_kernel(k, dtype, nan=not of_tokens)  # loaded in the layout in which they are multiplied
            v = decode_in_kernel(v, dtype, nan=not of_tokens, as_loaded=v.shape[0] >= _WIDE_TILE)
        if not of_tokens:
            return KVTile((k,), v, k_scale)
        return KVTile((k,), v, *(pltriton.load(ref.at[g, at], mask=live, other=0.0) for ref in of_tokens))

    return load


def times_value_scale(softmax: "Softmax", scale_refs, g) -> "Softmax":
    """In a kernel: the softmax with sums of values in bytes times the scale of KV head g, if that has one."""
    if scale_refs is None or scale_refs.of_tokens:
        return softmax
    return softmax._replace(acc=softmax.acc * scale_refs.v[g])


def live_tiles(queries: QueryBlock, newest, launch: AttentionLaunch):
    """In a kernel: the first tile with a slot that a block of queries sees, how many such tiles there are up to slot
    ``newest``, and how many splits share them evenly."""
    slots, last = launch.tile_slots, queries.last
    oldest = 0
    if launch.spec.window is not None:
        oldest = jnp.maximum(jnp.min(jnp.where(last < 0, jnp.max(last), last)) - (launch.spec.window - 1), 0)
        oldest = jnp.minimum(oldest, newest + 1)
    first = oldest // slots
    tiles = jnp.maximum((newest + slots) // slots - first, 0)
    if launch.min_splits == launch.num_splits:
        return first, tiles, launch.num_splits
    if launch.has_parts:
        return first, tiles, jnp.clip(pl.cdiv(first + tiles, launch.split_tiles), 1, launch.num_splits)
    return first, tiles, jnp.clip(pl.cdiv(tiles, launch.split_tiles), launch.min_splits, launch.num_splits)


def attend_if_used(attend: Callable[[], None], queries: QueryBlock, newest, launch: AttentionLaunch, *out_refs):
    """In a kernel: ``attend()``, which stores an attention, or the softmax of no slot if the row's other splits have all.

    Rows with short texts have few splits, and the launch as many as the longest text may need: an instance without any
    slot ends at once.

    Args:
      attend: loads queries, and stores.
      queries, newest, launch: as of ``attend_pages``.
      out_refs: those of ``store_attention``.
    """
    if launch.min_splits == launch.num_splits:
        attend()
        return
    *_, used = live_tiles(queries, newest, launch)
    pl.when(queries.split < used)(attend)

    @pl.when(queries.split >= used)
    def store_nothing():
        _, peak_ref, total_ref = out_refs
        at = queries.b, queries.split, queries.lines_among(launch.N, launch.R)
        nothing = jnp.zeros(launch.block_queries, jnp.float32)
        pltriton.store(peak_ref.at[at], nothing - jnp.inf, mask=queries.real)
        pltriton.store(total_ref.at[at], nothing, mask=queries.real)


def attend_pages(
    q, queries: QueryBlock, newest, load: Callable, table_ref, sinks_ref, launch: AttentionLaunch
) -> Softmax:
    """In a kernel: the softmax of a block of queries over the slots of the program instance's split.

    Args:
      q: the parts of the queries, as ``add_tile`` has them.
      queries: the block of queries.
      newest: the last slot of the row that is read, -1 if there is none.
      load: ``load(at, live)`` reads a ``KVTile`` from places ``at`` of a pool, int32 ``[slots]``; zeros where ``live`` is
        false.
      table_ref: int32 ``[B, M]``, the pages of each row.
      sinks_ref: ``[N]``, or None.
      launch: the sizes.
    """
    b, slots, last = queries.b, launch.tile_slots, queries.last
    first, tiles, used = live_tiles(queries, newest, launch)
    if launch.has_parts:
        begin, end = (
            jnp.clip(i * launch.split_tiles, first, first + tiles) for i in (queries.split, queries.split + 1)
        )
    else:
        begin, end = (first + tiles * jnp.minimum(i, used) // used for i in (queries.split, queries.split + 1))

    def pages(i):
        """The page of tile i, or the page of every slot of it if a tile spans several; 0 where no slot is live."""
        slot = i * slots if launch.P % slots == 0 else i * slots + jnp.arange(slots, dtype=jnp.int32)
        return pltriton.load(table_ref.at[b, jax.lax.div(slot, jnp.int32(launch.P))], mask=slot <= newest, other=0)

    def attend_tile(i, carry):
        softmax, page = carry  # the page was looked up a trip ago, or its loads would have to wait for it
        slot = i * slots + jnp.arange(slots, dtype=jnp.int32)
        tile = load(page * launch.P + jax.lax.rem(slot, jnp.int32(launch.P)), slot <= newest)
        seen = slot[None, :] <= jnp.minimum(last, newest)[:, None]
        return add_tile(softmax, q, tile, seen & in_window(slot, last, launch), launch.spec), pages(i + 1)

    return jax.lax.fori_loop(begin, end, attend_tile, (_initial_softmax(queries, sinks_ref, launch), pages(begin)))[0]


def _initial_softmax(queries: QueryBlock, sinks_ref, launch: AttentionLaunch) -> Softmax:
    """In a kernel: the softmax of a block of queries before any key.

    A sink is the score of a key that was seen before, whose value is 0. It counts once in a row, in the first split."""
    acc = jnp.zeros((launch.block_queries, launch.H), jnp.float32)
    if sinks_ref is None:
        return Softmax(acc, jnp.full(launch.block_queries, -jnp.inf), jnp.zeros(launch.block_queries, jnp.float32))
    has_sink = queries.real & (queries.split == 0)
    heads = queries.lines_among(0, launch.R)  # where a query lies among the heads of its own token
    sinks = pltriton.load(sinks_ref.at[heads], mask=has_sink, other=-jnp.inf)
    return Softmax(acc, sinks.astype(jnp.float32) * LOG2_E, has_sink.astype(jnp.float32))


def in_window(slot, last, launch: AttentionLaunch):
    """Whether slots are inside each query's window: bool ``[block, slots]``, or True if there is no window."""
    return True if launch.spec.window is None else slot[None, :] > last[:, None] - launch.spec.window


def add_tile(softmax: Softmax, q, tile: KVTile, seen, spec: AttentionSpec) -> Softmax:
    """In a kernel: the softmax after further keys and values.

    The peak drops a score that is NaN. Its weight is NaN, and so are the sums from then on.

    Args:
      softmax: the softmax before.
      q: the queries in parts ``[block, n]``, of the same sizes n as those of the keys.
      tile: the keys and values.
      seen: bool ``[block, slots]``, which keys each query sees.
      spec: how products of queries and keys become scores.
    """
    (acc, peak, total), (k, v, k_scale, v_scale) = softmax, tile
    products = functools.reduce(jnp.add, (dot(a, b, trans_b=True) for a, b in zip(q, k, strict=True)))
    k_scale = k_scale[None] if k_scale is not None and k_scale.ndim else k_scale
    scores = spec.scores(products, sum(part.shape[1] for part in q), LOG2_E, k_scale)
    bits = jnp.where(seen, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(bits, axis=1))
    shift = finite(new_peak)
    weights, rescale = jnp.exp2(bits - shift[:, None]), jnp.exp2(peak - shift)
    weighed = weights if v_scale is None else weights * v_scale[None]
    acc = acc * rescale[:, None] + dot(weighed.astype(v.dtype), v)
    return Softmax(acc, new_peak, total * rescale + jnp.sum(weights, axis=1))


def store_attention(softmax: Softmax, queries: QueryBlock, launch: AttentionLaunch, *out_refs, start_ref=None):
    """In a kernel: store the attention of a block of queries, or its running softmax if the row is split.

    ``start_ref`` is ``RaggedLayout.start`` of a ragged view. The last row's instances then write zeros behind its
    tokens."""
    b, split, real, H = queries.b, queries.split, queries.real, launch.H
    at = queries.lines_among(launch.N, launch.R)
    if launch.num_splits == 1:
        (out_ref,) = out_refs
        out = (softmax.acc / divisor(softmax.total, queries.last)[:, None]).astype(out_ref.dtype)
        if start_ref is None or launch.ragged_tokens is None:
            pltriton.store(out_ref.at[b, *line_indices(at, H)], out, mask=broadcast_columns(real, H))
            return
        # What follows a row's valid tokens is the next row's.
        valid = broadcast_columns(real & (queries.last >= 0), H)
        pltriton.store(out_ref.at[0, *line_indices(at + start_ref[b] * launch.N, H)], out, mask=valid)
        _zero_padding(
            out_ref, queries.g, jnp.where(b == launch.B - 1, start_ref[launch.B], launch.ragged_tokens), launch
        )
        return
    acc_ref, peak_ref, total_ref = out_refs
    seen_any = real & (softmax.peak != -jnp.inf)
    pltriton.store(acc_ref.at[b, split, *line_indices(at, H)], softmax.acc, mask=broadcast_columns(seen_any, H))
    pltriton.store(peak_ref.at[b, split, at], softmax.peak, mask=real)
    pltriton.store(total_ref.at[b, split, at], softmax.total, mask=real)


def _zero_padding(out_ref, g, begin, launch: AttentionLaunch):
    """In a kernel: store zeros for KV head g in the tokens from ``begin`` on, a ragged view's padding."""
    head = jnp.arange(pl.next_power_of_2(launch.R), dtype=jnp.int32)
    zeros, mask = jnp.zeros((head.shape[0], launch.H), out_ref.dtype), broadcast_columns(head < launch.R, launch.H)

    def fill(token, carry):
        pltriton.store(out_ref.at[0, *line_indices(token * launch.N + g * launch.R + head, launch.H)], zeros, mask=mask)
        return carry

    jax.lax.fori_loop(begin, jnp.int32(launch.ragged_tokens), fill, jnp.int32(0))
