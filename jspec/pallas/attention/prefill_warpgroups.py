"""What the warpgroups of ``jspec.pallas.attention.prefill_sm90`` do for one block: one loads tiles of keys and values, and
two compute."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.attention.prefill_launch import LOWEST, TILE_SLOTS, WARPGROUP_QUERIES, PrefillLaunch
from jspec.pallas.attention.prefill_memory import QueryBlock, SharedMemory
from jspec.pallas.triton import LOG2_E

_PER_QUERY = plgpu.Layout.WGMMA.reduce(1)  # the layout of one number for each query
# A number as the compiler knows nothing of it. From the warpgroup's own, it would compute where all parts of the queries are
# before the loop over tiles, in registers that 256 numbers of a value need. jax 0.10 takes arrays only.
_opaque = lax.optimization_barrier if jax.__version_info__ >= (0, 11) else lambda scalar: scalar
# ``plgpu.load`` of jax 0.10 needs this argument; later versions warn about it.
_IN_FULL: dict[str, Any] = {} if jax.__version_info__ >= (0, 11) else {"idx": ()}


def load_block(k_ref, v_ref, pages_ref, shared: SharedMemory, block: QueryBlock, launch: PrefillLaunch):
    """Copy the block's tiles into shared memory, as it becomes free."""

    def pages(i):
        at = jnp.minimum(i * launch.tile_pages, pages_ref.shape[1] - launch.tile_pages)
        return tuple(pages_ref[block.b, at + j] for j in range(launch.tile_pages))

    def copy(ref, numbers, tile, barrier):
        for j, page in enumerate(numbers):
            there = ref.at[page, :, block.g] if launch.pages_first else ref.at[block.g, page]
            plgpu.copy_gmem_to_smem(there, tile.at[pl.ds(j * launch.P, launch.P)], barrier)

    def load_tile(i, numbers):  # ``numbers`` were looked up a trip ago, or the copies would have to wait for them
        stage, used = lax.rem(block.count(i), jnp.int32(launch.num_stages)), block.count(i) >= launch.num_stages
        following = pages(i + 1)
        pl.when(used)(lambda: plgpu.barrier_wait(shared.k_read.at[stage]))
        copy(k_ref, numbers, shared.k.at[stage], shared.k_here.at[stage])
        pl.when(used)(lambda: plgpu.barrier_wait(shared.v_read.at[stage]))
        all_seen = (i + 1) * launch.tile_slots <= block.newest + 1

        @pl.when(all_seen)
        def _():
            copy(v_ref, numbers, shared.v.at[stage], shared.v_here.at[stage])

        @pl.when(jnp.logical_not(all_seen))
        def _():
            copy(v_ref, numbers, shared.v.at[stage], shared.tail_here)
            plgpu.barrier_wait(shared.tail_here)
            _clear_unseen(shared.v.at[stage], block.newest - i * launch.tile_slots, launch)
            for _page in range(launch.tile_pages):
                plgpu.barrier_arrive(shared.v_here.at[stage])

        return following

    lax.fori_loop(block.first, block.end, load_tile, pages(block.first))


def _clear_unseen(tile, newest, launch: PrefillLaunch):
    """Zero the values past slot ``newest`` of a tile. They may be NaN, and 0 x NaN is NaN."""
    for i in range(0, launch.tile_slots, WARPGROUP_QUERIES):
        for j in range(0, launch.Hv, 64):
            part = tile.at[pl.ds(i, WARPGROUP_QUERIES), pl.ds(j, 64)]
            values = plgpu.load(part, **_IN_FULL, layout=plgpu.Layout.WGMMA)
            slot = plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_QUERIES, 64), 0, layout=plgpu.Layout.WGMMA) + i
            part[...] = jnp.where(slot <= newest, values, jnp.zeros((), values.dtype))
    plgpu.commit_smem()


