"""The draft vocabulary of a drafter that has logits for Vd of the target's V tokens only.

Drafts are drawn from the logits ``[B, J, Vd]``, and a distribution of drafts stays over the draft vocabulary: a
token outside has probability 0 in it. Only operations defined on the target's tokens widen the logits to ``[B, J, V]``.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.pallas.sampling.warped_logits import over_vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftVocabulary:
    """A draft vocabulary of Vd tokens. Logit i of a drafter is that of token ``tokens[i]``, in any order of tokens.

    Attributes:
      ids: int32 ``[V]``, the index of each token of the target in the draft vocabulary, -1 for a token outside of it.
        It may be shorter: tokens past its end are outside, too.
      tokens: int32 ``[Vd]``, the token of each index.
    """

    ids: jax.Array
    tokens: jax.Array

    @staticmethod
    def of(module: Any) -> "DraftVocabulary | None":
        """The draft vocabulary of a draft head or a draft model, once ``prepare`` was called; None if it has all tokens."""
        ids = getattr(module, "draft_ids", None)  # some kinds of drafters have no draft vocabulary
        return None if ids is None else DraftVocabulary(ids[...], module.draft_tokens[...])

    def within(self, vocab_size: int) -> "DraftVocabulary":
        """The same for a target that lacks tokens from ``vocab_size`` on; these stay in ``tokens`` alone."""
        return self if len(self.ids) <= vocab_size else DraftVocabulary(self.ids[:vocab_size], self.tokens)

    def widened(self, logits) -> jax.Array:
        """``[..., Vd] -> [..., V]``, -inf for tokens outside of the draft vocabulary."""
        return over_vocabulary(logits, self.ids)

    def narrowed(self, logits) -> jax.Array:
        """``[..., V] -> [..., Vd]``, the inverse of ``widened``."""
        return jnp.take(logits, self.tokens, axis=-1, mode="clip")

    def indices(self, tokens) -> jax.Array:
        """The index of each token, int32 ``[...] -> [...]``, and -1 outside of the draft vocabulary."""
        return jnp.where(tokens >= 0, self.ids.at[tokens].get(mode="fill", fill_value=-1), -1)
