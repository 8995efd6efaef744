"""Merges the running softmaxes of split-KV attention (Dao et al., "Flash-Decoding", 2023)."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import kernel_call

# A program instance holds the sums of at most so many splits, for at most so many numbers of a query's result. A line of
# latents has 512 numbers and up to 128 splits, which would not fit into the registers at once.
_SPLITS, _COLUMNS = 64, 128
_NUMBERS = 2048  # that one warp holds: 64 for each of its threads


def merge_splits(acc, peak, total, last, dtype, *, interpret: bool) -> jax.Array:
    """Attention ``[B, queries, H]`` of ``dtype`` from the running softmaxes of splits, as ``flash.Softmax`` has them.

    Args:
      acc: float32 ``[B, splits, queries, H]``. Where the peak is -inf, nothing was written.
      peak, total: float32 ``[B, splits, queries]``. A total may be NaN where the peak is not.
      last: int32 ``[B, T]``, the last slot that each query token sees, -1 if it sees none: its result is 0. Each of the
        T has the same number of consecutive queries.
    """
    B, splits, queries, H = acc.shape
    columns, splits_at_once = min(H, _COLUMNS), min(splits, _SPLITS)
    return kernel_call(
        _merge_splits,
        *(acc, peak, total, last),
        grid=(queries, H // columns, B),
        out_shape=jax.ShapeDtypeStruct((B, queries, H), dtype),
        num_warps=max(1, splits_at_once * columns // _NUMBERS),
        interpret=interpret,
        columns=columns,
        splits_at_once=splits_at_once,
        queries_per_token=queries // last.shape[1],
    )


def _merge_splits(
    acc_ref, peak_ref, total_ref, last_ref, out_ref, *, columns: int, splits_at_once: int, queries_per_token: int
):
    query, b, splits = pl.program_id(0), pl.program_id(2), acc_ref.shape[1]
    here, every = pl.ds(pl.program_id(1) * columns, columns), pl.ds(0, splits)
    peaks = peak_ref[b, every, query]
    shift = finite(jnp.max(peaks))
    total = jnp.sum(total_ref[b, every, query] * jnp.exp2(peaks - shift))
    out = jnp.zeros(columns, jnp.float32)
    for first in range(0, splits, splits_at_once):
        chunk = pl.ds(first, splits_at_once)
        peaks = peak_ref[b, chunk, query]
        written = jnp.broadcast_to((peaks != -jnp.inf)[:, None], (splits_at_once, columns))
        acc = pltriton.load(acc_ref.at[b, chunk, query, here], mask=written, other=0.0)
        out += jnp.sum(acc * jnp.exp2(peaks - shift)[:, None], axis=0)
    last = last_ref[b, jax.lax.div(query, jnp.int32(queries_per_token))]
    out_ref[b, query, here] = (out / divisor(total, last)).astype(out_ref.dtype)


def finite(peak):
    """The peak to subtract from scores: 0 where no slot was seen, whose scores are all -inf."""
    return jnp.where(peak > -jnp.inf, peak, 0.0)


def divisor(total, last):
    """The sum of weights to divide by: 1 for a query that sees no slot, whose ``last`` is -1.

    Another query's sum is 0 if all of its scores are -inf, and its result is then NaN: such scores make no
    distribution."""
    return jnp.where(last < 0, 1.0, total)
