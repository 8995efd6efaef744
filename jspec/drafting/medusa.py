"""Medusa heads (Cai et al., 2024) as drafter: one draft from each head, without a tree of candidates."""

import dataclasses

from jspec.drafting.base import Context
from jspec.drafting.drawing import FromNewestFeature
from jspec.models.heads.medusa import Medusa


@dataclasses.dataclass(frozen=True)
class MedusaHeads(FromNewestFeature):
    """Medusa head i predicts the token i + 2 places after the position of the target's newest hidden state.

    All Medusa heads read that hidden state and nothing else, so no draft depends on the drafts before it."""

    head: Medusa

    def propose(self, state, context: Context):
        logits = self.head.logits(context.newest_feature, self.target, self.num_draft_tokens)[:, 0]
        return state, self.drawing(context).at_once(logits, self.room(context))
