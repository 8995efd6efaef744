"""The forward pass over entire texts, without a cache."""

import jax
import jax.numpy as jnp

from jspec.models.cache_pools import without_slots
from jspec.models.kv_cache import CausalView
from jspec.models.protocols import LanguageModel


def causal_logits(model: LanguageModel, tokens) -> jax.Array:
    """The logits ``[B, T, V]`` of the token after each of the int32 tokens ``[B, T]``, in the model's dtype."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    hidden, _ = model(tokens, positions, without_slots(model.cache_shape()), CausalView(positions))
    return model.logits(hidden)
