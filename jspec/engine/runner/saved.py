"""Copies of rows: what is swapped to host memory and back when a request is preempted, and snapshots of recurrent states."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import NULL_PAGE
from jspec.engine.runner.state import DecodeState, of_rows
from jspec.models.cache_pools import LayerKV
from jspec.pallas.delta_net.state import DeltaState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Saved:
    """A copy of one row, or of a part of its pages.

    Attributes:
      row: the row's part of every array of ``DecodeState`` that has an axis of rows, by field.
      pages: the contents of m pages in every pool of the target and of the drafter, ``[G, m, P, H]`` each, in the trees
        that ``pools`` makes of both.
    """

    row: dict[str, Any]
    pages: Any


def save(state: DecodeState, row, pages) -> Saved:
    """Copy a row, int32 ``[]``, and the contents of ``pages``, int32 ``[m]``."""
    return Saved(
        row=jax.tree.map(lambda x: x[row], of_rows(state)),
        pages=jax.tree.map(lambda pool: jnp.take(pool, pages, axis=1), pools((state.cache, state.draft))),
    )


def restore(state: DecodeState, row, pages, saved: Saved) -> DecodeState:
    """Put a copy back, bit for bit, into a row and pages that may be others than before.

    Entries of ``pages`` that are the null page receive nothing.
    """
    placed = jax.tree.map(lambda x, old: x.at[row].set(old), of_rows(state), saved.row)

    def put_pages(pool, old):
        return pool.at[:, jnp.where(pages == NULL_PAGE, pool.shape[1], pages)].set(old, mode="drop")

    kept = state.cache, state.draft
    new = jax.tree.map(put_pages, pools(kept), saved.pages)
    cache, draft = jax.tree.map(_with_pages, kept, new, is_leaf=is_layer)
    return dataclasses.replace(state, cache=cache, draft=draft, **placed)


def pools(kept: Any) -> Any:
    """What target or drafter keep in pages, with None in the place of each recurrent state."""

    def in_pages(x):
        if isinstance(x, DeltaState):
            return None
        return x.in_pages if isinstance(x, LayerKV) else x

    return jax.tree.map(in_pages, kept, is_leaf=is_layer)


def _with_pages(old: Any, pages: Any) -> Any:
    """What was kept, with ``pages``, which ``pools`` has made of it, in the place of its own."""
    if isinstance(old, DeltaState):
        return old
    return old.with_pages(pages) if isinstance(old, LayerKV) else pages


def states(kept: Any) -> Any:
    """The recurrent states of it, with None in the place of each pool and of each layer that has pools."""
    return jax.tree.map(lambda x: x if isinstance(x, DeltaState) else None, kept, is_leaf=is_layer)


def save_states(state: DecodeState, row) -> Any:
    """Copy the recurrent states of a row, int32 ``[]``, without their axis of rows: the target's and the drafter's."""
    return jax.tree.map(lambda x: x.of_row(row), states((state.cache, state.draft)), is_leaf=is_layer)


def restore_states(state: DecodeState, row, saved: Any) -> DecodeState:
    """Put such a copy into a row, which may be another one. Nothing happens if there is no such row."""

    def put(x, old):
        return x if old is None else x.with_row(row, old)

    cache, draft = jax.tree.map(put, (state.cache, state.draft), saved, is_leaf=is_layer)
    return dataclasses.replace(state, cache=cache, draft=draft)


def is_layer(x: Any) -> bool:
    """Whether x is what a layer keeps: pools or a recurrent state."""
    return isinstance(x, DeltaState | LayerKV)
