"""What a layer does with its projections: convolution and recurrence, over the rows of a pass or over whole texts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas.delta_net.convolution import convolve_prefill, convolve_verify
from jspec.pallas.delta_net.prefill import prefill
from jspec.pallas.delta_net.projections import DeltaHeads
from jspec.pallas.delta_net.state import DeltaState, PrefillRows, VerifyRows, init_state
from jspec.pallas.delta_net.verify import verify
from jspec.pallas.dispatch import KernelRow

Rows = VerifyRows | PrefillRows


class DeltaInputs(NamedTuple):
    """What the recurrence of a layer reads of T tokens.

    Attributes:
      qkv: ``[B, T, Cc or more]``, queries, keys and values before the convolution, and anything behind them.
      g: float32 ``[B, T, Nv]``, the logarithms of decays.
      beta: float32 ``[B, T, Nv]``.
      convolution: ``[W, Cc]``, the weights of the convolution.
      heads: the number and the sizes of heads.
    """

    qkv: jax.Array
    g: jax.Array
    beta: jax.Array
    convolution: jax.Array
    heads: DeltaHeads


def recur(inputs: DeltaInputs, state: DeltaState, rows: Rows) -> tuple[jax.Array, DeltaState]:
    """Outputs ``[B, T, Nv, Dv]`` of the tokens of some rows, in the dtype of ``inputs.qkv``, and the state behind them."""
    if isinstance(rows, PrefillRows):
        qkv, columns = convolve_prefill(state.columns, rows, inputs.qkv, inputs.convolution)
        return prefill(state.with_columns(columns), rows, qkv, inputs.g, inputs.beta)
    if rows.fresh is None:
        rows = dataclasses.replace(rows, fresh=jnp.zeros(rows.row.shape, bool))
    qkv, columns = convolve_verify(state.columns, rows, inputs.qkv, inputs.convolution)
    return verify(state.with_columns(columns), rows, qkv, inputs.g, inputs.beta)


# Chunks of prefill and the tokens of rounds are added to a state in different ways, each in one for any number of tokens. So
# a token of a prompt may have other bits than the same token of an answer.
RECURRENCE = KernelRow("recurrence", recur, lambda *_: iter(()), order="chunks or tokens", cpu_order="chunks or tokens")


def recur_from_zero(inputs: DeltaInputs) -> jax.Array:
    """Outputs ``[B, T, Nv, Dv]`` of whole texts, in the dtype of ``inputs.qkv``."""
    B, T = inputs.qkv.shape[:2]
    state = init_state(B, inputs.heads, len(inputs.convolution), 1, inputs.qkv.dtype)
    rows = PrefillRows(jnp.arange(B, dtype=jnp.int32), jnp.full(B, T, jnp.int32), jnp.full(B, True), jnp.full(B, False))
    return recur(inputs, state, rows)[0]
