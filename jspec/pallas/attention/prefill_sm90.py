"""Attention of many query tokens over the pages of the KV cache, on Hopper GPUs (Shah et al., 2024).

Queries are dealt to programs in *blocks*: 128 queries of one KV head, which are consecutive query tokens of one row times
the R attention heads of that KV head. There is a program for each multiprocessor, which attends for several blocks one after
the other. One of its warpgroups brings tiles of 128 cache slots into shared memory, or of 64 slots with many numbers each,
page by page, and goes on with the next block while the last one is still computed. Two others compute, 64 queries each, and
take turns: while one multiplies matrices, the other computes its softmax.

Tiles are counted from slot 0 and are not split among programs. What a query token gets therefore depends on nothing but
its own row: not on the number of the row, not on the other rows, not on which tokens are its neighbours."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.attention.paged import last_slots, paged_attention, paged_attention_reference
from jspec.pallas.attention.prefill_plan import (
    LOWEST,
    PART,
    PROGRAMS,
    WARPGROUPS,
    Plan,
    block_bounds,
    live_pages,
    sinks_of_queries,
)
from jspec.pallas.attention.reference import PLAIN, Scores
from jspec.pallas.dispatch import by_platform, on_hopper
from jspec.pallas.triton import LOG2_E

# Registers of a thread in the warpgroups that compute, and in the one that loads. A program is launched with 168 for each of
# its 384 threads, and its three warpgroups share these 504 from then on: one that asks for more than is left waits for ever.
_COMPUTE, _LOAD = 224, 56
_FEWEST_PROGRAMS = 64  # with fewer, ``paged_attention`` keeps more of a GPU busy, because it splits rows
_ROW = plgpu.Layout.WGMMA.reduce(1)  # of one number for each query
# What ``plgpu.load`` of jax 0.10 wants to be told, and later ones warn about.
_IN_FULL: dict[str, Any] = {} if jax.__version_info__ >= (0, 11) else {"idx": ()}


def prefill_attention(
    q, k_pool, v_pool, table, positions, valid, window: int | None, scores: Scores = PLAIN
) -> jax.Array:
    """``paged_attention``, which on a Hopper GPU uses ``prefill_attention_kernel`` for shapes that suit it.

    That kernel knows no soft cap: the hyperbolic tangent of its instructions is too coarse."""
    if scores.softcap is not None or not (has_prefill_kernel(q, k_pool) and on_hopper()):
        return paged_attention(q, k_pool, v_pool, table, positions, valid, window, scores)
    kernel, reference = (
        functools.partial(f, window=window, scores=scores)
        for f in (prefill_attention_kernel, paged_attention_reference)
    )
    return by_platform(kernel, reference, q, k_pool, v_pool, table, positions, valid)


def has_prefill_kernel(q, pool) -> bool:
    """Whether the kernel knows queries and pools like these, and makes enough programs of them.

    It knows bfloat16, a head dimension of 64 or 128, pages of 64 or 128 slots, and 1, 2, 4, 8 or 16 attention heads for a KV
    head. The query tokens of a row have to be whole blocks: a multiple of 128 / R.
    """
    (B, T, N, H), (G, _, P, _) = q.shape, pool.shape
    fits = q.dtype == pool.dtype == jnp.bfloat16 and H in (64, 128) and P in (64, 128)
    return fits and N // G in (1, 2, 4, 8, 16) and suits_prefill(B, T, N, N // G)


def suits_prefill(B: int, T: int, N: int, R: int) -> bool:
    """Whether the query tokens of a row are whole blocks, and there are enough of them for all multiprocessors."""
    queries, block = B * T * N, WARPGROUPS * PART
    return T * R % block == 0 and queries >= _FEWEST_PROGRAMS * block


@functools.partial(
    jax.jit, static_argnames=("window", "pages_first", "stages", "programs", "interpret")
)  # layers share one trace
def prefill_attention_kernel(
    q,
    k_pool,
    v_pool,
    table,
    positions,
    valid,
    window: int | None,
    scores: Scores = PLAIN,
    *,
    pages_first: bool = False,
    stages: int | None = None,
    programs: int = PROGRAMS,
    interpret=None,
):
    """``paged_attention_reference`` as a kernel; the attention of an invalid query token is 0.

    ``scores`` have no soft cap. Values may have other sizes than keys; with ``pages_first``, both pools are ``[pages, P, G,
    H]``."""
    assert scores.softcap is None, scores.softcap
    plan = Plan.of(q, v_pool, window, scores.scale, stages, programs, interpret, pages_first)
    bounds, last = block_bounds(last_slots(table, positions, valid, plan.P), plan)
    sinks = None if scores.sinks is None else sinks_of_queries(scores.sinks, plan)
    return plgpu.kernel(
        functools.partial(_attend_blocks, plan=plan),
        out_type=jax.ShapeDtypeStruct((*q.shape[:3], plan.Hv), q.dtype),
        grid=(plan.programs,),
        grid_names=("program",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name="jspec_prefill_attention",
    )(q, k_pool, v_pool, live_pages(table, bounds, plan), bounds, last, sinks)


class _Shared(NamedTuple):
    """Shared memory of a program. A barrier with a number of stages has one part for each of them.

    Attributes:
      q: ``[2, 64, H]``, queries, and in the end results.
      k, v: ``[stages, slots, H]`` and ``[stages, slots, Hv]``.
      q_here: the queries of a warpgroup have arrived.
      k_here, v_here: a tile has arrived.
      tail_here: the last tile of values has arrived, and unseen slots have to be cleared.
      k_read, v_read: both warpgroups have multiplied a tile, whose memory is free.
      turn: the warpgroups that compute change turns.
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
    turn: Any

    @classmethod
    def types(cls, plan: Plan, dtype) -> "_Shared":
        layout = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        matrix = lambda *shape: plgpu.SMEM(shape, dtype, transforms=layout)  # noqa: E731
        here = plgpu.Barrier(num_arrivals=plan.pages, num_barriers=plan.stages)
        read = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=plan.stages)
        return cls(
            q=matrix(WARPGROUPS, PART, plan.H),
            k=matrix(plan.stages, plan.slots, plan.H),
            v=matrix(plan.stages, plan.slots, plan.Hv),
            q_here=plgpu.Barrier(num_arrivals=plan.heads, num_barriers=WARPGROUPS),
            k_here=here,
            v_here=here,
            tail_here=plgpu.Barrier(num_arrivals=plan.pages),
            k_read=read,
            v_read=read,
            turn=plgpu.Barrier(num_arrivals=WARPGROUPS),
        )


