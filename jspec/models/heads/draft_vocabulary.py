"""A draft vocabulary of Vd of the target's V tokens: ``draft_ids``, int32 ``[V]``, and its inverse.

The entry of a token is its index in the draft vocabulary, or -1 if it is not in there. The logits of a module with
``draft_ids`` are over the draft vocabulary, ``[..., Vd]``. Once prepared, a module has the inverse, too:
``draft_tokens``, int32 ``[Vd]``, the token of each index."""

import jax
import jax.numpy as jnp
from flax import nnx

from jspec.models.flatten import copied


def rows_of_target(head, hidden, target):
    """Logits ``[..., Vd]`` of hidden states ``[..., D]`` by ``head``, a copy of a part of the target's output head. The
    target divides or caps them as it does its own."""
    return target.scaled_logits(head(target.before_head(hidden)))


def placeholder_ids(config) -> nnx.Param | None:
    """``draft_ids`` of the first Vd tokens, until a checkpoint or the training data choose the tokens; None of a module that
    can propose every token."""
    if not config.reduced:
        return None
    ids = jnp.arange(config.dimensions["V"], dtype=jnp.int32)
    return nnx.Param(jnp.where(ids < config.dimensions["Vd"], ids, -1))


def tokens_of(draft_ids, size: int):
    """The token of each of the Vd = ``size`` indices, int32 ``[Vd]``: the inverse of ``draft_ids``."""
    place = jnp.where(draft_ids >= 0, draft_ids, size)
    tokens = jnp.arange(draft_ids.shape[0], dtype=jnp.int32)
    return jnp.zeros(size, jnp.int32).at[place].set(tokens, mode="drop")


def with_draft_tokens(module):
    """A copy of the module of a drafter that is ready to draft: its parameter ``draft_tokens`` is
    ``tokens_of(draft_ids)``. The module itself if it has logits for all tokens."""
    if module.draft_ids is None:
        return module
    # As one program, which may run on the devices of several processes.
    tokens = jax.jit(tokens_of, static_argnums=1)(module.draft_ids[...], module.config.dimensions["Vd"])
    module = copied(module)
    module.draft_tokens = nnx.data(nnx.Param(tokens))
    return module
