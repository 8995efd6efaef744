"""One program's part of attention: a running softmax over tiles of keys and values (Dao et al., 2022, 2023).

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

from jspec.pallas.attention.merge_splits import divisor, finite, merge_splits
from jspec.pallas.attention.reference import Scores
from jspec.pallas.triton import LOG2_E, kernel_call

SMALLEST = 16  # side of a matrix that tensor cores multiply
_MOST_SLOTS = 64  # of a tile: scores are held in registers
_FEW_QUERIES = 64  # of a KV head: those of a round, not of a prefill pass


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; the last bits of the results depend on it.

    Attributes:
      tile: bytes of keys, and of values, that a program loads at a time.
      rows: the most queries of one program; if a KV head has more, several programs read its keys.
      programs: if the batch makes fewer programs than this, the slots of a row are split among several programs, until
        there are nearly so many.
      warps: warps of a program that attends.
      stages: how many tiles such a program has under way at once.
      share: the most slots that one program reads of a row of few query tokens, as long as there are not more than
        ``most_splits`` of them. So a row with a long text has more programs than the others, which do not wait for it.
      most_splits: see ``share``.
    """

    tile: int = 16384
    rows: int = 64
    programs: int = 132
    warps: int = 4
    stages: int = 3
    share: int = 2048
    most_splits: int = 8

    def slots(self, row_bytes: int) -> int:
        """How many cache slots a tile has, a power of two, if a key has ``row_bytes`` bytes."""
        fitting = max(self.tile // row_bytes, SMALLEST)
        return min(1 << (fitting.bit_length() - 1), _MOST_SLOTS)

    def splits(self, cells: int, tiles: int) -> int:
        """How many programs share the slots of one cell, which is a row, a KV head and a block of queries.

        Args:
          cells: how many cells there are.
          tiles: how many tiles the slots of a row make at most.
        """
        wanted = max(1, self.programs // cells)
        return min(1 << (wanted.bit_length() - 1), pl.next_power_of_2(tiles))

    def splits_of_long_rows(self, fewest: int, slots: int) -> int:
        """How many programs share a row of the most slots, if every row has at least ``fewest`` programs."""
        return max(fewest, min(self.most_splits, pl.next_power_of_2(pl.cdiv(slots, self.share))))


# fp32 is multiplied outside the tensor cores, from registers, and takes long enough for a merge to pay.
TILINGS = {jnp.dtype("bfloat16"): Tiling(), jnp.dtype("float32"): Tiling(tile=8192, rows=16, programs=264)}


@dataclass(frozen=True)
class Plan:
    """What is static in a launch. Letters are those of ``jspec.config``; P is the page size, and R = N / G.

    Attributes:
      window: None, or how many slots a query sees, its own included.
      scores: what becomes of products of queries and keys; the sinks, which are arrays, are left out.
      block: how many of the T R queries of a KV head a program has.
      slots: how many cache slots a tile has.
      splits: how many programs there are for the slots of a row.
      fewest: how many of them every row uses. A row with more than ``share`` tiles for each uses more.
      share: how many tiles a program has at most, unless all are used.
      packed: how many query tokens there are in all, if they lie side by side (``Packing``); None if every row has T.
    """

    B: int
    T: int
    G: int
    R: int
    H: int
    P: int
    window: int | None
    scores: Scores
    block: int
    slots: int
    splits: int
    fewest: int
    share: int
    packed: int | None = None

    @classmethod
    def of(
        cls,
        B: int,
        T: int,
        N: int,
        pool,
        table,
        window: int | None,
        scores: Scores,
        tiling: Tiling,
        packed: int | None = None,
    ) -> "Plan":
        """The plan for a pool ``[G, pages, P, H]`` and a table ``[B, M]``."""
        G, _, P, H = pool.shape
        rows, slots = T * N // G, tiling.slots(H * pool.dtype.itemsize)
        block = min(tiling.rows, max(SMALLEST, pl.next_power_of_2(rows)))
        tiles = pl.cdiv(table.shape[1] * P, slots)
        fewest = splits = tiling.splits(B * G * pl.cdiv(rows, block), tiles)
        if rows <= _FEW_QUERIES and window is None:
            splits = tiling.splits_of_long_rows(fewest, tiles * slots)
        share, scores = pl.cdiv(tiles, splits), replace(scores, sinks=None)
        return cls(B, T, G, N // G, H, P, window, scores, block, slots, splits, fewest, share, packed)

    @property
    def N(self) -> int:
        return self.G * self.R


class Packing(NamedTuple):
    """Where the query tokens of B rows lie that are side by side, each row's valid ones behind those of the row before.

    Attributes:
      start: int32 ``[B + 1]``, the place of each row's first token, and behind them how many tokens there are.
      source: int32 ``[R]``, which token of a row each of the R is: t of row b is ``b T + t``. Anything for padding.
    """

    start: Any
    source: Any

    def packed(self, x) -> jax.Array:
        """Values of tokens of rows, ``[B, T, ...]``, as those of the R tokens, ``[1, R, ...]``."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.source, axis=0, mode="clip")[None]


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


class Queries(NamedTuple):
    """In a kernel: which queries a program has.

    Attributes:
      b: the row.
      g: the KV head.
      split: which part of the row's slots the program reads.
      row: int32 ``[block]``, the number of each query, t R + r for query token t and head r of the R.
      token: int32 ``[block]``, the query token.
      real: bool ``[block]``; the last block may be longer than what is left of the queries.
      last: int32 ``[block]``, the last slot that a query sees, -1 if it sees none.
    """

    b: Any
    g: Any
    split: Any
    row: Any
    token: Any
    real: Any
    last: Any

    @classmethod
    def of(cls, plan: Plan, last_ref) -> "Queries":
        g, split, b = pl.program_id(1), pl.program_id(2), pl.program_id(3)
        row = pl.program_id(0) * plan.block + jnp.arange(plan.block, dtype=jnp.int32)
        real, token = row < plan.T * plan.R, jax.lax.div(row, jnp.int32(plan.R))
        last = pltriton.load(last_ref.at[b, token], mask=real, other=-1)
        return cls(b, g, split, row, token, real, last)

    def among(self, heads: int, R: int):
        """Where the queries lie in an array ``[T * heads, H]`` of all heads of all query tokens."""
        return self.token * heads + self.g * R + self.row - self.token * R


def run(kernel: Callable, plan: Plan, args, last, dtype, tiling: Tiling, *, others=(), aliases=None, interpret: bool):
    """Launch ``kernel`` over (block of queries, KV head, split, row), and merge what the splits found.

    Args:
      kernel: ``kernel(*arg_refs, *other_refs, *out_refs, plan=plan)``; the last refs are those that ``store`` writes.
      plan: of the launch.
      args: arrays, or trees of them, which the kernel gets as refs.
      last: int32 ``[B, T]``, one of them: the last slot that each query token sees, -1 if it sees none.
      dtype: of the attention.
      tiling: how many warps and stages the kernels have.
      others: shapes of further outputs of the kernel, which come before those of ``store``.
      aliases: maps arguments to outputs that take their place in memory.
      interpret: run on any platform, slowly.

    Returns:
      the other outputs, and attention ``[B, T, N, H]``; ``[1, R, N, H]`` of packed tokens, if no row is split.
    """
    B, T, N, H = plan.B, plan.T, plan.N, plan.H
    partial = lambda *shape: jax.ShapeDtypeStruct((B, plan.splits, T * N, *shape), jnp.float32)  # noqa: E731
    rows, tokens = (B, T) if plan.packed is None or plan.splits > 1 else (1, plan.packed)  # of what is not merged
    whole = jax.ShapeDtypeStruct((rows, tokens * N, H), dtype)
    parts = kernel_call(
        kernel,
        *args,
        grid=(pl.cdiv(T * plan.R, plan.block), plan.G, plan.splits, B),
        out_shape=[*others, *([whole] if plan.splits == 1 else [partial(H), partial(), partial()])],
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        aliases=aliases,
        interpret=interpret,
        plan=plan,
    )
    made, parts = parts[: len(others)], parts[len(others) :]
    out = parts[0] if plan.splits == 1 else merge_splits(*parts, last, dtype, interpret=interpret)
    return *made, out.reshape(rows, tokens, N, H)


def tile_loader(k_ref, v_ref, g, H: int) -> Callable:
    """In a kernel: what reads tiles of KV head g from pools ``[G, pages * P, H]``, for ``attend_pages``."""

    def load(at, live):
        where = g, *rows(at, H)
        k, v = (pltriton.load(ref.at[where], mask=each(live, H), other=0.0) for ref in (k_ref, v_ref))
        return (k,), v

    return load


def attend_pages(q, queries: Queries, newest, load: Callable, table_ref, sinks_ref, plan: Plan) -> Softmax:
    """In a kernel: the softmax of a block of queries over the program's share of the row's slots.

    Args:
      q: the parts of the queries, as ``add_tile`` has them.
      queries: which queries they are.
      newest: the last slot of the row that is read, -1 if there is none.
      load: ``load(at, live)`` reads a tile from places ``at`` of a pool, int32 ``[slots]``, and gives the parts of its keys,
        and its values, as ``add_tile`` has them; zeros where ``live`` is false.
      table_ref: int32 ``[B, M]``, the pages of each row.
      sinks_ref: ``[N]``, or None.
      plan: of the launch.
    """
    b, slots, last = queries.b, plan.slots, queries.last
    oldest = 0
    if plan.window is not None:
        oldest = jnp.maximum(jnp.min(jnp.where(last < 0, jnp.max(last), last)) - (plan.window - 1), 0)
        oldest = jnp.minimum(oldest, newest + 1)
    first = oldest // slots
    tiles = jnp.maximum((newest + slots) // slots - first, 0)  # the live ones, dealt evenly
    all_used = plan.fewest == plan.splits
    used = plan.splits if all_used else jnp.clip(pl.cdiv(tiles, plan.share), plan.fewest, plan.splits)
    begin, end = (first + tiles * jnp.minimum(part, used) // used for part in (queries.split, queries.split + 1))

    def pages(i):
        """The page of tile i, or the page of every slot of it if a tile spans several; 0 where no slot is live."""
        slot = i * slots if plan.P % slots == 0 else i * slots + jnp.arange(slots, dtype=jnp.int32)
        return pltriton.load(table_ref.at[b, jax.lax.div(slot, jnp.int32(plan.P))], mask=slot <= newest, other=0)

    def attend_tile(i, carry):
        softmax, page = carry  # the page was looked up a trip ago, or its loads would have to wait for it
        slot = i * slots + jnp.arange(slots, dtype=jnp.int32)
        k, v = load(page * plan.P + jax.lax.rem(slot, jnp.int32(plan.P)), slot <= newest)
        seen = slot[None, :] <= jnp.minimum(last, newest)[:, None]
        return add_tile(softmax, q, k, v, seen & in_window(slot, last, plan), plan.scores), pages(i + 1)

    return jax.lax.fori_loop(begin, end, attend_tile, (_first(queries, sinks_ref, plan), pages(begin)))[0]


def _first(queries: Queries, sinks_ref, plan: Plan) -> Softmax:
    """In a kernel: the softmax of a block of queries before any key.

    A sink is the score of a key that was seen before, whose value is 0. It counts once in a row, in the first split."""
    acc = jnp.zeros((plan.block, plan.H), jnp.float32)
    if sinks_ref is None:
        return Softmax(acc, jnp.full(plan.block, -jnp.inf), jnp.zeros(plan.block, jnp.float32))
    mine = queries.real & (queries.split == 0)
    heads = queries.among(0, plan.R)  # where a query lies among the heads of its own token
    sinks = pltriton.load(sinks_ref.at[heads], mask=mine, other=-jnp.inf)
    return Softmax(acc, sinks.astype(jnp.float32) * LOG2_E, mine.astype(jnp.float32))


def in_window(slot, last, plan: Plan):
    """Whether slots are inside each query's window: bool ``[block, slots]``, or True if there is no window."""
    return True if plan.window is None else slot[None, :] > last[:, None] - plan.window


def add_tile(softmax: Softmax, q, k, v, seen, scores: Scores) -> Softmax:
    """In a kernel: the softmax after further keys and values.

    The peak drops a score that is NaN. Its weight is NaN, and so are the sums from then on.

    Args:
      softmax: the softmax before.
      q: the queries in parts ``[block, n]``, whose sizes n add up to that of a query.
      k: the keys in parts ``[slots, n]`` of the same sizes.
      v: values ``[slots, H]``.
      seen: bool ``[block, slots]``, which keys each query sees.
      scores: what becomes of products of queries and keys.
    """
    acc, peak, total = softmax
    products = functools.reduce(jnp.add, (dot(a, b, trans_b=True) for a, b in zip(q, k, strict=True)))
    bits = jnp.where(seen, scores.of(products, sum(part.shape[1] for part in q), LOG2_E), -jnp.inf)
    raised = jnp.maximum(peak, jnp.max(bits, axis=1))
    shift = finite(raised)
    weights, kept = jnp.exp2(bits - shift[:, None]), jnp.exp2(peak - shift)
    acc = acc * kept[:, None] + dot(weights.astype(v.dtype), v)
    return Softmax(acc, raised, total * kept + jnp.sum(weights, axis=1))


def store(softmax: Softmax, queries: Queries, plan: Plan, *out_refs, start_ref=None):
    """In a kernel: write what a program found: attention, or a part of it that is to be merged if slots are split.

    ``start_ref`` is ``Packing.start`` if tokens are packed. The last row's programs then write zeros behind its tokens."""
    b, split, real, H = queries.b, queries.split, queries.real, plan.H
    at = queries.among(plan.N, plan.R)
    if plan.splits == 1:
        (out_ref,) = out_refs
        out = (softmax.acc / divisor(softmax.total, queries.last)[:, None]).astype(out_ref.dtype)
        if start_ref is None or plan.packed is None:
            pltriton.store(out_ref.at[b, *rows(at, H)], out, mask=each(real, H))
            return
        # What follows a row's valid tokens is the next row's.
        mine = each(real & (queries.last >= 0), H)
        pltriton.store(out_ref.at[0, *rows(at + start_ref[b] * plan.N, H)], out, mask=mine)
        _fill(out_ref, queries.g, jnp.where(b == plan.B - 1, start_ref[plan.B], plan.packed), plan)
        return
    acc_ref, peak_ref, total_ref = out_refs
    some = real & (softmax.peak != -jnp.inf)
    pltriton.store(acc_ref.at[b, split, *rows(at, H)], softmax.acc, mask=each(some, H))
    pltriton.store(peak_ref.at[b, split, at], softmax.peak, mask=real)
    pltriton.store(total_ref.at[b, split, at], softmax.total, mask=real)


def _fill(out_ref, g, begin, plan: Plan):
    """In a kernel: zeros for the heads of KV head g of packed tokens from ``begin`` on, which are padding."""
    head = jnp.arange(pl.next_power_of_2(plan.R), dtype=jnp.int32)
    zeros, mask = jnp.zeros((head.shape[0], plan.H), out_ref.dtype), each(head < plan.R, plan.H)

    def fill(token, carry):
        pltriton.store(out_ref.at[0, *rows(token * plan.N + g * plan.R + head, plan.H)], zeros, mask=mask)
        return carry

    jax.lax.fori_loop(begin, jnp.int32(plan.packed), fill, jnp.int32(0))


def rows(index, H: int):
    """What ``ref[index, :]`` would read, as two arrays of indices; an interpreted kernel cannot mix indices and slices."""
    shape = index.shape[0], H
    return each(index, H), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def dot(a, b, trans_b: bool = False):
    """Product in fp32; fp32 operands are multiplied in full, never in TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pltriton.dot(a, b, trans_b=trans_b, precision=precision)


def each(x, H: int):
    """Each number repeated H times: ``[n] -> [n, H]``."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], H))
