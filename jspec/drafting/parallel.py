"""Parallel drafting: K tokens in one pass.

The pass reads the real slots and K - 1 mask slots after them. Draft 0 is drawn after the last real slot, draft i after
mask slot i - 1. The drafts of a pass are independent: the distribution of draft i does not depend on earlier drafts.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.drafting.base import Context, Setup
from jspec.drafting.draft_model import DraftModel
from jspec.drafting.eagle import Eagle
from jspec.drafting.window import make_window
from jspec.models.protocols import MaskedHead


@dataclasses.dataclass(frozen=True)
class ParallelHead(Eagle):
    """A P-EAGLE draft head (2026): an EAGLE-3 draft head with mask slots, which read a learnt feature and a mask token."""

    head: MaskedHead

    def propose(self, state, context: Context):
        K, newest, head = self.num_draft_tokens, context.length - 2, self.head
        room = jnp.where(newest >= 0, context.room_within(self.max_position - newest), 0)

        window = make_window(context, context.previous - 1, newest + 1, K, K - 1, self.max_position)
        masks = window.masks
        assert head.config.mask_token_id is not None
        tokens = jnp.where(masks, head.config.mask_token_id, context.tokens_at(window.positions + 1))
        features = jnp.pad(head.fuse(context.features), ((0, 0), (0, K - 1), (0, 0)))
        features = jnp.where(masks[:, :, None], head.mask_feature[...].reshape(1, 1, -1), features)
        embedded = head.embed(tokens, self.target)
        hidden, cache = head(embedded, features, window.positions, state, window.view(context))

        logits = head.logits(window.after_newest(hidden, K), self.target)
        return cache, self.drawing(context).at_once(logits, room)


@dataclasses.dataclass(frozen=True)
class ParallelModel(DraftModel):
    """A PARD model (An et al., 2025): a language model whose mask slots read a mask token.

    Attributes:
      mask_token_id: the token that mask slots read. The other attributes are those of ``DraftModel``.
    """

    mask_token_id: int

    method = "parallel"

    @classmethod
    def build(cls, setup: Setup):
        config: Any = setup.config
        return cls(setup.draft, setup.target_config.vocab_size, setup.speculation, config.mask_token_id)

    def propose(self, state, context: Context):
        K, max_position = self.num_draft_tokens, self.model.config.max_position
        # Draft i is drawn after slot length - 1 + i, so the model must have that position.
        room = context.room_within(max_position - context.length + 1)

        window = make_window(context, context.previous, context.length, K, K - 1, max_position)
        tokens = jnp.where(window.masks, self.mask_token_id, context.tokens_at(window.positions))
        hidden, cache = self.model(tokens, window.positions, state, window.view(context))

        return cache, self.drawing(context).at_once(self.logits(window.after_newest(hidden, K)), room)
