"""Moves the keys and values of an accepted path of a tree of drafts to where the text goes on, in all layers at once.

A pass over a tree writes its tokens into one slot after another, whatever branch they are of. Those of the path that was
accepted are then to follow the root without gaps. Nothing else is moved, and nothing is read of the other tokens.

All that is to be moved in a row is read before anything of it is written: a slot of the path may be the new place of
another one. That is safe because a row's slots from the root's on lie in pages of its own."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import broadcast_columns, is_interpreted, kernel_call, line_indices

_BYTES, _WARPS = 16384, 4  # of a program instance, which holds them in registers


def move_path(cache: tuple, table, source, target) -> tuple:
    """The cache with what lay in slots ``source`` in slots ``target`` as well; on an NVIDIA GPU by one kernel, in place.

    Args:
      cache: the ``LayerKV`` (``jspec.models.cache_pools``) of each layer; None for a layer without a cache of its own.
      table: int32 ``[B, M]``, the pages of each row.
      source, target: int32 ``[B, J]``, slots of a row. Nothing is moved where one of them is -1, past the table or on the
        null page. Targets of a row differ from each other.

    Returns:
      the cache with keys, values, and the scales of tokens that were moved.

    Example::

        from jspec.models.cache_pools import CacheShape, init_pool

        cache = init_pool([CacheShape(heads=1, size=16)], pages=3, page_size=4, dtype=jnp.float32)
        accepted, target = jnp.array([[2, 5]]), jnp.array([[1, 2]])  # of a tree in slots 0 to 6, its root in slot 0
        cache = move_path(cache, jnp.array([[1, 2]]), accepted, target)
    """
    pages = tuple(layer and layer.in_pages for layer in cache)
    pools, structure = jax.tree.flatten(pages)
    supported = all(pl.next_power_of_2(pool.shape[3]) == pool.shape[3] for pool in pools if pool.ndim == 4)
    functions = move_in_pools_kernel, move_in_pools_reference
    moved = structure.unflatten(by_platform(*functions, pools, table, source, target, supported=supported))
    return tuple(layer and layer.with_pages(new) for layer, new in zip(cache, moved, strict=True))


def move_in_pools_reference(pools: list, table, source, target) -> list:
    """``move_path`` of pools ``[G, pages, P, H]`` and of scales ``[G, pages, P]``, whose pages are those of one table."""
    if not pools:
        return []
    pages, P = pools[0].shape[1:3]

    def places(slots):
        inside = (slots >= 0) & (slots < table.shape[1] * P)
        page = jnp.take_along_axis(table, jnp.where(inside, slots, 0) // P, axis=1)
        return jnp.where(inside, page, 0), slots % P

    (from_page, from_slot), (page, slot) = places(source), places(target)
    page = jnp.where((from_page != 0) & (page != 0), page, pages)  # ``pages`` is out of range: dropped
    return [pool.at[:, page, slot].set(pool[:, from_page, from_slot], mode="drop") for pool in pools]


@functools.partial(jax.jit, static_argnames=("interpret",))
def move_in_pools_kernel(pools: list, table, source, target, *, interpret=False) -> list:
    """``move_in_pools_reference`` as a kernel, whose program instances move the path of a row in one KV head of a few pools
    each."""
    (B, J), P = source.shape, pools[0].shape[2]
    flat = [pool.reshape(-1, *pool.shape[3:]) for pool in pools]  # by heads and slots
    lines, heads = pl.next_power_of_2(J), tuple(map(len, pools))
    largest = max(lines * pool.dtype.itemsize * math.prod(pool.shape[1:]) for pool in flat)
    moved: Any = kernel_call(
        _move_path,
        *(flat, table, source, target),
        grid=(pl.cdiv(len(flat), at_once := max(_BYTES // largest, 1)), max(heads), B),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in flat],
        num_warps=_WARPS,
        interpret=interpret,
        aliases={i: i for i in range(len(flat))},
        P=P,
        lines=lines,
        heads=heads,
        at_once=at_once,
    )
    return [new.reshape(pool.shape) for new, pool in zip(moved, pools, strict=True)]


def _move_path(
    _, table_ref, source_ref, target_ref, *pool_refs, P: int, lines: int, heads: tuple[int, ...], at_once: int
):
    group, head, b = (pl.program_id(axis) for axis in range(3))
    j, row_slots = jnp.arange(lines, dtype=jnp.int32), table_ref.shape[1] * P

    def places(ref):
        slot = pltriton.load(ref.at[b, j], mask=j < ref.shape[1], other=-1)
        inside = (slot >= 0) & (slot < row_slots)
        place = jnp.where(inside, slot, 0)
        page = pltriton.load(table_ref.at[b, jax.lax.div(place, jnp.int32(P))], mask=inside, other=0)
        return page * P + jax.lax.rem(place, jnp.int32(P)), page != 0

    (read, has_source), (written, has_target) = places(source_ref), places(target_ref)

    @functools.cache  # Triton takes seconds where every pool computes its own
    def elements(G: int, shape: tuple[int, ...]):
        """In a pool of G heads: what is read, what is written, and which of these are moved."""
        moves = has_source & has_target & jnp.full(lines, head < G)
        # An interpreted kernel writes masked elements back as they were, which belong to the null page here.
        where = [jnp.where(moves, head * (shape[0] // G) + at, 0) for at in (read, written)]
        if len(shape) == 1:
            return *[(at,) for at in where], moves
        return *[line_indices(at, shape[1]) for at in where], broadcast_columns(moves, shape[1])

    of_pools = [elements(G, ref.shape) for G, ref in zip(heads, pool_refs, strict=True)]

    def move(group):
        parts = pool_refs[group], of_pools[group]
        numbers = [pltriton.load(ref.at[at], mask=mask, other=0) for ref, (at, _, mask) in zip(*parts, strict=True)]
        if not is_interpreted():
            pltriton.debug_barrier()  # all threads have loaded what any of them overwrites
        for ref, (_, at, mask), x in zip(*parts, numbers, strict=True):
            pltriton.store(ref.at[at], x, mask=mask)

    for first in range(0, len(pool_refs), at_once):  # each group is code of its own
        pl.when(group == first // at_once)(functools.partial(move, slice(first, first + at_once)))
