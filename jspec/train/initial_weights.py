"""The weights that a new draft head starts from, and the draft vocabulary that it is trained for."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.protocols import Target
from jspec.train.loop import Params


class FullVocabulary:
    """For objectives of a head that can draft every token, and whose weights all start at random."""

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        del params, target, tokens, key
        return {}, {}

    def known(self, constants: Mapping[str, jax.Array]) -> jax.Array | None:
        del constants


class DraftVocabulary:
    """For objectives of a head that may draft only a part of the target's vocabulary.

    The norm before its output head, and that head unless it is the target's own, start as copies of the target's.
    """

    config: Any

    def start(self, params: Params, target: Target, tokens: np.ndarray, key: jax.Array) -> tuple[dict, dict]:
        del params, key
        config, rows, constants = self.config, slice(None), {}
        start: dict[str, Any] = {"norm.weight": target.output_norm}
        if config.reduced:
            draft_ids = frequent_tokens(tokens, config.layers.vocab_size, config.draft_vocab_size)
            constants["draft_ids"], rows = jnp.asarray(draft_ids), np.flatnonzero(draft_ids >= 0)
        if config.own_head:
            start["head.weight"] = output_head_of(target)[rows]
        return start, constants

    def known(self, constants: Mapping[str, jax.Array]) -> jax.Array | None:
        if not self.config.reduced:
            return None
        return jnp.nonzero(constants["draft_ids"] >= 0, size=self.config.draft_vocab_size)[0]


def output_head_of(target: Target) -> jax.Array | np.ndarray:
    """The target's output head as the start of a head's own, float32 ``[V, D]``; a divisor of logits is part of it.

    The parts of a target in shards are put together in host memory, because one device may not have room for all of them.

    Raises:
      ValueError: the target's output head does not read its hidden states, but a linear map of them.
    """
    config = target.config
    if config.embedding_size is not None:
        raise ValueError(
            f"the target's output head reads {config.embedding_size} numbers and its hidden states have "
            f"{config.hidden_size}; expected a target without embedding_size for a head that has an output head"
        )
    weight = target.output_weight
    if getattr(target, "shards", None) is not None:  # behind the last token is padding
        weight = jax.tree.map(np.asarray, weight)[: config.vocab_size]
    return weight.dequantize() / config.logit_divisor


def frequent_tokens(tokens: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """The draft vocabulary of the ``count`` most frequent tokens, int32 ``[V]``.

    The entry of a token is its id in the draft vocabulary, or -1 if it is not in there. Draft ids follow the order of the
    token ids: if tokens 3 and 7 of 8 are the most frequent, the result is ``[-1, -1, -1, 0, -1, -1, -1, 1]``.
    """
    frequency = np.bincount(tokens, minlength=vocab_size)
    chosen = np.sort(np.argsort(-frequency, kind="stable")[:count])
    draft_ids = np.full(vocab_size, -1, np.int32)
    draft_ids[chosen] = np.arange(count, dtype=np.int32)
    return draft_ids
