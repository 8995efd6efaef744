"""A tiny language model that is a lookup table, and reads its own history back from the pages of the cache.

The distribution of a token depends on the two tokens before it and on the parity of the sum of all tokens before those,
so any slot that a rollback, a catch-up or a page boundary gets wrong shows in the text or in the acceptance."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.cache_pools import CacheShape
from jspec.models.ragged_view import RaggedView
from jspec.pallas.attention.paged import gather_pages

V = 4
CONTEXTS = 2 * (V + 1) * V
LOGITS = "float32"  # as models store them, pytest --logits; bfloat16 holds the multiples of 1/2 in tables as well


def stored(table) -> jax.Array:
    """A table of logits, as a model has it."""
    return jnp.asarray(table, LOGITS)


def context(history: tuple[int, ...]) -> int:
    """Row of the table after these tokens, at least one; the token before the first one is V."""
    previous = history[-2] if len(history) > 1 else V
    return (sum(history[:-2]) % 2 * (V + 1) + previous) * V + history[-1]


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """What a drafter asks of a model's configuration."""

    max_position: int
    vocab_size: int = V
    eos_token_ids: tuple[int, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableModel:
    """A stand-in for ``jspec.models.decoder.Decoder``.

    Attributes:
      table: logits ``[CONTEXTS, V]``, or narrower for a draft that lacks the last tokens.
      config: how many positions the model has.
      draft_ids, draft_tokens: of a draft that has logits for these tokens alone, as a prepared ``Decoder`` has them.
    """

    table: jax.Array
    config: TableConfig = dataclasses.field(metadata={"static": True})
    draft_ids: jax.Array | None = None
    draft_tokens: jax.Array | None = None

    def __call__(self, tokens, positions, cache, view):
        """Write the token ids as keys and values; the hidden state ``[B, T, 1]`` is the row of the table."""
        if isinstance(view, RaggedView):
            hidden, cache = self(view.to_rows(tokens), view.rows.positions, cache, view.rows)
            return view.from_rows(hidden), cache
        (kv,) = cache
        ids = tokens[:, :, None, None].astype(jnp.float32)
        kv = view.write(kv, ids, ids)
        keys, values = (gather_pages(pool, view.table)[0, :, :, 0].astype(jnp.int32) for pool in (kv.k, kv.v))  # [B, S]

        def read(slots, back):
            return jnp.take_along_axis(slots, jnp.maximum(positions - back, 0), axis=1)

        slot = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None]
        older = jnp.where(slot < positions[:, :, None] - 1, keys[:, None], 0).sum(axis=-1) % 2
        previous = jnp.where(positions > 0, read(values, 1), V)
        row = (older * (V + 1) + previous) * V + read(keys, 0)
        return row[:, :, None].astype(jnp.float32), (kv,)

    def logits(self, hidden):
        return self.table[hidden[..., 0].astype(jnp.int32)]

    def cache_shape(self):
        return (CacheShape(1, 1),)


def random_tables(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a target and of a draft that knows something of it, ``[CONTEXTS, V]``, in multiples of 1/2."""
    target, noise = np.random.default_rng(seed).normal(size=(2, CONTEXTS, V))
    halves = lambda x: np.round(2 * x).astype(np.float32) / 2  # noqa: E731
    return halves(1.2 * target), halves(target + 0.7 * noise)


TABLES = random_tables(0)
