"""How a draft of a block depends on those before it: one interface of Markov heads, candidate selectors, Domino and LiLiCorr.

The slots of a block are computed in one pass, which sees no draft. A ``Sequential`` then gives the logits of draft i after
the drafts before it, one after another:

    state, read = head.sequential.start(slots)
    state, logits = read(state, anchor, 0)          # of draft 0, [B, 1, Vd]
    state, logits = read(state, drafts[:, :1], 1)   # of draft 1, after draft 0

Drafts are drawn from the softmax of these logits / temperature, so their distribution is known exactly."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp


class Slots(NamedTuple):
    """What a pass leaves of the n slots of a block that draft.

    Attributes:
      hidden: ``[B, n, D]``, after the final norm.
      logits: ``[B, n, Vd]``, by the output head.
      known: bool ``[B, n]``, which slots have a place in the text.
      context: ``[B, 1, D]``, the fused feature of the token before the anchor.
      embed: the embeddings ``[B, T, D]`` of int32 tokens ``[B, T]``.
    """

    hidden: jax.Array
    logits: jax.Array
    known: jax.Array
    context: jax.Array
    embed: Callable[[jax.Array], jax.Array]


class Sequential(Protocol):
    """Gives the logits of each draft by the drafts before it.

    Example::

        def after_anchor(sequential: Sequential, slots: Slots, anchor):
            state, read = sequential.start(slots)
            return read(state, anchor, 0)[1]
    """

    def start(self, slots: Slots) -> tuple[Any, Callable[[Any, jax.Array, int], tuple[Any, jax.Array]]]:
        """The state before draft 0, and a function ``(state, previous, i) -> (state, logits)``.

        ``previous``, int32 ``[B, 1]``, is draft i - 1, or the anchor for i = 0. The logits ``[B, 1, Vd]`` are those of
        draft i. A function is called for i = 0, 1, .. in this order."""
        ...


def only_among(tokens, scores, vocab_size: int) -> jax.Array:
    """Logits ``[B, 1, V]`` of candidates: their scores ``[B, 1, k]`` at int32 tokens ``[B, 1, k]``, -inf elsewhere."""
    row = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    none = jnp.full((len(tokens), vocab_size), -jnp.inf, scores.dtype)
    return none.at[row, tokens[:, 0]].set(scores[:, 0])[:, None]
