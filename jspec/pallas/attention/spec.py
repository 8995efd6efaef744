"""The arguments that all attention functions share: query tokens in pages, and how they attend."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec._validation import require
from jspec.config.tree import MAX_NODES


class TreeMask(NamedTuple):
    """Which slots query tokens see that belong to a tree and no chain. From a row's root slot on, each slot holds a token of
    the tree, of this pass or of one before it; parents come before their children. Windows are larger than a tree is deep.

    Attributes:
      positions: int32 ``[B, T]``, the place in the text of each query token, by which windows count: the root's slot, and
        the token's depth more.
      ancestors: uint32 ``[B, T, W]``, in which bit j % 32 of word j // 32 says whether the token sees slot root + j: those
        of its ancestors, and its own. W is as small as T allows if the root is query token 0, and else two.
      root: int32 ``[B]``, the slot of each row's root.
    """

    positions: jax.Array
    ancestors: jax.Array
    root: jax.Array


def sees_in_tree(distance, words) -> jax.Array:
    """Whether queries see slots at an int32 ``distance`` behind that of a tree's root: those before it, and their ancestors.
    ``words``, one or two, are those of ``TreeMask.ancestors``, and broadcast with it. It works in kernels and outside."""
    word = words[0] if len(words) == 1 else jnp.where(distance < 32, *words)
    return (distance < 0) | ((word >> (distance & 31).astype(jnp.uint32)) & jnp.uint32(1) != 0)


class PagedQueries(NamedTuple):
    """T query tokens in each of B rows, and the pages of the KV cache that hold the rows' texts.

    A query token sees its own slot and those before it; in a tree, those before the root's, and those of its ancestors.
    The slots past a row's newest valid query token may hold anything, NaN included.

    Attributes:
      table: int32 ``[B, M]``, the pages of each row in the order of its text. Past the newest valid query token it may
        hold anything.
      positions: int32 ``[B, T]``, the slot of each query token, which is on the table if the query token is valid.
      valid: bool ``[B, T]``. Nothing is written of an invalid query token, and its attention is arbitrary.
      tree: None if the tokens are a chain. Those of a tree have one slot after another, and the valid ones come first.
    """

    table: jax.Array
    positions: jax.Array
    valid: jax.Array
    tree: TreeMask | None = None

    @property
    def most_new_slots(self) -> int:
        """How many slots behind a row's text the query tokens see at most."""
        T = self.positions.shape[1]
        began_before = self.tree is not None and self.tree.ancestors.shape[-1] > -(-T // 32)
        return MAX_NODES if began_before else T

    def require_tree(self, supported: bool = True):
        """Raise a ValueError if the tokens are a tree that is too large or not ``supported``."""
        if self.tree is not None:
            (_, T), W = self.positions.shape, self.tree.ancestors.shape[-1]
            require(supported, "tree", "TreeMask", "None: this layer takes chains of tokens")
            fits = T <= MAX_NODES and W in (1, 2)
            require(fits, "tree", f"{T} tokens in {W} words", f"at most {MAX_NODES} tokens, in one or two words")

    def last_slots(self, page_size: int) -> jax.Array:
        """The last slot that each query token sees, int32 ``[B, T]``; -1 if it is invalid or has no page."""
        return jnp.where(self.valid & (self.positions < self.table.shape[1] * page_size), self.positions, -1)

    def written_slots(self, page_size: int) -> jax.Array:
        """The slot into which keys and values of each token are written, int32 ``[B, T]``; -1 if there is none."""
        return jnp.where(self.positions >= 0, self.last_slots(page_size), -1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Which slots a query token sees, and how products of queries and keys become the scores of a softmax.

    The sinks are traced. The other fields are part of the tree's structure, so layers that differ in none of them share
    one trace.

    Attributes:
      window: None, or W: a query token sees W slots, its own included.
      scale: the factor of a product; None is ``H ** -0.5``.
      softcap: c if the scaled product s becomes ``c tanh(s / c)`` (Gemma 2, 2024), or None.
      sinks: ``[N]``, or None. The sink of an attention head is one more score, neither scaled nor capped, in the softmax
        of each of its queries, like that of a key which every query sees and whose value is 0. The weights of the keys
        therefore add up to less than 1 (gpt-oss, 2025).
    """

    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    scale: float | None = dataclasses.field(default=None, metadata={"static": True})
    softcap: float | None = dataclasses.field(default=None, metadata={"static": True})
    sinks: jax.Array | None = None

    def scores(self, products, H: int, unit: float = 1.0, key_scale=None):
        """The scores of products in fp32, as multiples of ``1 / unit``. ``key_scale`` is that of keys in eight bits, of a
        shape which broadcasts to that of the products."""
        scores, unit = self.scores_and_unit(products, H, unit, key_scale)
        return scores * unit

    def scores_and_unit(self, products, H: int, unit: float, key_scale=None) -> tuple[jax.Array, Any]:
        """``scores`` before their last factor, and that factor, which is one for all keys: kernels multiply by it where
        they subtract the largest score, and want scores in bits, ``unit = log2(e)``."""
        scale: Any = H**-0.5 if self.scale is None else self.scale
        if key_scale is not None and jnp.ndim(key_scale):
            products = products * key_scale
        elif key_scale is not None:
            scale = key_scale * scale
        if self.softcap is None:
            return products, scale * unit
        return jnp.tanh(products * (scale / self.softcap)), self.softcap * unit


class RaggedLayout(NamedTuple):
    """Where the query tokens of B rows lie in a ragged view of Q tokens: the valid ones of each row behind those of the
    row before.

    Attributes:
      start: int32 ``[B + 1]``, the place of each row's first token, and behind them how many tokens there are.
      source: int32 ``[Q]``, which token of a row each of the Q is: t of row b is ``b T + t``. Anything for padding.
    """

    start: Any
    source: Any

    def from_rows(self, x) -> jax.Array:
        """Values of tokens of rows, ``[B, T, ...]``, as those of the Q tokens, ``[1, Q, ...]``."""
        return jnp.take(x.reshape(-1, *x.shape[2:]), self.source, axis=0, mode="clip")[None]