def compute_block(
    q_ref, last_ref, sinks_ref, out_ref, shared: SharedMemory, block: QueryBlock, warpgroup, launch: PrefillLaunch
):
    """The attention of one warpgroup's queries."""
    tokens = WARPGROUP_QUERIES // launch.warpgroup_heads
    token, head = block.number * launch.block_tokens, block.group * launch.block_heads
    if launch.block_heads == 1:
        token += warpgroup * tokens
    else:
        head += warpgroup * launch.warpgroup_heads
    head_lines = [pl.ds(i * tokens, tokens) for i in range(launch.warpgroup_heads)]
    places = [(block.b, pl.ds(token, tokens), head + i) for i in range(launch.warpgroup_heads)]
    for lines, there in zip(head_lines, places, strict=True):
        plgpu.copy_gmem_to_smem(q_ref.at[there], shared.q.at[warpgroup, lines], shared.q_here.at[warpgroup])
    last = _load_per_query(last_ref.at[block.b, block.number, warpgroup])
    sinks = None if sinks_ref is None else _load_per_query(sinks_ref.at[block.group, warpgroup])
    plgpu.barrier_wait(shared.q_here.at[warpgroup])
    acc, total = _softmax(last, sinks, shared, block, warpgroup, launch)

    share = jnp.where(last >= 0, 1.0 / total, 0.0)
    seen = lax.broadcast_in_dim(last >= 0, acc.shape, [0])
    out = jnp.where(seen, acc * lax.broadcast_in_dim(share, acc.shape, [0]), 0.0)
    results, same_size = shared.q.at[warpgroup], launch.Hv == launch.H
    results = results if same_size else results.at[:, pl.ds(0, launch.Hv)]
    results[...] = out.astype(q_ref.dtype)
    plgpu.commit_smem()
    for lines, (b, here, n) in zip(head_lines, places, strict=True):
        if same_size:
            plgpu.copy_smem_to_gmem(results.at[lines], out_ref.at[b, here, n])
            continue
        for i in range(0, tokens, 8):  # eight lines are consecutive in shared memory
            piece = results.at[pl.ds(lines.start + i, 8)]
            plgpu.copy_smem_to_gmem(piece, out_ref.at[b, pl.ds(here.start + i, 8), n])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next block's queries may overwrite them


def _load_per_query(ref):
    """One number for each query of a warpgroup, ``[64]``."""
    return plgpu.load(ref, **_IN_FULL, layout=_PER_QUERY, optimized=False)


