"""The distinct pages that the rows of a prefill batch attend to, for attention that computes keys and values of all of them
before any query attends."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.config import NULL_PAGE


def max_prefill_pages(B: int, T: int, M: int, P: int) -> int:
    """How many pages the texts of a prefill batch may have: B rows of T query tokens, whose tables have M pages of P
    slots.

    That is enough for one text of any length, and for any number of texts of which nothing was read before if T is a
    multiple of P."""
    return M + -(-B * T // P)


class PagesInUse(NamedTuple):
    """The distinct pages that the rows of a prefill batch attend to.

    Attributes:
      numbers: int32 ``[max_pages]``, pages of the pool, padded with the null page.
      table: int32 ``[B, M]``, at which place among ``numbers`` each page of a row is; 0 where the row has none.
      total: int32, how many pages there are. If it is more than ``max_pages``, the others are not listed.
    """

    numbers: jax.Array
    table: jax.Array
    total: jax.Array


def pages_in_use(table, newest, pool: tuple[int, int], max_pages: int) -> PagesInUse:
    """The pages up to the newest slot ``[B]`` that each row attends to; -1 if there is none.

    Args:
      table: int32 ``[B, M]``.
      newest: int32 ``[B]``.
      pool: how many pages the pool has, and the slots of each.
      max_pages: how many pages are listed.
    """
    pages, P = pool
    live = (jnp.arange(table.shape[1], dtype=jnp.int32)[None] * P <= newest[:, None]) & (table != NULL_PAGE)
    used = jnp.zeros(pages, jnp.bool_).at[jnp.where(live, table, pages)].set(True, mode="drop")
    place = jnp.cumsum(used, dtype=jnp.int32) - 1
    at = jnp.where(used & (place < max_pages), place, max_pages)
    numbers = jnp.full(max_pages, NULL_PAGE, jnp.int32).at[at].set(jnp.arange(pages, dtype=jnp.int32), mode="drop")
    return PagesInUse(numbers, jnp.where(live, jnp.minimum(place[table], max_pages - 1), 0), place[-1] + 1)
