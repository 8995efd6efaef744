"""Recurrent states of a draft model: passes that read committed tokens and drafts, and how far each row is.

A draft model reads one draft after another, before it is known which of them stand, and a recurrent state cannot take a
token back. So the states of a row stay behind a part of the text, and what was read after it is *pending*
(``jspec.pallas.delta_net.state``):

1. The first pass of a round folds those pending tokens into the states that the text turned out to have, and reads the
   committed tokens behind them, which are then pending. These are the newest one, and before it the last draft of the round
   before, if all of them stood: no pass had to read that.
2. Each of the K - 1 other passes reads a draft, which joins the pending tokens. The states stay as they are.

At most K + 1 tokens are pending. For example, a row with 10 committed tokens, whose states have read 9 of them, reads the
10th and, with K = 4, three drafts. If two drafts stand, it has 13 committed tokens. The next round folds the 10th, 11th and
12th, drops the third draft, and reads the 13th.

The pending tokens themselves are kept, and as many of them stand as are equal to the text. So nobody has to tell how a
round ended: whether its drafts were verified at all, gave way to jump-forward tokens, or were followed by plain rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jspec.drafting.base import Text
from jspec.models.cache_pools import LayerKV, LayerShape, init_cache
from jspec.models.kv_cache import PagedView
from jspec.models.protocols import LanguageModel
from jspec.pallas.delta_net.state import DeltaState, PrefillRows, VerifyRows
from jspec.sampling.distribution import leading

NOTHING = -1  # no token


class Reading(NamedTuple):
    """The first pass of a round, from which its other passes go on.

    Attributes:
      row: int32 ``[B]``, the rows of the states; Bs or more where there is none.
      folded: int32 ``[B]``, how many tokens of the text are in the states, since this pass.
      tokens: int32 ``[B, T]``, the tokens behind these that it has read, and ``NOTHING`` behind them.
      num_read: int32 ``[B]``, how many it has read; 0 for a row that sits the round out.
      half: int32 ``[B]``, where the states have what is pending.
    """

    row: jax.Array
    folded: jax.Array
    tokens: jax.Array
    num_read: jax.Array
    half: jax.Array

    def newest(self, hidden) -> jax.Array:
        """The hidden state of the last token that each row has read, ``[B, T, D] -> [B, 1, D]``."""
        return jnp.take_along_axis(hidden, jnp.maximum(self.num_read - 1, 0)[:, None, None], axis=1)

    def append(self, i, reads) -> VerifyRows:
        """Pass i of the round, which reads draft i - 1 in the rows that ``reads``, bool ``[B]``, says."""
        pending = self.num_read + i - 1
        return VerifyRows(self.row, reads.astype(jnp.int32), pending, self.half, fresh=None, append=True)

    def pending(self, drafts, room) -> jax.Array:
        """The pending tokens behind the round, int32 ``[B, T + K - 1]``, and ``NOTHING`` behind them.

        Args:
          drafts: int32 ``[B, K]``. The passes of the round have read all but the last that there was room for.
          room: int32 ``[B]``, for how many drafts there was room.
        """
        index = jnp.arange(self.tokens.shape[1] + drafts.shape[1] - 1, dtype=jnp.int32)[None] - self.num_read[:, None]
        read = jnp.take_along_axis(drafts, jnp.clip(index, 0, drafts.shape[1] - 1), axis=1)
        read = jnp.where((index >= 0) & (index < room[:, None] - 1), read, NOTHING)
        first = jnp.pad(self.tokens, ((0, 0), (0, drafts.shape[1] - 1)), constant_values=NOTHING)
        return jnp.where(index < 0, first, read)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftRows:
    """Which tokens the recurrent states of a draft model have read, of some rows.

    Attributes:
      tokens: int32 ``[B, Tm]``, the pending tokens of each row in their order, and ``NOTHING`` behind them.
      folded: int32 ``[B]``, how many tokens of the row's text come before these, and are in its states. With 0 the states
        begin from zero, whatever another text has left in them.
      half: int32 ``[B]``, 0 or 1, where the states have what belongs to the pending tokens.
    """

    tokens: jax.Array
    folded: jax.Array
    half: jax.Array

    @staticmethod
    def of_admitted(length, most_tokens: int) -> "DraftRows":
        """Of requests whose prompts, of these lengths, have been prefilled: all tokens but the last. ``most_tokens`` is
        Tm."""
        none = jnp.full((len(length), most_tokens), NOTHING, jnp.int32)
        return DraftRows(none, length - 1, jnp.zeros_like(length))

    def begin(self, text: Text, end, most: int) -> tuple[VerifyRows, Reading]:
        """The verify pass that begins a round: it folds those pending tokens that the text has, and reads up to ``most`` of
        the tokens behind them and before position ``end``, int32 ``[B]``.

        The newest token of a text is never folded, so that what comes after it can be drafted a second time."""
        assert text.row is not None
        index = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None]
        positions = self.folded[:, None] + index
        stands = (self.tokens == text.tokens_at(positions)) & (positions < text.length[:, None] - 1)
        accepted = leading(stands)
        folded = self.folded + accepted
        positions = folded[:, None] + index[:, :most]
        tokens = jnp.where(positions < end[:, None], text.tokens_at(positions), NOTHING)
        num_read = jnp.clip(end - folded, 0, most)
        rows = VerifyRows(text.row, num_read, accepted, self.half, folded == 0)
        return rows, Reading(text.row, folded, tokens, num_read, 1 - self.half)

    def advanced(self, reading: Reading, pending) -> "DraftRows":
        """After passes that left these tokens pending, int32 ``[B, Tm or fewer]``. A row that sat out stays as it is."""
        ran, unused = reading.num_read > 0, self.tokens.shape[1] - pending.shape[1]
        pending = jnp.pad(pending, ((0, 0), (0, unused)), constant_values=NOTHING)
        return DraftRows(
            jnp.where(ran[:, None], pending, self.tokens),
            jnp.where(ran, reading.folded, self.folded),
            jnp.where(ran, reading.half, self.half),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentDraft:
    """What a draft model with recurrent states keeps.

    Attributes:
      layers: the pages or the states of each layer. A state has all rows.
      rows: which tokens the states have read, of the rows of a call.
    """

    layers: tuple[LayerKV | DeltaState | None, ...]
    rows: DraftRows

    @staticmethod
    def init(
        shapes: Sequence[LayerShape], pages: int, page_size: int, num_rows: int, most_tokens: int, dtype
    ) -> "RecurrentDraft":
        """Empty; arguments as for ``init_cache``."""
        layers = init_cache(shapes, pages, page_size, num_rows, most_tokens, dtype)
        return RecurrentDraft(layers, DraftRows.of_admitted(jnp.ones(num_rows, jnp.int32), most_tokens))

    def prefill(self, model: LanguageModel, tokens, view: PagedView) -> "RecurrentDraft":
        """After the model has read segments of prompts, int32 ``[B, C]``, of which ``view`` says what is valid."""
        assert isinstance(view.recurrent, PrefillRows)
        rows = replace(view.recurrent, tokens=jnp.sum(view.valid, axis=1, dtype=jnp.int32))
        _, layers = model(tokens, view.positions, self.layers, replace(view, recurrent=rows))
        return replace(self, layers=layers)

    def read(self, model: LanguageModel, text: Text, table, end, most: int):
        """Fold what stands of the pending tokens, and read committed tokens behind it.

        Args:
          model: the draft model.
          text: of the rows.
          table: int32 ``[B, M]``, their pages.
          end: int32 ``[B]``, the position behind the last token to be read. A row that has nothing to read stays as it is.
          most: T, the most tokens to be read, at most Tm.

        Returns:
          hidden states ``[B, T, D]``, the new ``layers``, and the ``Reading``.
        """
        rows, reading = self.rows.begin(text, end, most)
        positions = reading.folded[:, None] + jnp.arange(most, dtype=jnp.int32)[None]
        view = PagedView(table, positions, reading.tokens != NOTHING, recurrent=rows)
        hidden, layers = model(jnp.maximum(reading.tokens, 0), positions, self.layers, view)
        return hidden, layers, reading

    def catch_up(self, model: LanguageModel, text: Text, table, end, slots: int) -> "RecurrentDraft":
        """After the model has read all tokens before ``end``, of which there are at most ``slots`` that it has not read;
        other arguments as for ``read``."""
        state, most = self, self.rows.tokens.shape[1]
        for _ in range(-(-slots // most)):
            _, layers, reading = state.read(model, text, table, end, most)
            state = RecurrentDraft(layers, state.rows.advanced(reading, reading.tokens))
        return state
