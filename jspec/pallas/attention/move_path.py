"""Moves the accepted path of a tree of drafts to where the text goes on, in the pools of all layers at once.

A pass over a tree writes its tokens into one slot after another, whatever branch they are of. All of a row's path is read
before any of it is written, because one slot of the path may be the new place of another. Rows need not wait for each other:
their slots from the root's on lie in pages of their own."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.dispatch import by_platform
from jspec.pallas.triton import broadcast_columns, is_interpreted, kernel_call, line_indices

_BYTES, _WARPS = 16384, 4  # of a program instance, which holds them in registers


def move_path(cache: tuple, table, source, target) -> tuple:
    """The cache with what lay in slots ``source`` in slots ``target``, too; on an NVIDIA GPU by one kernel, in place.

    Args:
      cache: the ``LayerKV`` (``jspec.models.cache_pools``) of each layer; None for a layer without pools of its own.
      table: int32 ``[B, M]``, the pages of each row.
      source, target: int32 ``[B, J]``, slots of a row. Nothing is moved where one of them is -1, past the table or on the
        null page. Targets of a row differ from each other.
    """
    pools, structure = jax.tree.flatten(tuple(layer and layer.in_pages for layer in cache))
    supported = all(pl.next_power_of_2(pool.shape[3]) == pool.shape[3] for pool in pools if pool.ndim == 4)
    functions = move_in_pools_kernel, move_in_pools_reference
    moved = structure.unflatten(by_platform(*functions, pools, table, source, target, supported=supported))
    return tuple(layer and layer.with_pages(new) for layer, new in zip(cache, moved, strict=True))


def move_in_pools_reference(pools: list, table, source, target) -> list:
    """``move_path`` of pools ``[G, pages, P, H]`` and of scales ``[G, pages, P]``, whose pages are those of one table."""
    pages, P = pools[0].shape[1:3]
    page_of = lambda i, inside: jnp.where(inside, jnp.take_along_axis(table, i, axis=1), 0)  # noqa: E731
    (read, has_source), (written, has_target) = (_places(x, page_of, table.shape[1], P) for x in (source, target))
    written = jnp.where(has_source & has_target, written, pages * P)  # past the pool: dropped
    flat = [pool.reshape(len(pool), pages * P, -1) for pool in pools]
    moved = [pool.at[:, written].set(pool[:, read], mode="drop") for pool in flat]
    return [new.reshape(pool.shape) for new, pool in zip(moved, pools, strict=True)]


def _places(slot, page_of, M: int, P: int):
    """Where slots of a row lie in a pool, and whether they do; ``page_of(i, inside)`` are pages i of its M, 0 where not
    ``inside``. It works in kernels and outside."""
    inside = (slot >= 0) & (slot < M * P)
    place = jnp.where(inside, slot, 0)
    page = page_of(jax.lax.div(place, jnp.int32(P)), inside)
    return page * P + jax.lax.rem(place, jnp.int32(P)), page != 0


@functools.partial(jax.jit, static_argnames=("interpret",))
def move_in_pools_kernel(pools: list, table, source, target, *, interpret=False) -> list:
    """``move_in_pools_reference`` as a kernel. A program instance moves the path of a row in one KV head of some pools."""
    heads, lines, P = tuple(map(len, pools)), pl.next_power_of_2(source.shape[1]), pools[0].shape[2]
    flat = [pool.reshape(len(pool) * pool.shape[1] * P, -1) for pool in pools]
    at_once = max(_BYTES // max(lines * pool.shape[1] * pool.dtype.itemsize for pool in flat), 1)
    moved: Any = kernel_call(
        _move_path,
        *(flat, table, source, target),
        grid=(pl.cdiv(len(flat), at_once), max(heads), len(source)),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in flat],
        num_warps=_WARPS,
        interpret=interpret,
        aliases={i: i for i in range(len(flat))},
        **{"heads": heads, "lines": lines, "P": P, "at_once": at_once},
    )
    return [new.reshape(pool.shape) for new, pool in zip(moved, pools, strict=True)]


def _move_path(_, table_ref, source_ref, target_ref, *pool_refs, heads: tuple, lines: int, P: int, at_once: int):
    group, head, b = (pl.program_id(axis) for axis in range(3))
    j, page_of = (
        jnp.arange(lines, dtype=jnp.int32),
        lambda i, inside: pltriton.load(table_ref.at[b, i], mask=inside, other=0),
    )
    slots = (pltriton.load(ref.at[b, j], mask=j < ref.shape[1], other=-1) for ref in (source_ref, target_ref))
    (read, has_source), (written, has_target) = (_places(slot, page_of, table_ref.shape[1], P) for slot in slots)

    @functools.cache  # Triton takes long where every pool computes its own
    def elements(G: int, count: int, H: int):
        """In ``[count, H]``, a pool of G heads: what is read, what is written, and which of these are moved."""
        moves = has_source & has_target & jnp.full(lines, head < G)
        # An interpreted kernel writes masked elements back as they were, which belong to the null page here.
        where = (jnp.where(moves, head * (count // G) + at, 0) for at in (read, written))
        return *(line_indices(at, H) for at in where), broadcast_columns(moves, H)

    pools = [(ref, *elements(G, *ref.shape)) for G, ref in zip(heads, pool_refs, strict=True)]

    def move(pools):
        numbers = [pltriton.load(ref.at[at], mask=mask, other=0) for ref, at, _, mask in pools]
        if not is_interpreted():
            pltriton.debug_barrier()  # all threads have loaded what any of them overwrites
        for (ref, _, at, mask), x in zip(pools, numbers, strict=True):
            pltriton.store(ref.at[at], x, mask=mask)

    for first in range(0, len(pools), at_once):  # each group is code of its own
        pl.when(group == first // at_once)(functools.partial(move, pools[first : first + at_once]))
