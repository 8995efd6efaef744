"""A smaller language model as drafter, in K passes of one token each."""

import dataclasses

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Prompt, Setup
from jspec.drafting.drawing import Drawing
from jspec.models.cache_pools import init_pool
from jspec.models.kv_cache import PagedView
from jspec.models.protocols import LanguageModel
from jspec.sampling.draft_vocabulary import DraftVocabulary


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A causal language model (Leviathan et al., 2023; Chen et al., 2023) that proposes tokens.

    The first pass of a round reads the two newest committed tokens. If the last round accepted all K drafts, the draft
    model has not read the last of them yet, because no draft followed it. In any other round the first of the two tokens
    is read a second time, which rewrites its keys and values with the same numbers.

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

    @classmethod
    def build(cls, setup: Setup):
        return cls(setup.draft, setup.target_config.vocab_size, setup.speculation)

    @property
    def num_draft_tokens(self) -> int:
        return self.speculation.most_draft_tokens

    @property
    def longest_text(self) -> int:
        return self.model.config.max_position  # the first draft of a round needs the position of the newest token

    def init(self, pages: int, page_size: int, dtype):
        return init_pool(self.model.cache_shape(), pages, page_size, dtype)

    def prefill(self, state, prompt: Prompt):
        # Tokens at positions that the draft model does not have are not read.
        view = prompt.view
        view = dataclasses.replace(view, valid=view.valid & (view.positions < self.model.config.max_position))
        return self.model(prompt.tokens, view.positions, state, view)[1]

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The draft vocabulary; None if the draft model has logits for all of its tokens."""
        vocabulary = DraftVocabulary.of(self.model)
        return None if vocabulary is None else vocabulary.within(self.vocab_size)

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
        drawing = Drawing(self.speculation, context, "draft_model", self.vocabulary)
        # Draft i is drawn by the pass that reads position length - 1 + i, so the draft model must have that position.
        room = context.room_within(self.model.config.max_position - context.length + 1)

        def read(cache, tokens, positions, valid):
            hidden, cache = self.model(tokens, positions, cache, PagedView(context.table, positions, valid))
            return cache, self.logits(hidden[:, -1:])

        def next_pass(cache, token, i):
            return read(cache, token, context.length[:, None] - 1 + i, (i < room)[:, None])

        # A row without room for drafts reads as well, because its pages may serve a later prompt.
        positions = context.length[:, None] + jnp.arange(-2, 0, dtype=jnp.int32)[None]
        valid = context.live[:, None] & (positions >= 0) & (positions < self.model.config.max_position)
        cache, logits = read(state, context.tokens_at(positions), positions, valid)
        return drawing.chain(logits, cache, next_pass, room)
