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
      pages: the contents of m pages in every pool of the target and of the drafter, ``[G, m, P, H]`` each.
    """

    row: dict[str, Any]
    pages: Any


def save(state: DecodeState, row, pages) -> Saved:
    """Copy a row, int32 ``[]``, and the contents of ``pages``, int32 ``[m]``."""
    return Saved(
        row=jax.tree.map(lambda x: x[row], of_rows(state)),
        pages=jax.tree.map(lambda pool: jnp.take(pool, pages, axis=1), (pools(state.cache), state.draft)),
    )


def restore(state: DecodeState, row, pages, saved: Saved) -> DecodeState:
    """Put a copy back, bit for bit, into a row and pages that may be others than before.

    Entries of ``pages`` that are the null page receive nothing.
    """
    placed = jax.tree.map(lambda x, old: x.at[row].set(old), of_rows(state), saved.row)

    def put_pages(pool, old):
        return pool.at[:, jnp.where(pages == NULL_PAGE, pool.shape[1], pages)].set(old, mode="drop")

    cache, draft = jax.tree.map(put_pages, (pools(state.cache), state.draft), saved.pages)
    return dataclasses.replace(state, cache=_with(cache, state.cache), draft=draft, **placed)


def pools(cache: tuple) -> tuple[LayerKV | None, ...]:
    """The layers of a cache that have pages, and of these what lies in them; None for the others."""
    return tuple(layer.in_pages if isinstance(layer, LayerKV) else None for layer in cache)


def states(cache: tuple) -> tuple[DeltaState | None, ...]:
    """The layers of a cache that have a recurrent state; None for the others."""
    return tuple(layer if isinstance(layer, DeltaState) else None for layer in cache)


def save_states(state: DecodeState, row) -> tuple[DeltaState | None, ...]:
    """Copy the recurrent states of a row, int32 ``[]``, without their axis of rows."""
    return tuple(layer and layer.of_row(row) for layer in states(state.cache))


def restore_states(state: DecodeState, row, saved: tuple[DeltaState | None, ...]) -> DecodeState:
    """Put such a copy into a row, which may be another one. Nothing happens if there is no such row."""
    layers = zip(states(state.cache), saved, strict=True)
    put = tuple(None if layer is None or old is None else layer.with_row(row, old) for layer, old in layers)
    return dataclasses.replace(state, cache=_with(put, state.cache))


def _with(layers: tuple, cache: tuple) -> tuple:
    """The cache with the pages, or the states, of ``layers`` in place of its own; None leaves a layer as it is."""

    def of_layer(new, old):
        if new is None:
            return old
        return old.with_pages(new) if isinstance(old, LayerKV) else new

    return tuple(map(of_layer, layers, cache))