def _softmax(last, sinks, shared: SharedMemory, block: QueryBlock, warpgroup, launch: PrefillLaunch):
    """The weighted sums of values ``[64, Hv]`` and the sums of weights ``[64]``, float32, of queries that each see the
    slots up to ``last`` ``[64]``. ``sinks`` ``[64]`` are those of ``sinks_of_queries``, or None.

    A warpgroup has the tensor cores from the end of its softmax until its next scores are under way."""
    scale, shape = launch.scale * LOG2_E, (WARPGROUP_QUERIES, launch.tile_slots)
    stage_of = lambda i: lax.rem(block.count(i), jnp.int32(launch.num_stages))  # noqa: E731

    def switch_warpgroups():
        plgpu.barrier_arrive(shared.pingpong)
        plgpu.barrier_wait(shared.pingpong)

    def mask(scores, i):
        newest = lax.broadcast_in_dim(last, shape, [0])
        slot = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + i * launch.tile_slots
        seen = slot <= newest
        if launch.window is not None:
            seen &= slot > newest - launch.window
        return jnp.where(seen, scores, -jnp.inf)

    def attend_tile(i, carry, masked: bool):
        acc, peak, total = carry
        stage = stage_of(i)

        def score(ref):
            own = warpgroup if launch.tile_slots == TILE_SLOTS else _opaque(warpgroup)
            plgpu.wgmma(ref, shared.q.at[own], shared.k.at[stage].transpose((1, 0)))
            switch_warpgroups()
            return ref[...]

        scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(shared.k_read.at[stage])
        scores = mask(scores, i) if masked else scores
        new_peak = jnp.maximum(peak, scores.max(axis=1) * scale)
        rescale = jnp.exp2(peak - new_peak)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(new_peak, shape, [0]))
        acc *= lax.broadcast_in_dim(rescale, acc.shape, [0])
        total = total * rescale + (weights.sum(axis=1) if launch.parts is None else _row_sums(weights))
        weights = weights.astype(shared.v.dtype)
        # The softmax is complete before the other warpgroup is awaited.
        acc, total, new_peak, weights = lax.optimization_barrier((acc, total, new_peak, weights))
        plgpu.barrier_arrive(shared.pingpong)
        plgpu.barrier_wait(shared.v_here.at[stage])
        plgpu.barrier_wait(shared.pingpong)

        def await_keys():
            pl.when(i + 1 < block.end)(lambda: plgpu.barrier_wait(shared.k_here.at[stage_of(i + 1)]))

        acc = _add_product(acc, weights, shared.v.at[stage], await_keys, launch)
        plgpu.barrier_arrive(shared.v_read.at[stage])
        return acc, new_peak, total

    def constant(number):
        return plgpu.layout_cast(jnp.full(WARPGROUP_QUERIES, number, jnp.float32), _PER_QUERY)

    zeros = plgpu.layout_cast(jnp.zeros((WARPGROUP_QUERIES, launch.Hv), jnp.float32), plgpu.Layout.WGMMA)
    empty = zeros, constant(LOWEST), constant(0.0)
    of_sinks = None if sinks is None else (zeros, sinks, constant(1.0))  # scores of a key whose value is 0
    pl.when(block.end > block.first)(lambda: plgpu.barrier_wait(shared.k_here.at[stage_of(block.first)]))
    pl.when(warpgroup == 1)(switch_warpgroups)
    with_mask, without = (functools.partial(attend_tile, masked=masked) for masked in (True, False))

    def attend_tiles(carry, within=lambda i: i):
        first, unmasked, masked, end = map(within, (block.first, block.unmasked, block.masked, block.end))
        if launch.window is not None:
            carry = lax.fori_loop(first, unmasked, with_mask, carry)
        carry = lax.fori_loop(unmasked, masked, without, carry)
        return lax.fori_loop(masked, end, with_mask, carry)

    if launch.parts is None:
        carry = attend_tiles(empty if of_sinks is None else of_sinks)
    else:
        parts, slots = launch.parts, launch.tile_slots

        def attend_part(part, whole):
            first, end = (parts.start(part + i) // slots for i in range(2))
            return _merged(whole, attend_tiles(empty, lambda i: jnp.clip(i, first, end)))

        begin, end = parts.number(block.first * slots), parts.number(jnp.maximum(block.end * slots - 1, 0)) + 1
        carry = lax.fori_loop(begin, end, attend_part, empty)
        carry = carry if of_sinks is None else _merged(carry, of_sinks)
    pl.when(warpgroup == 0)(switch_warpgroups)
    acc, _, total = carry
    return acc, total


def _merged(whole, part):
    """``jspec.pallas.attention.softmax.Softmax.merged``."""
    (acc, peak, total), (new_acc, new_peak, new_total) = whole, part
    most = jnp.maximum(peak, new_peak)
    before, new = jnp.exp2(peak - most), jnp.exp2(new_peak - most)
    total = total * before + new_total * new
    before, new = (lax.broadcast_in_dim(x, acc.shape, [0]) for x in (before, new))
    return acc * before + new_acc * new, most, total


def _row_sums(x):
    """``jspec.pallas.attention.softmax.row_sums`` of ``[64, 64]``."""
    x = x[:, :32] + x[:, 32:]
    eighths = [x[:, i : i + 8].sum(axis=1) for i in range(0, 32, 8)]
    return (eighths[0] + eighths[1]) + (eighths[2] + eighths[3])


def _add_product(acc, weights, values, meanwhile, launch: PrefillLaunch):
    """``acc + weights @ values``; ``meanwhile`` is called while the tensor cores are busy."""
    if launch.interpret:  # the interpreter multiplies operands in shared memory only
        meanwhile()
        values = values[...]
        plgpu.commit_smem()  # orders this read, which is no product of matrices, before the copy that overwrites them
        return acc + jnp.dot(weights, values, preferred_element_type=jnp.float32)

    def multiply(ref):
        plgpu.wgmma(ref, weights, values)
        meanwhile()

    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))
