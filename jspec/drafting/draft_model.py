"""A smaller language model as drafter, in K passes of one token each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Prompt, Setup
from jspec.drafting.drawing import Drawing, Drawn
from jspec.drafting.recurrent import Reading, RecurrentDraft
from jspec.models.cache_pools import has_states, init_pool
from jspec.models.kv_cache import PagedView
from jspec.models.protocols import LanguageModel
from jspec.sampling.draft_vocabulary import DraftVocabulary

COMMITTED = 2  # tokens that the first pass of a round reads at most


@dataclasses.dataclass(frozen=True)
class DraftModel(Drawn):
    """A causal language model (Leviathan et al., 2023; Chen et al., 2023) that proposes tokens.

    The first pass of a round reads the two newest committed tokens. If the last round accepted all K drafts, the draft
    model has not read the last of them yet, because no draft followed it. In any other round the first of the two tokens
    is read a second time, which rewrites its keys and values with the same numbers.

    A recurrent state must read no token twice, and no rejected draft at all. ``jspec.drafting.recurrent`` says how a draft
    model that has such states reads.

    Attributes:
      model: the draft model.
      vocab_size: V of the target. Logits of the draft model past it are dropped. If the draft model has fewer, the
        remaining tokens are never drafted.
      speculation: K, and how drafts are drawn.
    """

    model: LanguageModel
    vocab_size: int
    speculation: Speculation

    aux_layers = None
    slots_beyond = 0
    method = "draft_model"

    @classmethod
    def build(cls, setup: Setup):
        return cls(setup.draft, setup.target_config.vocab_size, setup.speculation)

    @property
    def longest_text(self) -> int:
        return self.model.config.max_position  # the first draft of a round needs the position of the newest token

    def init(self, pages: int, page_size: int, dtype, num_rows: int):
        shapes = self.model.cache_shape()
        if has_states(shapes):
            return RecurrentDraft.init(shapes, pages, page_size, num_rows, self.num_draft_tokens + 1, dtype)
        return init_pool(shapes, pages, page_size, dtype)

    def prefill(self, state, prompt: Prompt):
        view, text = prompt.view_before(self.model.config.max_position), prompt.text
        if not isinstance(state, RecurrentDraft):
            return self.model(prompt.tokens, view.positions, state, view)[1]
        if text is None:
            return state.prefill(self.model, prompt.tokens, view)
        end = self._end(text.length - 1, jnp.any(view.valid, axis=1))
        return state.catch_up(self.model, text, view.table, end, prompt.tokens.shape[1])

    def _end(self, length, live) -> jax.Array:
        """The position behind the last of so many tokens that the draft model reads; 0 in rows that are not live."""
        return jnp.where(live, jnp.minimum(length, self.model.config.max_position), 0)

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary; None if the draft model has logits for all of its tokens."""
        vocabulary = DraftVocabulary.of(self.model)
        return None if vocabulary is None else vocabulary.within(self.vocab_size)

    def drawing(self, context: Context) -> Drawing:
        return Drawing(self.speculation, context, self.method, self.vocabulary)

    def logits(self, hidden):
        """Logits of drafts over the draft vocabulary, ``[..., D] -> [..., Vd]``. No token past V is drafted."""
        logits, vocabulary = self.model.logits(hidden), self.vocabulary
        if vocabulary is None:
            return logits[..., : self.vocab_size]
        if self.model.config.vocab_size <= self.vocab_size:
            return logits
        known = (vocabulary.tokens < self.vocab_size).reshape((1,) * (logits.ndim - 1) + (-1,))
        return jnp.where(known, logits, -jnp.inf)

    def propose(self, state, context: Context):
        # Draft i is drawn by the pass that reads position length - 1 + i, so the draft model must have that position.
        room = context.room_within(self.model.config.max_position - context.length + 1)

        # A row without room for drafts reads as well, because its pages may serve a later prompt.
        hidden, cache, reading = self._read_committed(state, context)
        if reading is not None:  # a row that has more to read does that in this round and the next ones
            room = jnp.where(reading.folded + reading.num_read == context.length, room, 0)

        def next_pass(cache, token, i):
            positions, reads = context.length[:, None] - 1 + i, i < room
            rows = None if reading is None else reading.append(i, reads)
            view = PagedView(context.table, positions, reads[:, None], recurrent=rows)
            hidden, cache = self.model(token, positions, cache, view)
            return cache, self.logits(hidden)

        cache, proposal = self.drawing(context).chain(self.logits(hidden), cache, next_pass, room)
        if reading is None:
            return cache, proposal
        return RecurrentDraft(cache, state.rows.advanced(reading, reading.pending(proposal.tokens, room))), proposal

    def _read_committed(self, state, context: Context) -> tuple[jax.Array, Any, Reading | None]:
        """The first pass of a round: the hidden state of each row's newest token ``[B, 1, D]``, the cache, and what a draft
        model with recurrent states has read."""
        if isinstance(state, RecurrentDraft):
            end = self._end(context.length, context.live)
            hidden, cache, reading = state.read(self.model, context.text, context.table, end, COMMITTED)
            return reading.newest(hidden), cache, reading
        positions = context.length[:, None] + jnp.arange(-COMMITTED, 0, dtype=jnp.int32)[None]
        valid = context.live[:, None] & (positions >= 0) & (positions < self.model.config.max_position)
        view = PagedView(context.table, positions, valid)
        hidden, cache = self.model(context.tokens_at(positions), positions, state, view)
        return hidden[:, -1:], cache, None
