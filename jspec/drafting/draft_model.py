"""Drafting with a smaller language model of the target's vocabulary: K passes, one token each."""

import dataclasses

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Prompt, Setup
from jspec.drafting.drawing import Drawing
from jspec.models.cache import PagedView, init_pool
from jspec.models.contract import LanguageModel


@dataclasses.dataclass(frozen=True)
class DraftModel:
    """A causal language model that proposes tokens.

    The first pass of a round reads the two newest committed tokens: after a round that accepted everything, the last
    draft has not been read yet. Reading a token again rewrites its keys and values with the same numbers.

    Attributes:
      model: a ``Decoder`` or its like.
      vocab_size: V of the target. A wider draft vocabulary is cut to it, a narrower one gives no mass past its end.
      speculation: K and how tokens are drawn.
    """

    model: LanguageModel
    vocab_size: int
    speculation: Speculation

    aux_layers = None

    @classmethod
    def build(cls, setup: Setup):
        return cls(setup.draft, setup.target_config.vocab_size, setup.speculation)

    @property
    def num_draft_tokens(self) -> int:
        return self.speculation.most_draft_tokens

    @property
    def longest_text(self) -> int:
        return self.model.config.max_position  # the first draft is drawn after the last token

    def init(self, pages: int, page_size: int, dtype):
        return init_pool(self.model.cache_shape(), pages, page_size, dtype)

    def prefill(self, state, prompt: Prompt):
        # Positions that the draft model does not have are left out.
        view = prompt.view
        view = dataclasses.replace(view, valid=view.valid & (view.positions < self.model.config.max_position))
        return self.model(prompt.tokens, view.positions, state, view)[1]

    def propose(self, state, context: Context):
        drawing = Drawing(self.speculation, context, "draft_model")
        # The pass that draws d_i reads position length - 1 + i, which must be one the draft model has.
        room = context.room_within(self.model.config.max_position - context.length + 1)

        def read(cache, tokens, positions, valid):
            hidden, cache = self.model(tokens, positions, cache, PagedView(context.table, positions, valid))
            return cache, self.model.logits(hidden[:, -1:])[..., : self.vocab_size]

        def next_pass(cache, token, i):
            return read(cache, token, context.length[:, None] - 1 + i, (i < room)[:, None])

        positions = context.length[:, None] + jnp.arange(-2, 0, dtype=jnp.int32)[None]
        cache, logits = read(state, context.tokens_at(positions), positions, (positions >= 0) & (room > 0)[:, None])
        return drawing.chain(logits, cache, next_pass, room)
