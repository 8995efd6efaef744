"""Rows of a target with recurrent states: how far each of them is, from one verify pass to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.pallas.delta_net.state import VerifyRows

FRESH = -1  # as ``RecurrentRows.accepted``


class RecurrentRows(NamedTuple):
    """How the next verify pass begins in each row of a target with recurrent states.

    A verify pass leaves its tokens pending, and the next one folds those into the state that were committed meanwhile
    (``jspec.pallas.delta_net.state``).

    Attributes:
      accepted: int32 ``[B]``, how many tokens of the last verify pass are committed; 0 after prefill, and ``FRESH`` if
        nothing of the text has been read, so that the state begins from zero.
      half: int32 ``[B]``, 0 or 1, where the pending tokens of that pass are.
    """

    accepted: jax.Array
    half: jax.Array

    @staticmethod
    def of_admitted(length) -> "RecurrentRows":
        """Of requests whose prompts, of these lengths, have been prefilled: all tokens but the last."""
        return RecurrentRows(jnp.where(length > 1, 0, FRESH), jnp.zeros_like(length))

    def begin(self, row, tokens) -> VerifyRows:
        """A verify pass of so many tokens of each row, int32 ``[B]``; ``row`` is its place in the states."""
        return VerifyRows(row, tokens, jnp.maximum(self.accepted, 0), self.half, self.accepted == FRESH)

    def advanced(self, tokens) -> "RecurrentRows":
        """After that pass: what it has read is pending, and none of it committed yet."""
        ran = tokens > 0
        return RecurrentRows(jnp.where(ran, 0, self.accepted), jnp.where(ran, 1 - self.half, self.half))

    def commit(self, count, live) -> "RecurrentRows":
        """After a round committed ``count`` tokens, int32 ``[B]``, in the rows that are ``live``, bool ``[B]``.

        The verify pass of that round read the newest token of the text and the drafts behind it. The state may now take
        the first ``count`` of these: the token that was the newest before, and ``count - 1`` accepted drafts. The last
        token that the round committed, which the next pass reads first, is not among them.
        """
        return self._replace(accepted=jnp.where(live, count, self.accepted))
