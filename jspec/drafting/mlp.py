"""An MLP speculator (Wertheimer et al., 2024) as drafter: K small stages after the target's newest hidden state."""

import dataclasses

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Drawn, Setup, Stateless
from jspec.drafting.drawing import Drawing
from jspec.models.heads.mlp_speculator import MLPSpeculator
from jspec.sampling.draft_vocabulary import DraftVocabulary


@dataclasses.dataclass(frozen=True)
class MLP(Drawn, Stateless):
    """An MLP speculator. Stage 0 reads the newest committed token, stage i reads draft i - 1 and makes draft i.

    Attributes:
      head: the MLP speculator.
      speculation: K, and how drafts are drawn.
    """

    head: MLPSpeculator
    speculation: Speculation

    aux_layers = ()

    @classmethod
    def build(cls, setup: Setup):
        return cls(setup.draft, setup.speculation)

    def propose(self, state, context: Context):
        drawing = Drawing(self.speculation, context, self.head.config.method, DraftVocabulary.of(self.head))

        def next_pass(carry, token, i):
            carry = self.head.stage(i, carry, token)
            return carry, self.head.logits(i, carry)

        newest = context.tokens_at(context.length[:, None] - 1)
        carry, logits = next_pass(self.head.start(context.newest_feature), newest, 0)
        room = jnp.where(context.length > 1, context.room, 0)
        _, proposal = drawing.chain(logits, carry, next_pass, room, unroll_all=True)
        return state, proposal
