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

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.attention.prefill_launch import (
    INSTANCES,
    WARPGROUPS,
    PrefillLaunch,
    block_bounds,
    live_pages,
    sinks_of_queries,
)
from jspec.pallas.attention.prefill_memory import QueryBlock, SharedMemory
from jspec.pallas.attention.prefill_warpgroups import compute_block, load_block
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries

# Registers of a thread in the warpgroups that compute, and in the one that loads. An instance starts with 168 for each
# of its 384 threads, and its three warpgroups share these 504 from then on: one that asks for more than is left never runs.
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 224, 56


@functools.partial(
    jax.jit, static_argnames=("pages_first", "num_stages", "instances", "one_order", "interpret")
)  # one trace for layers
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
    one_order: bool = False,
    interpret=None,
):
    """``paged_attention_reference`` as a kernel; the attention of an invalid query token is 0.

    There is no soft cap. Values may have other sizes than keys; with ``pages_first``, both pools are ``[pages, P,
    G, H]``. With ``one_order``, sums have the order of ``paged_attention_kernel`` where its tiles have 64 slots."""
    assert spec.softcap is None, spec.softcap
    queries.require_tree(supported=False)
    launch = PrefillLaunch.of(q, v_pool, spec, num_stages, instances, interpret, pages_first, one_order)
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


def _attend_blocks(q_ref, k_ref, v_ref, pages_ref, bounds_ref, last_ref, sinks_ref, out_ref, *, launch: PrefillLaunch):
    def run(*scoped):
        shared, warpgroup = SharedMemory(*scoped), lax.axis_index("warpgroup")

        def each_block(attend):
            def body(i, before):
                block = QueryBlock.of(bounds_ref, i, before, launch)
                attend(block)
                return block.count(block.end)

            return lax.fori_loop(0, launch.blocks_of(lax.axis_index("instance")), body, jnp.int32(0))

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            if not launch.interpret:
                plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            each_block(
                lambda block: compute_block(q_ref, last_ref, sinks_ref, out_ref, shared, block, warpgroup, launch)
            )

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            if not launch.interpret:
                plgpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            read = each_block(lambda block: load_block(k_ref, v_ref, pages_ref, shared, block, launch))

            @pl.loop(jnp.maximum(read - launch.num_stages, 0), read)
            def _(count):  # so that every phase of a barrier has been awaited
                for barrier in (shared.k_read, shared.v_read):
                    plgpu.barrier_wait(barrier.at[lax.rem(count, jnp.int32(launch.num_stages))])

    pl.run_scoped(run, *SharedMemory.types(launch, q_ref.dtype), collective_axes="warpgroup")
