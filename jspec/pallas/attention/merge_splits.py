"""Merges the parts of attention that several programs found in their shares of a row's slots (Dao et al., "Flash-Decoding",
2023)."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import kernel_call

# A program holds the sums of at most so many splits, for at most so many numbers of a query's result. A row of latents has
# 512 numbers and up to 128 splits. Held at once, they would not fit into the registers of a program.
_SPLITS, _COLUMNS = 64, 128
_NUMBERS = 2048  # that one warp holds: 64 for each of its threads


def merge_splits(acc, peak, total, last, dtype, *, interpret: bool) -> jax.Array:
    """Attention ``[B, queries, H]`` of ``dtype`` from running softmaxes over parts of the slots, as ``flash.Softmax`` has
    them.

    Args:
      acc: float32 ``[B, splits, queries, H]``. Where the peak is -inf, nothing was written.
      peak, total: float32 ``[B, splits, queries]``. A total may be NaN where the peak is not.
      last: int32 ``[B, T]``, the last slot that each query token sees, -1 if it sees none: its result is 0. The same
        number of queries follow one another of each of the T.
    """
    B, splits, queries, H = acc.shape
    columns, together = min(H, _COLUMNS), min(splits, _SPLITS)
    return kernel_call(
        _merge_splits,
        *(acc, peak, total, last),
        grid=(queries, H // columns, B),
        out_shape=jax.ShapeDtypeStruct((B, queries, H), dtype),
        num_warps=max(1, together * columns // _NUMBERS),
        interpret=interpret,
        columns=columns,
        together=together,
        of_token=queries // last.shape[1],
    )


def _merge_splits(acc_ref, peak_ref, total_ref, last_ref, out_ref, *, columns: int, together: int, of_token: int):
    query, b, splits = pl.program_id(0), pl.program_id(2), acc_ref.shape[1]
    mine, every = pl.ds(pl.program_id(1) * columns, columns), pl.ds(0, splits)
    peaks = peak_ref[b, every, query]
    shift = finite(jnp.max(peaks))
    total = jnp.sum(total_ref[b, every, query] * jnp.exp2(peaks - shift))
    out = jnp.zeros(columns, jnp.float32)
    for first in range(0, splits, together):
        some = pl.ds(first, together)
        peaks = peak_ref[b, some, query]
        there = jnp.broadcast_to((peaks != -jnp.inf)[:, None], (together, columns))
        acc = pltriton.load(acc_ref.at[b, some, query, mine], mask=there, other=0.0)
        out += jnp.sum(acc * jnp.exp2(peaks - shift)[:, None], axis=0)
    last = last_ref[b, jax.lax.div(query, jnp.int32(of_token))]
    out_ref[b, query, mine] = (out / divisor(total, last)).astype(out_ref.dtype)


def finite(peak):
    """A peak to subtract from scores: 0 where nothing was seen, whose scores are all -inf."""
    return jnp.where(peak > -jnp.inf, peak, 0.0)


def divisor(total, last):
    """A sum of weights to divide by: 1 of a query that sees no slot, whose ``last`` is -1.

    The sum of another is 0 if all of its scores are -inf, and its result is then NaN: such scores make no distribution."""
    return jnp.where(last < 0, 1.0, total)
