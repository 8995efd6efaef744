"""Stop tokens on the device: forbidden before ``min_tokens``, and found in what a round emitted."""

import jax.numpy as jnp


def forbid_early_stops(logits, positions, stop_tokens, min_length):
    """Take stop tokens out of the distribution of every position before ``min_length``.

    Args:
      logits: ``[B, J, V]`` as stored; changed in place under jit, so that every reader sees the same distribution.
      positions: int32 ``[B, J]``, the position of the token that each of the logits decides.
      stop_tokens: int32 ``[B, E]``, padded with -1.
      min_length: int32 ``[B]``, the length that a row must have before a stop token may follow.
    """
    B, J, V = logits.shape
    early = positions < min_length[:, None]  # [B, J]
    ids = jnp.where(early[:, :, None] & (stop_tokens >= 0)[:, None], stop_tokens[:, None], V)  # V: dropped
    row, column = jnp.arange(B)[:, None, None], jnp.arange(J)[None, :, None]
    return logits.at[row, column, ids].set(-jnp.inf, mode="drop")


def first_stop(tokens, stop_tokens):
    """Index of the first stop token in each row, J if there is none: int32 ``[B, J], [B, E] -> [B]``."""
    J = tokens.shape[1]
    is_stop = jnp.any(tokens[:, :, None] == stop_tokens[:, None], axis=-1)  # [B, J]
    return jnp.min(jnp.where(is_stop, jnp.arange(J, dtype=jnp.int32)[None], J), axis=1)
