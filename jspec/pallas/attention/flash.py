"""FlashAttention in a Triton program instance: a running softmax over tiles of keys and values (Dao et al., 2022, 2023).

A KV head is shared by R attention heads. The T query tokens of a row times those R heads are the *queries* of the KV
head, numbered token by token: query i belongs to query token i // R and to attention head i % R of the R. A kernel
computes with matrices that have one line for each query."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.fp8 import STORED, decode_in_kernel
from jspec.pallas.attention.merge_splits import merge_splits
from jspec.pallas.attention.parts import Sharing
from jspec.pallas.attention.softmax import KVTile, Softmax, add_tile, divisor
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries, TreeMask, sees_in_tree
from jspec.pallas.attention.tiling import AttentionTiling
from jspec.pallas.triton import MMA_SIZE, broadcast_columns, kernel_call, line_indices, reciprocal

_FEW_QUERIES = 64  # of a KV head: those of a round, not of a prefill batch
_WIDE_TILE = 128  # slots of a tile of bytes whose values are converted as they are loaded; with fewer it was no faster


@dataclass(frozen=True)
class AttentionLaunch:
    """The static sizes of a launch. Letters are those of ``jspec.config``.

    Attributes:
      spec: how queries attend; the sinks, which are arrays, are left out.
      block_queries: how many of the T R queries of a KV head a program instance has.
      tile_slots: how many cache slots a tile has.
      sharing: how the slots of a row are shared among instances.
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
    sharing: Sharing
    ragged_tokens: int | None = None

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
        queries.require_tree()
        (B, T), (G, _, P, H) = queries.positions.shape, pool.shape
        # Bytes become numbers of two bytes at least in registers, which is what limits the size of a tile.
        count, tile_slots = T * N // G, tiling.tile_slots(H * max(pool.dtype.itemsize, 2))
        block = min(tiling.queries, max(MMA_SIZE, pl.next_power_of_2(count)))
        cells, slots, span = B * G * pl.cdiv(count, block), queries.table.shape[1] * P, None
        if spec.window is not None:
            span = spec.window + queries.most_new_slots - 1  # slots that the query tokens of a row see
        softmax_bytes, few = 4 * B * T * N * (H + 2), count <= _FEW_QUERIES or queries.tree is not None
        sharing = tiling.sharing(cells, pl.cdiv(slots, tile_slots), tile_slots, few, span, softmax_bytes)
        return cls(B, T, G, N // G, H, P, replace(spec, sinks=None), block, tile_slots, sharing, ragged_tokens)

    @property
    def N(self) -> int:
        return self.G * self.R


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
      place: int32 ``[block]``, where the window of a query ends: ``last``, or in a tree its token's place in the text.
      root: the slot of a tree's root, and ``words`` those of ``TreeMask.ancestors``, uint32 ``[block]`` each.
    """

    b: Any
    g: Any
    split: Any
    query: Any
    token: Any
    real: Any
    last: Any
    place: Any
    root: Any = None
    words: tuple = ()

    @classmethod
    def of(cls, launch: AttentionLaunch, last_ref, tree_refs: Any = None) -> "QueryBlock":
        g, split, b = pl.program_id(1), pl.program_id(2), pl.program_id(3)
        query = pl.program_id(0) * launch.block_queries + jnp.arange(launch.block_queries, dtype=jnp.int32)
        real, token = query < launch.T * launch.R, jax.lax.div(query, jnp.int32(launch.R))
        last = pltriton.load(last_ref.at[b, token], mask=real, other=-1)
        if tree_refs is None:
            return cls(b, g, split, query, token, real, last, last)
        place_ref, words_ref, root_ref = tree_refs
        place = pltriton.load(place_ref.at[b, token], mask=real, other=0)
        words = (pltriton.load(words_ref.at[b, token, i], mask=real, other=0) for i in range(words_ref.shape[2]))
        return cls(b, g, split, query, token, real, last, place, root_ref[b], tuple(words))

    def lines_among(self, heads: int, R: int):
        """Where the queries lie in an array ``[T * heads, H]`` of all heads of all query tokens."""
        return self.token * heads + self.g * R + self.query - self.token * R

    def see(self, slot, newest, launch: AttentionLaunch):
        """Whether queries see slots, int32 ``[slots]``, of which none past ``newest`` is read: bool ``[block, slots]``."""
        seen, window = slot[None, :] <= jnp.minimum(self.last, newest)[:, None], launch.spec.window
        if self.words:
            seen &= sees_in_tree((slot - self.root)[None, :], [word[:, None] for word in self.words])
        return seen & (True if window is None else slot[None, :] > self.place[:, None] - window)


def launch_attention(
    kernel: Callable,
    launch: AttentionLaunch,
    args,
    last,
    dtype,
    tiling: AttentionTiling,
    *,
    sinks=None,
    tree: TreeMask | None = None,
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
      sinks: ``AttentionSpec.sinks``, which the kernel gets as well if it is to store attention.
      tree: ``PagedQueries.tree``, which the kernel gets as well.
      others: shapes of further outputs of the kernel, which come before those of ``store_attention``.
      aliases: maps arguments to outputs that take their place in memory.
      interpret: run on any platform, slowly.

    Returns:
      the other outputs, and attention ``[B, T, N, H]``; ``[1, Q, N, H]`` of a ragged view whose rows are not split.
    """
    B, T, N, H = launch.B, launch.T, launch.N, launch.H
    partial = lambda *shape: jax.ShapeDtypeStruct((B, launch.sharing.stored, T * N, *shape), jnp.float32)  # noqa: E731
    merges = launch.sharing.splits > 1  # ragged tokens are merged in rows
    rows, tokens = (B, T) if launch.ragged_tokens is None or merges else (1, launch.ragged_tokens)
    attention = jax.ShapeDtypeStruct((rows, tokens * N, H), dtype)
    outputs: Any = kernel_call(
        kernel,
        *args,
        grid=(pl.cdiv(T * launch.R, launch.block_queries), launch.G, launch.sharing.splits, B),
        out_shape=[*others, *([partial(H), partial(), partial()] if merges else [attention])],
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        aliases=aliases,
        interpret=interpret,
        launch=launch,
    )
    made, attended = outputs[: len(others)], outputs[len(others) :]
    out = attended[0]
    if merges:
        acc, peak, total = attended
        window, ends = launch.spec.window, None if tree is None else tree.positions
        args = acc, peak, total, last, sinks, dtype, launch.sharing, window, None if window is None else ends
        out = merge_splits(*args, interpret=interpret)
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


class OwnTiles(NamedTuple):
    """In a kernel: the tiles of a program instance, one after another: ``first``, and the ``end`` of them."""

    first: Any
    end: Any

    @classmethod
    def of(cls, queries: QueryBlock, newest, launch: AttentionLaunch) -> "OwnTiles":
        """Of those with a slot up to ``newest`` that a query of the block sees."""
        slots, last = launch.tile_slots, queries.last
        oldest = jnp.int32(0)
        if launch.spec.window is not None:
            oldest = jnp.maximum(
                jnp.min(jnp.where(last < 0, jnp.max(last), queries.place)) - (launch.spec.window - 1), 0
            )
            oldest = jnp.minimum(oldest, newest + 1)
        first, end = oldest // slots, jnp.maximum((newest + slots) // slots, oldest // slots)
        return cls(*launch.sharing.tiles_of(queries.split, first, end))

    def have(self, slot, launch: AttentionLaunch):
        """Whether slots are in these tiles."""
        tile = slot // launch.tile_slots
        return (self.first <= tile) & (tile < self.end)


def attend_pages(
    q,
    queries: QueryBlock,
    newest,
    load: Callable,
    table_ref,
    launch: AttentionLaunch,
    out_refs,
    *,
    finish: Callable[[Softmax], Softmax] = lambda softmax: softmax,
    sinks_ref=None,
    start_ref=None,
):
    """In a kernel: attend with a block of queries over the program instance's slots, and store what comes of it.

    Args:
      q: the parts of the queries, as ``add_tile`` has them.
      queries: the block of queries.
      newest: the last slot of the row that is read, -1 if there is none.
      load: ``load(at, live)`` reads a ``KVTile`` from places ``at`` of a pool, int32 ``[slots]``; zeros where ``live`` is
        false.
      table_ref: int32 ``[B, M]``, the pages of each row.
      launch: the sizes.
      out_refs: attention ``[B, T N, H]``; or softmaxes ``[B, stored, T N, H]`` and twice ``[B, stored, T N]`` if rows are
        shared.
      finish: what the softmax of a part becomes before it is merged.
      sinks_ref: ``[N]``, or None.
      start_ref: ``RaggedLayout.start`` of a ragged view whose attention is stored.
    """
    b, slots, sharing = queries.b, launch.tile_slots, launch.sharing
    own, empty = OwnTiles.of(queries, newest, launch), Softmax.empty(launch.block_queries, launch.H)

    def pages(i):
        """The page of tile i, or the page of every slot of it if a tile spans several; 0 where no slot is live."""
        slot = i * slots if launch.P % slots == 0 else i * slots + jnp.arange(slots, dtype=jnp.int32)
        return pltriton.load(table_ref.at[b, jax.lax.div(slot, jnp.int32(launch.P))], mask=slot <= newest, other=0)

    def attend_tile(i, carry):
        part, whole, page = carry  # the page was looked up a trip ago, or its loads would have to wait for it
        slot = i * slots + jnp.arange(slots, dtype=jnp.int32)
        tile = load(page * launch.P + jax.lax.rem(slot, jnp.int32(launch.P)), slot <= newest)
        part = add_tile(part, q, tile, queries.see(slot, newest, launch), launch.spec)
        if sharing.merges:
            number, is_last = sharing.part_of(i), i + 1 == own.end
            closes = is_last | (sharing.part_of(i + 1) != number)
            part, whole = jax.lax.cond(closes, lambda: close(part, whole, number, is_last), lambda: (part, whole))
        return part, whole, pages(i + 1)

    def close(part, whole, number, is_last):
        """The softmaxes after a part has ended."""
        part = finish(part)
        if sharing.splits == 1:
            return empty, whole.merged(part)
        if sharing.head == 1:
            _store_softmax(part, sharing.place(number), queries, launch, *out_refs)
            return empty, whole
        whole = whole.merged(part)
        is_head = queries.split == 0  # which merges its parts

        @pl.when(is_last | jnp.logical_not(is_head))
        def _():
            _store_softmax(whole, sharing.place(number), queries, launch, *out_refs)

        forgotten = whole._replace(peak=jnp.where(is_head, whole.peak, -jnp.inf))
        return empty, forgotten

    whole = empty if sharing.merges and not (sharing.splits > 1 and sharing.head == 1) else None
    carry = empty, whole, pages(own.first)
    part, whole, _ = jax.lax.fori_loop(own.first, own.end, attend_tile, carry)
    if sharing.splits == 1:
        _store_attention(
            whole if sharing.merges else finish(part),
            queries,
            launch,
            *out_refs,
            sinks_ref=sinks_ref,
            start_ref=start_ref,
        )
    elif not sharing.merges:
        _store_softmax(finish(part), queries.split, queries, launch, *out_refs)


def _store_attention(softmax: Softmax, queries: QueryBlock, launch: AttentionLaunch, out_ref, *, sinks_ref, start_ref):
    """In a kernel: store the attention of a block of queries. The last row's instances of a ragged view then write zeros
    behind its tokens."""
    b, H = queries.b, launch.H
    at = queries.lines_among(launch.N, launch.R)
    if sinks_ref is not None:
        heads = queries.lines_among(0, launch.R)  # where a query lies among the heads of its own token
        sinks = pltriton.load(sinks_ref.at[heads], mask=queries.real, other=0.0)
        softmax = softmax.merged(Softmax.of_sinks(sinks, H))
    out = (softmax.acc * reciprocal(divisor(softmax.total, queries.last))[:, None]).astype(out_ref.dtype)
    if start_ref is None or launch.ragged_tokens is None:
        pltriton.store(out_ref.at[b, *line_indices(at, H)], out, mask=broadcast_columns(queries.real, H))
        return
    # What follows a row's valid tokens is the next row's.
    valid = broadcast_columns(queries.real & (queries.last >= 0), H)
    pltriton.store(out_ref.at[0, *line_indices(at + start_ref[b] * launch.N, H)], out, mask=valid)
    _zero_padding(out_ref, queries.g, jnp.where(b == launch.B - 1, start_ref[launch.B], launch.ragged_tokens), launch)


def _store_softmax(softmax: Softmax, place, queries: QueryBlock, launch: AttentionLaunch, acc_ref, peak_ref, total_ref):
    """In a kernel: store a softmax of a block of queries among those of its row."""
    b, real, H = queries.b, queries.real, launch.H
    at = queries.lines_among(launch.N, launch.R)
    seen_any = real & (softmax.peak != -jnp.inf)
    pltriton.store(acc_ref.at[b, place, *line_indices(at, H)], softmax.acc, mask=broadcast_columns(seen_any, H))
    pltriton.store(peak_ref.at[b, place, at], softmax.peak, mask=real)
    pltriton.store(total_ref.at[b, place, at], softmax.total, mask=real)


def _zero_padding(out_ref, g, begin, launch: AttentionLaunch):
    """In a kernel: store zeros for KV head g in the tokens from ``begin`` on, a ragged view's padding."""
    head = jnp.arange(pl.next_power_of_2(launch.R), dtype=jnp.int32)
    zeros, mask = jnp.zeros((head.shape[0], launch.H), out_ref.dtype), broadcast_columns(head < launch.R, launch.H)

    def fill(token, carry):
        pltriton.store(out_ref.at[0, *line_indices(token * launch.N + g * launch.R + head, launch.H)], zeros, mask=mask)
        return carry

    jax.lax.fori_loop(begin, jnp.int32(launch.ragged_tokens), fill, jnp.int32(0))
