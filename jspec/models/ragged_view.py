"""A ragged view: query tokens of all rows side by side without padding, as many of each row as it has.

Products run over those tokens alone; attention takes them by row."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.models.kv_cache import PagedView, View
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec, RaggedLayout
from jspec.pallas.attention.table import ONE_LAUNCH, Attention
from jspec.pallas.delta_net.recur import DeltaInputs
from jspec.pallas.delta_net.state import DeltaState
from jspec.pallas.dispatch import by_platform


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedView(View):
    """A view of Q query tokens, arrays ``[1, Q, ...]``, that belong to B rows with up to T of them each.

    The tokens of row 0 come first, then those of row 1, and so on. The places behind the last token are padding: nothing
    of them is written, and their output is arbitrary.

    Attributes:
      rows: the same tokens as ``[B, T]``. The valid ones of each row, its first, are the Q.
      layout: where the tokens of each row lie.

    Example::

        positions = jnp.array([[4, 5], [9, 0]])
        valid = jnp.array([[True, True], [True, False]])  # two tokens of row 0, and one of row 1
        view = RaggedView.of(PagedView(jnp.array([[1], [2]]), positions, valid), Q=3)
        assert view.positions.tolist() == [[4, 5, 9]]
    """

    rows: PagedView
    layout: RaggedLayout

    caches_latents = True

    @classmethod
    def of(cls, rows: PagedView, Q: int) -> "RaggedView":
        """The view of the valid tokens of ``rows``, each row's first, of which there are at most Q."""
        assert rows.tree is None, "a ragged view has no trees"
        B, T = rows.positions.shape
        count = jnp.sum(rows.valid, axis=1, dtype=jnp.int32)
        row = jnp.arange(B + 1, dtype=jnp.int32)
        # Sums over pairs are one kernel each, where ``jnp.cumsum`` and ``jnp.searchsorted`` are several.
        start = jnp.sum(jnp.where(row[None, :B] < row[:, None], count[None], 0), axis=1)  # [B + 1]
        token = jnp.arange(Q, dtype=jnp.int32)
        token_row = jnp.sum(start[None, 1:] <= token[:, None], axis=1, dtype=jnp.int32)
        shift = jnp.sum(jnp.where(token_row[:, None] == row[None, :B], (row * T - start)[None, :B], 0), axis=1)
        return cls(rows, RaggedLayout(start, jnp.where(token_row < B, shift + token, 0)))

    @property
    def positions(self) -> jax.Array:
        """int32 ``[1, Q]``, the cache slot of each token."""
        return self.from_rows(self.rows.positions)

    def from_rows(self, x: jax.Array) -> jax.Array:
        """Values of the tokens of rows, ``[B, T, ...]``, as those of the Q tokens, ``[1, Q, ...]``."""
        return self.layout.from_rows(x)

    def to_rows(self, x: Any) -> Any:
        """Arrays ``[1, Q, ...]`` as ``[B, T, ...]``, with arbitrary numbers for invalid tokens."""
        place = self.layout.start[:-1, None] + jnp.arange(self.rows.positions.shape[1], dtype=jnp.int32)[None]
        return jax.tree.map(lambda array: jnp.take(array[0], place, axis=0, mode="clip"), x)

    def extend(self, qkv, rotation: Rotation | None, kv, num_kv_heads: int, spec: AttentionSpec):
        """As ``View.extend``, of ``[1, Q, N + 2G, H]``. On an NVIDIA GPU one kernel reads and writes the tokens where
        they lie."""

        def composed(view, qkv, rotation, kv):
            attended, kv = view.rows.extend(view.to_rows(qkv), view.to_rows(rotation), kv, num_kv_heads, spec)
            return view.from_rows(attended), kv

        def kernel(view, qkv, rotation, kv):
            args = qkv, rotation, kv.k, kv.v, view.rows.queries, spec, view.layout, kv.scales
            out, *written = ONE_LAUNCH.kernel(*args)
            return out, kv.with_written(*written)

        args = self, qkv, rotation, kv
        supported = ONE_LAUNCH.serves(Attention(qkv, kv.k, self.rows.queries))
        return by_platform(kernel, composed, *args, supported=supported)

    def recur(self, inputs: DeltaInputs, state: DeltaState | None) -> tuple[jax.Array, DeltaState | None]:
        """As ``View.recur``, of Q tokens."""
        qkv, g, beta = (self.to_rows(x) for x in (inputs.qkv, inputs.g, inputs.beta))
        o, state = self.rows.recur(inputs._replace(qkv=qkv, g=g, beta=beta), state)
        return self.from_rows(o), state

    def attend_cached(self, q, rotation: Rotation | None, kv, spec: AttentionSpec) -> jax.Array:
        """As ``View.attend_cached``, of ``[1, Q, N, H]``."""
        return self.from_rows(self.rows.attend_cached(self.to_rows(q), self.to_rows(rotation), kv, spec))

    def write_latent_kv(self, compressed, query_weight, latent_weight, eps: float, rotation: Rotation, kv):
        """As ``View.write_latent_kv``, of Q tokens."""
        in_rows = self.to_rows(compressed), query_weight, latent_weight, eps, self.to_rows(rotation), kv
        q, kv = self.rows.write_latent_kv(*in_rows)
        return self.from_rows(q), kv

    def attend_latents(self, q, kv, rank: int, scale: float) -> jax.Array:
        """As ``View.attend_latents``, of Q tokens."""
        return self.from_rows(self.rows.attend_latents(self.to_rows(q), kv, rank, scale))
