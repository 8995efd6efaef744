"""How a draft of a block depends on those before it: the interface of Markov heads, candidate selectors, Domino, LiLiCorr.

The slots of a block are computed in one pass, which sees no draft. ``start(slots)`` of such a part gives a state and a
function ``read(state, previous, i) -> (state, logits [B, 1, Vd])``, in which ``previous``, int32 ``[B, 1]``, is draft i - 1,
or the anchor for i = 0; it is called for i = 0, 1, .. in this order. Draft i is drawn from the softmax of these logits /
temperature, so its distribution is known exactly."""

from collections.abc import Callable
from typing import NamedTuple

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


def only_among(tokens, scores, vocab_size: int) -> jax.Array:
    """Logits ``[B, 1, V]`` of candidates: their scores ``[B, 1, k]`` at int32 tokens ``[B, 1, k]``, -inf elsewhere."""
    row = jnp.arange(len(tokens), dtype=jnp.int32)[:, None]
    none = jnp.full((len(tokens), vocab_size), -jnp.inf, scores.dtype)
    return none.at[row, tokens[:, 0]].set(scores[:, 0])[:, None]
