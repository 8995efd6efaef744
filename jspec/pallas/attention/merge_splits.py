"""Merges the running softmaxes of split-KV attention (Dao et al., "Flash-Decoding", 2023)."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.parts import Sharing
from jspec.pallas.attention.softmax import Softmax, divisor
from jspec.pallas.triton import broadcast_columns, kernel_call, reciprocal

_AT_ONCE, _COLUMNS = 32, 128  # softmaxes whose loads are under way together, and numbers of a query that one warp has


def merge_splits(
    acc, peak, total, last, sinks, dtype, sharing: Sharing, window: int | None = None, ends=None, *, interpret: bool
) -> jax.Array:
    """Attention ``[B, queries, H]`` of ``dtype`` from running softmaxes, as ``Softmax`` has them, merged in their order.

    Args:
      acc: float32 ``[B, stored, queries, H]``. Where the peak is -inf, nothing was written.
      peak, total: float32 ``[B, stored, queries]``. A total may be NaN where the peak is not.
      last: int32 ``[B, T]``, the last slot that each query token sees, -1 if it sees none: its result is 0. Each of the
        T has the same number of consecutive queries.
      sinks: as many as a query token has queries, or None.
      sharing: where the softmaxes of parts are. Those past the last slot of a query are not read.
      window: how many slots a query token sees, None for all.
      ends: int32 ``[B, T]``, the last slots of windows; None if these are ``last``.
    """
    B, stored, queries, H = acc.shape
    columns = min(H, _COLUMNS)
    return kernel_call(
        _merge_splits,
        *(acc, peak, total, last, sinks, ends),
        grid=(queries, H // columns, B),
        out_shape=jax.ShapeDtypeStruct((B, queries, H), dtype),
        num_warps=1,
        interpret=interpret,
        columns=columns,
        at_once=min(stored, _AT_ONCE),
        queries_per_token=queries // last.shape[1],
        sharing=sharing,
        window=window,
    )


def _merge_splits(
    acc_ref,
    peak_ref,
    total_ref,
    last_ref,
    sinks_ref,
    ends_ref,
    out_ref,
    *,
    columns: int,
    at_once: int,
    queries_per_token: int,
    sharing: Sharing,
    window: int | None,
):
    b, query = pl.program_id(2), pl.ds(pl.program_id(0), 1)
    token = pl.program_id(0) // queries_per_token
    here, last = pl.ds(pl.program_id(1) * columns, columns), last_ref[b, token]
    first, end = sharing.places(last, window, None if ends_ref is None else ends_ref[b, token])

    def merge(trip, softmax):
        for i in range(at_once):
            place = first + trip * at_once + i
            stored, is_live = jax.lax.rem(place, jnp.int32(sharing.stored)), jnp.broadcast_to(place < end, (1,))
            peak = pltriton.load(peak_ref.at[b, stored, query], mask=is_live, other=-jnp.inf)
            total = pltriton.load(total_ref.at[b, stored, query], mask=is_live, other=0.0)
            acc = pltriton.load(acc_ref.at[b, stored, query, here], mask=broadcast_columns(is_live, columns), other=0.0)
            acc = jnp.where(broadcast_columns(peak != -jnp.inf, columns), acc, 0.0)
            softmax = softmax.merged(Softmax(acc, peak, total))
        return softmax

    softmax = jax.lax.fori_loop(0, pl.cdiv(end - first, at_once), merge, Softmax.empty(1, columns))
    if sinks_ref is not None:
        sinks = sinks_ref[pl.ds(pl.program_id(0) - token * queries_per_token, 1)]
        softmax = softmax.merged(Softmax.of_sinks(sinks, columns))
    out_ref[b, query, here] = (softmax.acc * reciprocal(divisor(softmax.total, last))[:, None]).astype(out_ref.dtype)
