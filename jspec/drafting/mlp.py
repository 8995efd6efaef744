"""An MLP speculator (Wertheimer et al., 2024) as drafter: K small stages after the target's newest hidden state."""

import dataclasses

from jspec.drafting.base import Context
from jspec.drafting.drawing import FromNewestFeature
from jspec.models.heads.mlp_speculator import MLPSpeculator


@dataclasses.dataclass(frozen=True)
class MLP(FromNewestFeature):
    """An MLP speculator. Stage 0 reads the newest committed token, stage i reads draft i - 1 and makes draft i."""

    head: MLPSpeculator

    def propose(self, state, context: Context):
        def next_pass(carry, token, i):
            carry = self.head.stage(i, carry, token)
            return carry, self.head.logits(i, carry)

        newest = context.tokens_at(context.length[:, None] - 1)
        carry, logits = next_pass(self.head.start(context.newest_feature), newest, 0)
        _, proposal = self.drawing(context).chain(logits, carry, next_pass, self.room(context), unroll_all=True)
        return state, proposal
