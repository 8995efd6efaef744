"""Query tokens of several rows side by side, as many of each row as it has: the products of a pass then run over those
tokens alone, and attention sees rows."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.kv_cache import LayerKV, PagedView, View
from jspec.pallas.attention.decode import extend_kernel, has_extend_kernel
from jspec.pallas.attention.flash import Packing
from jspec.pallas.attention.reference import PLAIN, Rotation, Scores
from jspec.pallas.dispatch import by_platform


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedView(View):
    """A view of R query tokens, arrays ``[1, R, ...]``, that belong to B rows with up to T of them each.

    The tokens of row 0 come first, then those of row 1, and so on. What stands behind the last token is padding: it is
    written nowhere, and its output means nothing.

    Attributes:
      rows: the same tokens as ``[B, T]``. The valid ones of each row, its first, are the R.
      packing: where the tokens of each row are.

    Example::

        positions = jnp.array([[4, 5], [9, 0]])
        valid = jnp.array([[True, True], [True, False]])  # two tokens of row 0, and one of row 1
        view = PackedView.of(PagedView(jnp.array([[1], [2]]), positions, valid), R=3)
        assert view.positions.tolist() == [[4, 5, 9]]
    """

    rows: PagedView
    packing: Packing

    keeps_latents = True

    @classmethod
    def of(cls, rows: PagedView, R: int) -> "PackedView":
        """That of the valid tokens of ``rows``, each row's first, of which there are at most R."""
        B, T = rows.positions.shape
        count = jnp.sum(rows.valid, axis=1, dtype=jnp.int32)
        row = jnp.arange(B + 1, dtype=jnp.int32)
        # Sums over pairs are one kernel each, where ``jnp.cumsum`` and ``jnp.searchsorted`` are several.
        start = jnp.sum(jnp.where(row[None, :B] < row[:, None], count[None], 0), axis=1)  # [B + 1]
        token = jnp.arange(R, dtype=jnp.int32)
        of_row = jnp.sum(start[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
        moved = jnp.sum(jnp.where(of_row[:, None] == row[None, :B], (row * T - start)[None, :B], 0), axis=1)
        return cls(rows, Packing(start, jnp.where(of_row < B, moved + token, 0)))

    @property
    def positions(self) -> jax.Array:
        """int32 ``[1, R]``, the cache slot of each token."""
        return self.packed(self.rows.positions)

    def packed(self, x: jax.Array) -> jax.Array:
        """Values of the tokens of rows, ``[B, T, ...]``, as those of the R tokens, ``[1, R, ...]``."""
        return self.packing.packed(x)

    def in_rows(self, x: Any) -> Any:
        """Arrays ``[1, R, ...]`` as ``[B, T, ...]``; those of invalid tokens mean nothing."""
        place = self.packing.start[:-1, None] + jnp.arange(self.rows.positions.shape[1], dtype=jnp.int32)[None]
        return jax.tree.map(lambda one: jnp.take(one[0], place, axis=0, mode="clip"), x)

    def extend(
        self,
        qkv,
        rotation: Rotation | None,
        kv,
        num_kv_heads: int,
        window: int | None,
        scores: Scores = PLAIN,
    ):
        """As ``View.extend``, of ``[1, R, N + 2G, H]``. On an NVIDIA GPU one kernel reads and writes the tokens where they
        are."""

        def composed(view, qkv, rotation, kv):
            of_rows = view.in_rows(qkv), view.in_rows(rotation), kv, num_kv_heads, window, scores
            attended, kv = view.rows.extend(*of_rows)
            return view.packed(attended), kv

        def kernel(view, qkv, rotation, kv):
            where = view.rows.table, view.rows.positions, view.rows.valid
            out, *kv = extend_kernel(qkv, rotation, *kv, *where, window, scores, view.packing)
            return out, LayerKV(*kv)

        args = self, qkv, rotation, kv
        known = has_extend_kernel(qkv, kv.k, self.rows.positions.shape[1])
        return by_platform(kernel, composed, *args) if known else composed(*args)

    def keep_latents(self, compressed, query_weight, latent_weight, eps: float, rotation: Rotation, kv):
        """As ``View.keep_latents``, of R tokens."""
        of_rows = self.in_rows(compressed), query_weight, latent_weight, eps, self.in_rows(rotation), kv
        q, kv = self.rows.keep_latents(*of_rows)
        return self.packed(q), kv

    def attend_latents(self, q, kv, rank: int, scores: Scores) -> jax.Array:
        """As ``View.attend_latents``, of R tokens."""
        return self.packed(self.rows.attend_latents(self.in_rows(q), kv, rank, scores))
