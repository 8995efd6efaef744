"""Attention of many query tokens over the pages of the KV cache, on Hopper GPUs (FlashAttention-3: Shah et al., 2024).

A *block* is 128 queries of one KV head: consecutive query tokens of one row times the R attention heads of that KV head.
Where R is no power of two up to 16, it has only some of them, ``block_heads_of(R)``, and other blocks read the same tiles.
There is a program instance for each multiprocessor, which attends for several blocks one after the other. One of its
warpgroups copies tiles of 128 cache slots into shared memory, or of 64 slots with many numbers each, page by page, and
goes on with the next block while the last one is still computed. Two others compute 64 queries each, in ping-pong: while
one multiplies matrices, the other computes its softmax.

Tiles are counted from slot 0 and are not split among instances. What a query token gets therefore depends on its own row
alone: not on the number of the row, nor on the other rows or the neighbouring tokens."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.attention.fp8 import KVScales
from jspec.pallas.attention.paged import paged_attention, paged_attention_reference
from jspec.pallas.attention.prefill_launch import (
    INSTANCES,
    LOWEST,
    TILE_SLOTS,
    WARPGROUP_QUERIES,
    WARPGROUPS,
    PrefillLaunch,
    block_bounds,
    live_pages,
    sinks_of_queries,
    suits_prefill,
    tile_slots_of,
)
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.dispatch import by_platform, on_hopper
from jspec.pallas.triton import LOG2_E

# How many attention heads a KV head may have, by head dimension, for ``prefill_attention`` to choose this kernel and not
# ``paged_attention``. Both were timed with 4 heads of 128 and 6 of 256 (benchmarks/log/attention.md). The other entries make
# blocks of that size, but were not timed with both, and nothing without an entry was; of heads of 256 with R = 1, this
# kernel alone was timed (benchmarks/log/mla.md). ``python -m benchmarks.kernels.prefill_attention`` times both and tells
# what to enter.
CHOSEN = {64: (1, 2, 4, 8, 16), 128: (1, 2, 4, 8, 16), 256: (6, 8)}
# Registers of a thread in the warpgroups that compute, and in the one that loads. An instance starts with 168 for each
# of its 384 threads, and its three warpgroups share these 504 from then on: one that asks for more than is left never runs.
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 224, 56
_PER_QUERY = plgpu.Layout.WGMMA.reduce(1)  # the layout of one number for each query
# A number as the compiler knows nothing of it. From the warpgroup's own, it would compute where all parts of the queries are
# before the loop over tiles, in registers that 256 numbers of a value need. jax 0.10 takes arrays only.
_opaque = lax.optimization_barrier if jax.__version_info__ >= (0, 11) else lambda scalar: scalar
# ``plgpu.load`` of jax 0.10 needs this argument; later versions warn about it.
_IN_FULL: dict[str, Any] = {} if jax.__version_info__ >= (0, 11) else {"idx": ()}


def prefill_attention(
    q, k_pool, v_pool, queries: PagedQueries, spec: AttentionSpec, scales: KVScales | None = None
) -> jax.Array:
    """``paged_attention``, which on a Hopper GPU uses ``prefill_attention_kernel`` for shapes that it supports.

    That kernel has no soft cap: the hyperbolic tangent of its instructions is too coarse. Nor does it read bytes."""
    args = q, k_pool, v_pool, queries, spec, scales
    if spec.softcap is not None or not (has_prefill_kernel(q, k_pool) and on_hopper()):
        return paged_attention(*args)
    return by_platform(prefill_attention_kernel, paged_attention_reference, *args[:5])


def has_prefill_kernel(q, pool) -> bool:
    """Whether the kernel supports queries and pools like these, there are enough blocks, and ``CHOSEN`` has their heads.

    It supports bfloat16, a head dimension of 64, 128 or 256, any number of attention heads for a KV head, and pages of 64
    slots, or of 128 where a tile has as many. The query tokens of a row have to fill blocks: they are a multiple of 128 /
    ``block_heads_of(R)``, so of 16 with R = 8 and of 64 with R = 6. With R = 3, 5 or 7 it is 128, but ``prefill_chunk`` is
    less by default."""
    (B, T, N, H), (G, _, P, _) = q.shape, pool.shape
    fits = q.dtype == pool.dtype == jnp.bfloat16 and (P == 64 or P == 128 == tile_slots_of(H, H))
    return fits and N // G in CHOSEN.get(H, ()) and suits_prefill(B, T, N, N // G)


@functools.partial(
    jax.jit, static_argnames=("pages_first", "num_stages", "instances", "interpret")
)  # layers share one trace
def prefill_attention_kernel(
    q,
    k_pool,
    v_pool,
    queries: PagedQueries,
    spec: AttentionSpec,
    *,
    pages_first: bool = False,
    num_stages: int | None = None,
    instances: int = INSTANCES,
    interpret=None,
):
    """``paged_attention_reference`` as a kernel; the attention of an invalid query token is 0.

    There is no soft cap. Values may have other sizes than keys; with ``pages_first``, both pools are ``[pages, P,
    G, H]``."""
    assert spec.softcap is None, spec.softcap
    launch = PrefillLaunch.of(q, v_pool, spec, num_stages, instances, interpret, pages_first)
    bounds, last = block_bounds(queries.last_slots(launch.P), launch)
    sinks = None if spec.sinks is None else sinks_of_queries(spec.sinks, launch)
    return plgpu.kernel(
        functools.partial(_attend_blocks, launch=launch),
        out_type=jax.ShapeDtypeStruct((*q.shape[:3], launch.Hv), q.dtype),
        grid=(launch.instances,),
        grid_names=("instance",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="jspec_prefill_attention",
    )(q, k_pool, v_pool, live_pages(queries.table, bounds, launch), bounds, last, sinks)


class _SharedMemory(NamedTuple):
    """Shared memory of a program instance. A barrier with a number of stages has one part for each of them.

    Attributes:
      q: ``[2, 64, H]``, queries, and in the end results.
      k, v: ``[stages, slots, H]`` and ``[stages, slots, Hv]``.
      q_here: the queries of a warpgroup have arrived.
      k_here, v_here: a tile has arrived.
      tail_here: the last tile of values has arrived, and unseen slots have to be cleared.
      k_read, v_read: both warpgroups have multiplied a tile, whose memory is free.
      pingpong: the warpgroups that compute take the tensor cores in turn.
    """

    q: Any
    k: Any
    v: Any
    q_here: Any
    k_here: Any
    v_here: Any
    tail_here: Any
    k_read: Any
    v_read: Any
    pingpong: Any

    @classmethod
    def types(cls, launch: PrefillLaunch, dtype) -> "_SharedMemory":
        layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        matrix = lambda *shape: plgpu.SMEM(shape, dtype, transforms=layout)  # noqa: E731
        here = plgpu.Barrier(num_arrivals=launch.tile_pages, num_barriers=launch.num_stages)
        read = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=launch.num_stages)
        return cls(
            q=matrix(WARPGROUPS, WARPGROUP_QUERIES, launch.H),
            k=matrix(launch.num_stages, launch.tile_slots, launch.H),
            v=matrix(launch.num_stages, launch.tile_slots, launch.Hv),
            q_here=plgpu.Barrier(num_arrivals=launch.warpgroup_heads, num_barriers=WARPGROUPS),
            k_here=here,
            v_here=here,
            tail_here=plgpu.Barrier(num_arrivals=launch.tile_pages),
            k_read=read,
            v_read=read,
            pingpong=plgpu.Barrier(num_arrivals=WARPGROUPS),
        )


class _QueryBlock(NamedTuple):
    """In a kernel: a block, and between which tiles it masks; numbers are those of ``block_bounds``.

    Attributes:
      g, group: the KV head, and the group of its attention heads.
      before: how many tiles the instance has read for earlier blocks. The memory of a tile, and the phase of its
        barriers, follow from how many tiles were read before it.
    """

    b: Any
    g: Any
    group: Any
    number: Any
    first: Any
    unmasked: Any
    masked: Any
    end: Any
    newest: Any
    before: Any

    @classmethod
    def of(cls, bounds_ref, i, before, launch: PrefillLaunch) -> "_QueryBlock":
        """The i-th block of this program instance."""
        b, group, number = launch.block(lax.axis_index("instance"), i)
        first, unmasked, masked, end, newest = (bounds_ref[b, number, j] for j in range(5))
        if launch.window is None:  # known when the kernel is compiled
            first = unmasked = 0
        return cls(b, launch.kv_head(group), group, number, first, unmasked, masked, end, newest, before)

    def count(self, i):
        """How many tiles the instance has read before tile i of this block."""
        return self.before + i - self.first


def _attend_blocks(q_ref, k_ref, v_ref, pages_ref, bounds_ref, last_ref, sinks_ref, out_ref, *, launch: PrefillLaunch):
    def run(*scoped):
        shared, warpgroup = _SharedMemory(*scoped), lax.axis_index("warpgroup")

        def each_block(attend):
            def body(i, before):
                block = _QueryBlock.of(bounds_ref, i, before, launch)
                attend(block)
                return block.count(block.end)

            return lax.fori_loop(0, launch.blocks_of(lax.axis_index("instance")), body, jnp.int32(0))

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            if not launch.interpret:
                plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            each_block(
                lambda block: _compute_block(q_ref, last_ref, sinks_ref, out_ref, shared, block, warpgroup, launch)
            )

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            if not launch.interpret:
                plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            read = each_block(lambda block: _load_block(k_ref, v_ref, pages_ref, shared, block, launch))

            @pl.loop(jnp.maximum(read - launch.num_stages, 0), read)
            def _(count):  # so that every phase of a barrier has been awaited
                for barrier in (shared.k_read, shared.v_read):
                    plgpu.barrier_wait(barrier.at[lax.rem(count, jnp.int32(launch.num_stages))])

    pl.run_scoped(run, *_SharedMemory.types(launch, q_ref.dtype), collective_axes="warpgroup")


def _load_block(k_ref, v_ref, pages_ref, shared: _SharedMemory, block: _QueryBlock, launch: PrefillLaunch):
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


def _compute_block(
    q_ref, last_ref, sinks_ref, out_ref, shared: _SharedMemory, block: _QueryBlock, warpgroup, launch: PrefillLaunch
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


def _softmax(last, sinks, shared: _SharedMemory, block: _QueryBlock, warpgroup, launch: PrefillLaunch):
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
        total = total * rescale + weights.sum(axis=1)
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

    constant = lambda number: plgpu.layout_cast(jnp.full(WARPGROUP_QUERIES, number, jnp.float32), _PER_QUERY)  # noqa: E731
    carry = (
        plgpu.layout_cast(jnp.zeros((WARPGROUP_QUERIES, launch.Hv), jnp.float32), plgpu.Layout.WGMMA),
        constant(LOWEST) if sinks is None else sinks,  # a sink is the score of a key that was seen before
        constant(0.0 if sinks is None else 1.0),
    )
    pl.when(block.end > block.first)(lambda: plgpu.barrier_wait(shared.k_here.at[stage_of(block.first)]))
    pl.when(warpgroup == 1)(switch_warpgroups)
    with_mask, without = (functools.partial(attend_tile, masked=masked) for masked in (True, False))
    if launch.window is not None:
        carry = lax.fori_loop(block.first, block.unmasked, with_mask, carry)
    carry = lax.fori_loop(block.unmasked, block.masked, without, carry)
    acc, _, total = lax.fori_loop(block.masked, block.end, with_mask, carry)
    pl.when(warpgroup == 0)(switch_warpgroups)
    return acc, total


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