class _Block(NamedTuple):
    """In a kernel: a block, and between which tiles it masks; numbers are those of ``block_bounds``.

    Attributes:
      before: how many tiles the program has read for blocks before this one. The memory of a tile, and the phase of its
        barriers, follow from how many were read before it.
    """

    b: Any
    g: Any
    number: Any
    first: Any
    unmasked: Any
    masked: Any
    end: Any
    newest: Any
    before: Any

    @classmethod
    def of(cls, bounds_ref, i, before, plan: Plan) -> "_Block":
        """The i-th block of this program."""
        b, g, number = plan.block(lax.axis_index("program"), i)
        first, unmasked, masked, end, newest = (bounds_ref[b, number, j] for j in range(5))
        if plan.window is None:  # known when the kernel is compiled
            first = unmasked = 0
        return cls(b, g, number, first, unmasked, masked, end, newest, before)

    def count(self, i):
        """How many tiles the program has read before tile i of this block."""
        return self.before + i - self.first


def _attend_blocks(q_ref, k_ref, v_ref, pages_ref, bounds_ref, last_ref, sinks_ref, out_ref, *, plan: Plan):
    def program(*scoped):
        shared, warpgroup = _Shared(*scoped), lax.axis_index("warpgroup")

        def each_block(attend):
            def body(i, before):
                block = _Block.of(bounds_ref, i, before, plan)
                attend(block)
                return block.count(block.end)

            return lax.fori_loop(0, plan.blocks_of(lax.axis_index("program")), body, jnp.int32(0))

        @pl.when(warpgroup < WARPGROUPS)
        def _():
            if not plan.interpret:
                plgpu.set_max_registers(_COMPUTE, action="increase")
            each_block(lambda block: _compute(q_ref, last_ref, sinks_ref, out_ref, shared, block, warpgroup, plan))

        @pl.when(warpgroup == WARPGROUPS)
        def _():
            if not plan.interpret:
                plgpu.set_max_registers(_LOAD, action="decrease")
            read = each_block(lambda block: _load(k_ref, v_ref, pages_ref, shared, block, plan))

            @pl.loop(jnp.maximum(read - plan.stages, 0), read)
            def _(count):  # no barrier is left with a phase that nobody saw
                for barrier in (shared.k_read, shared.v_read):
                    plgpu.barrier_wait(barrier.at[lax.rem(count, jnp.int32(plan.stages))])

    pl.run_scoped(program, *_Shared.types(plan, q_ref.dtype), collective_axes="warpgroup")


