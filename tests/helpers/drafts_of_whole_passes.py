"""What ``hybrid_draft()`` drafts from, by a pass over the whole text."""

import jax
import jax.numpy as jnp
import numpy as np
from engines import hybrid_draft

from jspec.models.kv_cache import CausalView


@jax.jit
def _log_probs(tokens) -> jax.Array:
    """Of what comes behind every token of texts int32 ``[B, S]``."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    model = hybrid_draft()
    hidden, _ = model(tokens, positions, (None,) * model.config.num_layers, CausalView(positions))
    return jax.nn.log_softmax(model.logits(hidden))


def check_drafts(tokens, length, drafts, count, log_probs):
    """Each row's drafts were drawn, at temperature 1, from the distributions behind its text and the drafts before them.

    Args:
      tokens: int32 ``[B, S]``, texts, and anything behind them.
      length: int32 ``[B]``, of the texts.
      drafts: int32 ``[B, K]``.
      count: int32 ``[B]``, how many drafts of each row are looked at.
      log_probs: ``[B, K, V]``, of what they were drawn from.
    """
    whole = np.zeros((len(tokens), tokens.shape[1] + drafts.shape[1]), np.int32)
    whole[:, : tokens.shape[1]] = tokens
    for b, n in enumerate(length):
        whole[b, n : n + count[b]] = drafts[b, : count[b]]
    wanted = np.asarray(_log_probs(whole))
    for b, n in enumerate(length):
        made, right = log_probs[b, : count[b]], wanted[b, n - 1 : n - 1 + count[b]]
        np.testing.assert_allclose(made, right, rtol=1e-4, atol=1e-4, err_msg=f"behind {n} tokens")
