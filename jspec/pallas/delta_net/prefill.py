"""Prefill of a gated delta net: the recurrence over segments of prompts."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.pallas.delta_net.chunked import chunked, mask_invalid
from jspec.pallas.delta_net.state import DeltaState, PrefillRows, per_row, written_row


def prefill(state: DeltaState, rows: PrefillRows, q, k, v, g, beta) -> tuple[jax.Array, DeltaState]:
    """Outputs of a segment of each row's prompt, and the state with S behind its valid tokens.

    A row has nothing pending behind a segment: ``accepted`` of its first verify pass is 0.

    Args:
      state: of the layer; its columns belong to ``convolve_prefill`` and stay as they are.
      rows: of the pass.
      q, k: ``[B, T, Nk, Dk]``, as the convolution gives them: not normed.
      v: ``[B, T, Nv, Dv]``.
      g, beta: float32 ``[B, T, Nv]``.

    Returns:
      outputs ``[B, T, Nv, Dv]`` in the dtype of v, which are 0 for tokens that are not valid, and the state.
    """
    Bs = state.S.shape[0]
    S = jnp.where(per_row(rows.fresh, state.S), 0.0, state.S[jnp.clip(rows.row, 0, Bs - 1)])
    o, S = chunked(*mask_invalid(rows.tokens, q, k, v, g, beta), S)
    written = written_row(rows, Bs)
    return o.astype(v.dtype), dataclasses.replace(state, S=state.S.at[written].set(S, mode="drop"))
