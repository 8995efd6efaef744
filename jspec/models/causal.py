"""The plain forward: a whole text in one causal pass, nothing cached."""

import jax
import jax.numpy as jnp

from jspec.models.cache import CausalView
from jspec.models.contract import LanguageModel


def causal_logits(model: LanguageModel, tokens) -> jax.Array:
    """Logits after each token, ``[B, T, V]`` in the model's dtype, of int32 tokens ``[B, T]``."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    hidden, _ = model(tokens, positions, (None,) * model.config.num_layers, CausalView(positions))
    return model.logits(hidden)
