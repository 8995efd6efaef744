"""A draft vocabulary of Vd of the target's V tokens, as draft heads have it: ``draft_ids``, int32 ``[V]``.

Its entry of a token is the index of that token in the draft vocabulary, or -1 if it is not in there."""

import jax.numpy as jnp


def over_vocabulary(logits, draft_ids):
    """Logits ``[..., Vd]`` over all tokens, ``[..., V]``: tokens outside the draft vocabulary get -inf, which is probability
    0. Without ``draft_ids`` they are as they were."""
    if draft_ids is None:
        return logits
    ids = draft_ids[...]
    known = (ids >= 0).reshape((1,) * (logits.ndim - 1) + ids.shape)
    return jnp.where(known, jnp.take(logits, jnp.maximum(ids, 0), axis=-1), -jnp.inf)


def rows_of_target(head, hidden, target):
    """Logits ``[..., Vd]`` of hidden states ``[..., D]`` by some rows of the target's output head, which ``head`` is a copy
    of. The target divides or caps them as it does its own."""
    return target.scaled_logits(head(target.before_head(hidden)))


def first_tokens(vocab_size: int, draft_vocab_size: int):
    """``draft_ids`` of the first Vd tokens: a placeholder until a checkpoint or the training data choose the tokens."""
    ids = jnp.arange(vocab_size, dtype=jnp.int32)
    return jnp.where(ids < draft_vocab_size, ids, -1)