def _load(k_ref, v_ref, pages_ref, shared: _Shared, block: _Block, plan: Plan):
    """Bring the block's tiles into shared memory, as it becomes free."""

    def pages(i):
        at = jnp.minimum(i * plan.pages, pages_ref.shape[1] - plan.pages)
        return tuple(pages_ref[block.b, at + j] for j in range(plan.pages))

    def copy(ref, numbers, tile, barrier):
        for j, page in enumerate(numbers):
            there = ref.at[page, :, block.g] if plan.pages_first else ref.at[block.g, page]
            plgpu.copy_gmem_to_smem(there, tile.at[pl.ds(j * plan.P, plan.P)], barrier)

    def load_tile(i, numbers):  # looked up a trip ago, or the copies would have to wait for them
        stage, used = lax.rem(block.count(i), jnp.int32(plan.stages)), block.count(i) >= plan.stages
        following = pages(i + 1)
        pl.when(used)(lambda: plgpu.barrier_wait(shared.k_read.at[stage]))
        copy(k_ref, numbers, shared.k.at[stage], shared.k_here.at[stage])
        pl.when(used)(lambda: plgpu.barrier_wait(shared.v_read.at[stage]))
        all_seen = (i + 1) * plan.slots <= block.newest + 1

        @pl.when(all_seen)
        def _():
            copy(v_ref, numbers, shared.v.at[stage], shared.v_here.at[stage])

        @pl.when(jnp.logical_not(all_seen))
        def _():
            copy(v_ref, numbers, shared.v.at[stage], shared.tail_here)
            plgpu.barrier_wait(shared.tail_here)
            _clear_unseen(shared.v.at[stage], block.newest - i * plan.slots, plan)
            for _page in range(plan.pages):
                plgpu.barrier_arrive(shared.v_here.at[stage])

        return following

    lax.fori_loop(block.first, block.end, load_tile, pages(block.first))


def _clear_unseen(tile, newest, plan: Plan):
    """Zero the values past slot ``newest`` of a tile. They may be NaN, and 0 x NaN is NaN."""
    for i in range(0, plan.slots, PART):
        for j in range(0, plan.Hv, 64):
            part = tile.at[pl.ds(i, PART), pl.ds(j, 64)]
            values = plgpu.load(part, **_IN_FULL, layout=plgpu.Layout.WGMMA)
            slot = plgpu.broadcasted_iota(jnp.int32, (PART, 64), 0, layout=plgpu.Layout.WGMMA) + i
            part[...] = jnp.where(slot <= newest, values, jnp.zeros((), values.dtype))
    plgpu.commit_smem()


def _compute(q_ref, last_ref, sinks_ref, out_ref, shared: _Shared, block: _Block, warpgroup, plan: Plan):
    """The attention of one warpgroup's queries."""
    tokens = PART // plan.heads
    token, head = block.number * plan.tokens, block.g * plan.R
    token, head = (token + warpgroup * tokens, head) if plan.R == 1 else (token, head + warpgroup * plan.heads)
    rows = [pl.ds(i * tokens, tokens) for i in range(plan.heads)]
    places = [(block.b, pl.ds(token, tokens), head + i) for i in range(plan.heads)]
    for mine, there in zip(rows, places, strict=True):
        plgpu.copy_gmem_to_smem(q_ref.at[there], shared.q.at[warpgroup, mine], shared.q_here.at[warpgroup])
    last = _load_row(last_ref.at[block.b, block.number, warpgroup])
    sinks = None if sinks_ref is None else _load_row(sinks_ref.at[block.g, warpgroup])
    plgpu.barrier_wait(shared.q_here.at[warpgroup])
    acc, total = _softmax(last, sinks, shared, block, warpgroup, plan)

    share = jnp.where(last >= 0, 1.0 / total, 0.0)
    seen = lax.broadcast_in_dim(last >= 0, acc.shape, [0])
    out = jnp.where(seen, acc * lax.broadcast_in_dim(share, acc.shape, [0]), 0.0)
    results, whole = shared.q.at[warpgroup], plan.Hv == plan.H
    results = results if whole else results.at[:, pl.ds(0, plan.Hv)]
    results[...] = out.astype(q_ref.dtype)
    plgpu.commit_smem()
    for mine, (b, here, n) in zip(rows, places, strict=True):
        if whole:
            plgpu.copy_smem_to_gmem(results.at[mine], out_ref.at[b, here, n])
            continue
        for i in range(0, tokens, 8):  # what is consecutive in shared memory
            some = results.at[pl.ds(mine.start + i, 8)]
            plgpu.copy_smem_to_gmem(some, out_ref.at[b, pl.ds(here.start + i, 8), n])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next block's queries may come


