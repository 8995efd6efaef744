"""Query tokens of several rows side by side, as many of each row as it has: the products of a pass then run over those
tokens alone, and attention sees rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.cache import PagedView, View
from jspec.pallas.attention_reference import PLAIN, Rotation, Scores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedView(View):
    """A view of R query tokens, arrays ``[1, R, ...]``, that belong to B rows with up to T of them each.

    The tokens of row 0 come first, then those of row 1, and so on. What stands behind the last token is padding: it is
    written nowhere, and its output means nothing.

    Attributes:
      rows: the same tokens as ``[B, T]``, of which the valid ones of each row, its first, are among the R.
      place: int32 ``[B, T]``, which of the R tokens a token of a row is. For one that is not among them, any place.
      source: int32 ``[R]``, the other way round: token t of row b is ``b T + t``. For padding, any token.
    """

    rows: PagedView
    place: jax.Array
    source: jax.Array

    keeps_latents = True

    @classmethod
    def of(cls, rows: PagedView, R: int) -> "PackedView":
        """That of the valid tokens of ``rows``, each row's first, of which there are at most R."""
        B, T = rows.positions.shape
        count = jnp.sum(rows.valid, axis=1, dtype=jnp.int32)
        row = jnp.arange(B, dtype=jnp.int32)
        # Sums over pairs are one kernel each, where ``jnp.cumsum`` and ``jnp.searchsorted`` are several.
        start = jnp.sum(jnp.where(row[None] < row[:, None], count[None], 0), axis=1)
        token = jnp.arange(R, dtype=jnp.int32)
        of_row = jnp.sum((start + count)[None] <= token[:, None], axis=1, dtype=jnp.int32)
        mine = of_row[:, None] == row[None]
        source = jnp.sum(jnp.where(mine, row * T - start, 0), axis=1) + token
        source = jnp.where(of_row < B, source, 0)
        place = jnp.minimum(start[:, None] + jnp.arange(T, dtype=jnp.int32)[None], R - 1)
        return cls(rows, place, source)

    @property
    def positions(self) -> jax.Array:
        """int32 ``[1, R]``, the cache slot of each token."""
        return self.packed(self.rows.positions)

    def packed(self, x: jax.Array) -> jax.Array:
        """Values of the tokens of rows, ``[B, T, ...]``, as those of the R tokens, ``[1, R, ...]``."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.source, axis=0, mode="clip")[None]

    def in_rows(self, x: Any) -> Any:
        """Arrays ``[1, R, ...]`` as ``[B, T, ...]``; those of invalid tokens mean nothing."""
        return jax.tree.map(lambda one: jnp.take(one[0], self.place, axis=0, mode="clip"), x)

    def extend(
        self,
        qkv,
        rotation: Rotation | None,
        kv,
        num_kv_heads: int,
        window: int | None,
        scores: Scores = PLAIN,
    ):
        """As ``View.extend``, of ``[1, R, N + 2G, H]``."""
        attended, kv = self.rows.extend(self.in_rows(qkv), self.in_rows(rotation), kv, num_kv_heads, window, scores)
        return self.packed(attended), kv

    def keep_latents(self, compressed, query_weight, latent_weight, eps: float, rotation: Rotation, kv):
        """As ``View.keep_latents``, of R tokens."""
        of_rows = self.in_rows(compressed), query_weight, latent_weight, eps, self.in_rows(rotation), kv
        q, kv = self.rows.keep_latents(*of_rows)
        return self.packed(q), kv

    def attend_latents(self, q, kv, rank: int, scores: Scores) -> jax.Array:
        """As ``View.attend_latents``, of R tokens."""
        return self.packed(self.rows.attend_latents(self.in_rows(q), kv, rank, scores))
