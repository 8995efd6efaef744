"""Attention over the pages of the KV cache, reading the live slots of each row and nothing else.

The T queries of a row times the R query heads of one KV head are the rows of one matrix, so that keys and values are read
once for all of them (Ainslie et al., 2023), and the live slots of a row are dealt to several programs whose partial
softmaxes are merged afterwards (Dao et al., 2023), so that one row keeps a whole GPU busy.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.attention import causal_mask, grouped_attention
from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import kernel_call

_SMALLEST = 16  # side of a matrix that tensor cores multiply
_LARGEST_HEAD = 256
_MOST_SLOTS = 128  # of a tile: scores are held in registers


@dataclass(frozen=True)
class Tiling:
    """How the work is cut; results depend on it in the last bits.

    Attributes:
      tile: bytes of keys, and of values, that a program loads at a time.
      rows: most query rows of one program; more of them read the keys again.
      programs: how many the slots are split to reach, or nearly, if the batch alone does not make so many.
      warps, stages: of the kernel that attends; stages count the tiles under way.
      merge_warps: of the kernel that merges splits.
    """

    tile: int = 16384
    rows: int = 64
    programs: int = 132
    warps: int = 4
    stages: int = 3
    merge_warps: int = 1

    def slots(self, row_bytes: int) -> int:
        """Slots of one tile, whose keys have ``row_bytes`` each."""
        return min(max(self.tile // row_bytes, _SMALLEST), _MOST_SLOTS)

    def splits(self, cells: int, tiles: int) -> int:
        """Programs that share up to ``tiles`` tiles of one of ``cells`` (row of the batch, KV head, block of queries)."""
        wanted = max(1, self.programs // cells)
        return min(1 << (wanted.bit_length() - 1), pl.next_power_of_2(tiles))


# fp32 is multiplied outside the tensor cores, from registers, and takes long enough for a merge to pay.
_TILINGS = {jnp.dtype("bfloat16"): Tiling(), jnp.dtype("float32"): Tiling(tile=8192, rows=16, programs=264)}


def paged_attention(q, k_pool, v_pool, table, positions, valid, window: int | None) -> jax.Array:
    """``paged_attention_reference``, and on an NVIDIA GPU the kernel, which reads live slots only.

    The kernel is for bfloat16 and float32 and for head dimensions that are powers of two in 16..256; any other model
    runs the twin on a GPU too.
    """
    kernel, reference = (
        functools.partial(f, window=window) for f in (paged_attention_kernel, paged_attention_reference)
    )
    args = q, k_pool, v_pool, table, positions, valid
    return by_platform(kernel, reference, *args) if _has_kernel(q, k_pool) else reference(*args)


def paged_attention_reference(q, k_pool, v_pool, table, positions, valid, window: int | None) -> jax.Array:
    """Attention of T queries per row over the slots of the row's pages, up to the query's own.

    Args:
      q: ``[B, T, N, H]``.
      k_pool, v_pool: ``[G, pages, P, H]``, in the dtype of q.
      table: int32 ``[B, M]``, the pages of each row in order; past the newest valid query it may hold anything.
      positions: int32 ``[B, T]``, the slot of each query, on the table where the query is valid.
      valid: bool ``[B, T]``; what an invalid query gets means nothing. Slots past a row's newest valid query may hold
        anything, NaN included.
      window: None, or W: a query sees W slots, its own included.

    Returns:
      ``[B, T, N, H]`` in the dtype of q.
    """
    k, v = gather_pages(k_pool, table), gather_pages(v_pool, table)
    slots = jnp.arange(k.shape[2], dtype=jnp.int32)
    # Slots past the newest query may hold stale numbers of an earlier owner, NaN included, and 0 x NaN is NaN.
    newest = jnp.max(jnp.where(valid, positions, -1), axis=1, keepdims=True)
    known = slots[None] <= newest  # [B, S]
    v = jnp.where(known[None, :, :, None], v, jnp.zeros((), v.dtype))
    return grouped_attention(q, k, v, causal_mask(positions, slots, window))


def gather_pages(pool, table) -> jax.Array:
    """All slots of each row: ``[G, pages, P, H]``, int32 ``[B, M] -> [G, B, M P, H]``."""
    G, _, P, H = pool.shape
    B, M = table.shape
    return pool[:, table].reshape(G, B, M * P, H)


def _has_kernel(q, pool) -> bool:
    H = q.shape[-1]
    head = pl.next_power_of_2(H) == H and _SMALLEST <= H <= _LARGEST_HEAD
    return head and q.dtype == pool.dtype and q.dtype in _TILINGS


@functools.partial(jax.jit, static_argnames=("window", "tiling", "interpret"))  # layers share one trace
def paged_attention_kernel(
    q, k_pool, v_pool, table, positions, valid, window: int | None, *, tiling: Tiling | None = None, interpret=False
):
    """``paged_attention_reference`` as a kernel over (block of query rows, KV head, split, row of the batch).

    Where slots are split, a second kernel merges the splits. Invalid queries get zeros.
    """
    (B, T, N, H), (G, pages, P, _) = q.shape, k_pool.shape
    tiling = tiling or _TILINGS[q.dtype]
    inside = positions < table.shape[1] * P  # others are invalid, and must not reach for pages that do not exist
    last = jnp.where(valid & inside, positions, -1)  # the last slot that a query sees
    rows, slots = T * N // G, tiling.slots(H * q.dtype.itemsize)
    block = min(tiling.rows, max(_SMALLEST, pl.next_power_of_2(rows)))
    cells, tiles = B * G * pl.cdiv(rows, block), pl.cdiv(table.shape[1] * P, slots)
    splits = tiling.splits(cells, tiles)
    partial = lambda *shape: jax.ShapeDtypeStruct((B, splits, T * N, *shape), jnp.float32)  # noqa: E731
    whole = jax.ShapeDtypeStruct((B, T * N, H), q.dtype)
    out = kernel_call(
        _attend_split,
        *(q.reshape(B, T * N, H), *(pool.reshape(G, pages * P, H) for pool in (k_pool, v_pool)), table, last),
        grid=(pl.cdiv(rows, block), G, splits, B),
        out_shape=whole if splits == 1 else [partial(H), partial(), partial()],
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        interpret=interpret,
        heads=N,
        page_size=P,
        window=window,
        block=block,
        slots=slots,
        splits=splits,
    )
    if splits > 1:
        out = kernel_call(
            _merge_splits,
            *out,
            grid=(T * N, B),
            out_shape=whole,
            num_warps=tiling.merge_warps,
            interpret=interpret,
            splits=splits,
        )
    return out.reshape(B, T, N, H)


def _attend_split(q_ref, k_ref, v_ref, table_ref, last_ref, *out_refs, heads, page_size, window, block, slots, splits):
    (_, _, H), (G, _, _), (_, T) = q_ref.shape, k_ref.shape, last_ref.shape
    R = heads // G
    g, split, b = pl.program_id(1), pl.program_id(2), pl.program_id(3)
    row = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)  # query r of token t is row t R + r
    real = row < T * R
    token = jax.lax.div(row, jnp.int32(R))
    at = token * heads + g * R + row - token * R
    last = pltriton.load(last_ref.at[b, token], mask=real, other=-1)
    newest = jnp.max(last)
    oldest = 0 if window is None else jnp.maximum(jnp.min(jnp.where(last < 0, newest, last)) - (window - 1), 0)
    first, tiles = oldest // slots, (newest + slots) // slots - oldest // slots  # the live ones, dealt evenly
    begin, end = (first + tiles * part // splits for part in (split, split + 1))

    q = pltriton.load(q_ref.at[b, *_rows(at, H)], mask=_each(real, H), other=0.0)
    scale = H**-0.5 * math.log2(math.e)

    def pages(i):
        """Of a tile: one, or one for every slot if the tile spans several; 0 where nothing is live."""
        slot = i * slots if page_size % slots == 0 else i * slots + jnp.arange(slots, dtype=jnp.int32)
        return pltriton.load(table_ref.at[b, jax.lax.div(slot, jnp.int32(page_size))], mask=slot <= newest, other=0)

    def attend_tile(i, carry):
        acc, peak, total, page = carry  # the page was looked up a trip ago, or its loads would have to wait for it
        slot = i * slots + jnp.arange(slots, dtype=jnp.int32)
        live = _each(slot <= newest, H)
        at = page * page_size + jax.lax.rem(slot, jnp.int32(page_size))
        k, v = (pltriton.load(ref.at[g, *_rows(at, H)], mask=live, other=0.0) for ref in (k_ref, v_ref))
        seen = slot[None, :] <= last[:, None]
        if window is not None:
            seen &= slot[None, :] > last[:, None] - window
        scores = jnp.where(seen, _dot(q, k, trans_b=True) * scale, -jnp.inf)
        raised = jnp.maximum(peak, jnp.max(scores, axis=1))
        shift = _finite(raised)
        weights, kept = jnp.exp2(scores - shift[:, None]), jnp.exp2(peak - shift)
        acc = acc * kept[:, None] + _dot(weights.astype(v.dtype), v)
        return acc, raised, total * kept + jnp.sum(weights, axis=1), pages(i + 1)

    nothing = jnp.zeros((block, H), jnp.float32), jnp.full(block, -jnp.inf), jnp.zeros(block, jnp.float32)
    acc, peak, total, _ = jax.lax.fori_loop(begin, end, attend_tile, (*nothing, pages(begin)))
    if splits == 1:
        (out_ref,) = out_refs
        out = (acc / _divisor(total)[:, None]).astype(out_ref.dtype)
        pltriton.store(out_ref.at[b, *_rows(at, H)], out, mask=_each(real, H))
    else:
        acc_ref, peak_ref, total_ref = out_refs
        pltriton.store(acc_ref.at[b, split, *_rows(at, H)], acc, mask=_each(real & (begin < end), H))
        pltriton.store(peak_ref.at[b, split, at], peak, mask=real)
        pltriton.store(total_ref.at[b, split, at], total, mask=real)


def _rows(index, H: int):
    """Indices of whole rows, as ``ref[index, :]`` would be read: interpreted kernels cannot mix indices and slices."""
    shape = index.shape[0], H
    return _each(index, H), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _merge_splits(acc_ref, peak_ref, total_ref, out_ref, *, splits):
    row, b, H = pl.program_id(0), pl.program_id(1), out_ref.shape[2]
    every = pl.ds(0, splits)
    peaks = peak_ref[b, every, row]
    weights = jnp.exp2(peaks - _finite(jnp.max(peaks)))
    total = jnp.sum(total_ref[b, every, row] * weights)
    # A split without live slots wrote no sums.
    acc = pltriton.load(acc_ref.at[b, every, row, pl.ds(0, H)], mask=_each(peaks > -jnp.inf, H), other=0.0)
    out = jnp.sum(acc * weights[:, None], axis=0) / _divisor(total)
    out_ref[b, row, pl.ds(0, H)] = out.astype(out_ref.dtype)


def _dot(a, b, trans_b: bool = False):
    """Product in fp32; fp32 operands are multiplied in full, never in TF32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return pltriton.dot(a, b, trans_b=trans_b, precision=precision)


def _each(x, H: int):
    """``[rows] -> [rows, H]``."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], H))


def _finite(peak):
    """A peak to subtract from scores: 0 where nothing was seen, whose scores are all -inf."""
    return jnp.where(peak > -jnp.inf, peak, 0.0)


def _divisor(total):
    """A sum to divide by: 1 where nothing was seen; NaN stays."""
    return jnp.where(total == 0, 1.0, total)