def _load_row(ref):
    """One number for each query of a warpgroup, ``[64]``."""
    return plgpu.load(ref, **_IN_FULL, layout=_ROW, optimized=False)


def _softmax(last, sinks, shared: _Shared, block: _Block, warpgroup, plan: Plan):
    """The weighted sums of values ``[64, Hv]`` and the sums of weights ``[64]``, float32, of queries that each see the
    slots up to ``last`` ``[64]``. ``sinks`` ``[64]`` are those of ``sinks_of_queries``, or None.

    A warpgroup has its turn at the tensor cores from the end of its softmax until its next scores are under way.
    """
    scale, shape = plan.scale * LOG2_E, (PART, plan.slots)
    stage_of = lambda i: lax.rem(block.count(i), jnp.int32(plan.stages))  # noqa: E731

    def change_turns():
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    def mask(scores, i):
        newest = lax.broadcast_in_dim(last, shape, [0])
        slot = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + i * plan.slots
        seen = slot <= newest
        if plan.window is not None:
            seen &= slot > newest - plan.window
        return jnp.where(seen, scores, -jnp.inf)

    def attend_tile(i, carry, masked: bool):
        acc, peak, total = carry
        stage = stage_of(i)

        def score(ref):
            plgpu.wgmma(ref, shared.q.at[warpgroup], shared.k.at[stage].transpose((1, 0)))
            change_turns()
            return ref[...]

        scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        plgpu.barrier_arrive(shared.k_read.at[stage])
        scores = mask(scores, i) if masked else scores
        raised = jnp.maximum(peak, scores.max(axis=1) * scale)
        kept = jnp.exp2(peak - raised)
        weights = jnp.exp2(scores * scale - lax.broadcast_in_dim(raised, shape, [0]))
        acc *= lax.broadcast_in_dim(kept, acc.shape, [0])
        total = total * kept + weights.sum(axis=1)
        weights = weights.astype(shared.v.dtype)
        # So that the whole softmax happens before the turn begins.
        acc, total, raised, weights = lax.optimization_barrier((acc, total, raised, weights))
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.v_here.at[stage])
        plgpu.barrier_wait(shared.turn)

        def await_keys():
            pl.when(i + 1 < block.end)(lambda: plgpu.barrier_wait(shared.k_here.at[stage_of(i + 1)]))

        acc = _add_product(acc, weights, shared.v.at[stage], await_keys, plan)
        plgpu.barrier_arrive(shared.v_read.at[stage])
        return acc, raised, total

    constant = lambda number: plgpu.layout_cast(jnp.full(PART, number, jnp.float32), _ROW)  # noqa: E731
    carry = (
        plgpu.layout_cast(jnp.zeros((PART, plan.Hv), jnp.float32), plgpu.Layout.WGMMA),
        constant(LOWEST) if sinks is None else sinks,  # a sink is the score of a key that was seen before
        constant(0.0 if sinks is None else 1.0),
    )
    pl.when(block.end > block.first)(lambda: plgpu.barrier_wait(shared.k_here.at[stage_of(block.first)]))
    pl.when(warpgroup == 1)(change_turns)
    with_mask, without = (functools.partial(attend_tile, masked=masked) for masked in (True, False))
    if plan.window is not None:
        carry = lax.fori_loop(block.first, block.unmasked, with_mask, carry)
    carry = lax.fori_loop(block.unmasked, block.masked, without, carry)
    acc, _, total = lax.fori_loop(block.masked, block.end, with_mask, carry)
    pl.when(warpgroup == 0)(change_turns)
    return acc, total


def _add_product(acc, weights, values, meanwhile, plan: Plan):
    """``acc + weights @ values``; ``meanwhile`` is called while the tensor cores are busy."""
    if plan.interpret:  # which multiplies operands in shared memory only
        meanwhile()
        return acc + jnp.dot(weights, values[...], preferred_element_type=jnp.float32)

    def multiply(ref):
        plgpu.wgmma(ref, weights, values)
        meanwhile()

    return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(acc))
