"""Medusa heads (Cai et al., 2024) as drafter: one draft from each head, without a tree of candidates."""

import dataclasses

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Drawn, Setup, Stateless
from jspec.drafting.drawing import Drawing
from jspec.models.heads.medusa import Medusa
from jspec.models.protocols import Target
from jspec.sampling.draft_vocabulary import DraftVocabulary


@dataclasses.dataclass(frozen=True)
class MedusaHeads(Drawn, Stateless):
    """Medusa head i predicts the token i + 2 places after the position of the target's newest hidden state.

    All Medusa heads read that hidden state and nothing else, so no draft depends on the drafts before it.

    Attributes:
      head: the Medusa heads.
      target: the target, whose output head they may borrow.
      speculation: K, and how drafts are drawn.
    """

    head: Medusa
    target: Target
    speculation: Speculation

    aux_layers = ()

    @classmethod
    def build(cls, setup: Setup):
        return cls(setup.draft, setup.target, setup.speculation)

    def propose(self, state, context: Context):
        drawing = Drawing(self.speculation, context, self.head.config.method, DraftVocabulary.of(self.head))
        logits = self.head.logits(context.newest_feature, self.target, self.num_draft_tokens)[:, 0]
        distribution, tokens = drawing.draw(logits, 0)
        return state, drawing.proposal(distribution, tokens, jnp.where(context.length > 1, context.room, 0))
