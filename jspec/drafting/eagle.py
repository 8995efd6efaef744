"""Drafting with an EAGLE or EAGLE-3 head: a window of real features, then K - 1 passes over the head's own outputs."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Prompt, Setup
from jspec.drafting.drawing import Drawing
from jspec.drafting.window import make_window
from jspec.models.cache import PagedView, init_pool
from jspec.models.contract import DraftHead, Target


@dataclasses.dataclass(frozen=True)
class Eagle:
    """A head that reads (feature i, token i + 1) in slot i (Li et al., 2024 and 2025).

    The window of a round holds the slots of the last round's tokens, whose features the target has computed by now:
    they replace entries that were made from the head's own outputs. The newest token has no feature yet, so a prompt of
    one token drafts nothing in its first round.

    Attributes:
      head: an ``EagleHead`` or ``Eagle3Head``.
      target: the model that it drafts for, whose embedding and output head it may borrow.
      aux_layers: the target's streams that a feature is made of.
      speculation: K and how tokens are drawn.
    """

    head: DraftHead
    target: Target
    aux_layers: tuple[int, ...]
    speculation: Speculation

    @classmethod
    def build(cls, setup: Setup):
        config: Any = setup.config
        aux_layers = config.resolved_aux_layers(setup.target_config)
        return cls(setup.draft, setup.target, aux_layers, setup.speculation)

    @property
    def num_draft_tokens(self) -> int:
        return self.speculation.most_draft_tokens

    @property
    def max_position(self) -> int:
        return self.head.config.layers.max_position

    @property
    def longest_text(self) -> int:
        return self.max_position + 1  # the first draft is drawn after the last token but one

    def init(self, pages: int, page_size: int, dtype):
        return init_pool(self.head.cache_shape(), pages, page_size, dtype)

    def prefill(self, state, prompt: Prompt):
        view = prompt.view
        view = dataclasses.replace(view, valid=view.valid & (view.positions < self.max_position))
        embedded, features = self.head.embed(prompt.following, self.target), self.head.fuse(prompt.features)
        return self.head(embedded, features, view.positions, state, view)[1]

    def propose(self, state, context: Context):
        drawing = Drawing(self.speculation, context, self.head.config.method)
        newest = context.length - 2  # the last slot with a feature
        # Draft i is drawn after slot newest + i, which must be one the head has.
        room = jnp.where(newest >= 0, context.room_within(self.max_position - newest), 0)

        window = make_window(context, context.previous - 1, newest + 1, self.num_draft_tokens, 0, self.max_position)
        embedded = self.head.embed(context.tokens_at(window.positions + 1), self.target)
        features = self.head.fuse(context.features)
        hidden, cache = self.head(embedded, features, window.positions, state, window.view(context))
        hidden = window.after_newest(hidden, 1)

        def next_pass(carry, token, i):
            hidden, cache = carry
            positions = newest[:, None] + i
            view = PagedView(context.table, positions, (i < room)[:, None])
            embedded = self.head.embed(token, self.target)
            hidden, cache = self.head(embedded, self.head.recycle(hidden), positions, cache, view)
            return (hidden, cache), self.head.logits(hidden, self.target)

        logits = self.head.logits(hidden, self.target)
        (_, cache), proposal = drawing.chain(logits, (hidden, cache), next_pass, room)
        return cache, proposal
