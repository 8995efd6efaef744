"""Plain decoding through the same step: nothing is drafted, K = 0."""

import dataclasses

import jax.numpy as jnp

from jspec.drafting.base import Context, Setup, Stateless
from jspec.sampling.verify import Proposal


@dataclasses.dataclass(frozen=True)
class NoDrafts(Stateless):
    """Every round emits one token, the target's own draw.

    Attributes:
      aux_layers: what a drafter that rests, and reads later, needs of the target; see ``DecodeStep.decode_plainly``.
    """

    aux_layers: tuple[int, ...] | None = None
    num_draft_tokens: int = 0

    @classmethod
    def build(cls, setup: Setup):
        del setup
        return cls()

    def propose(self, state, context: Context):
        B = context.length.shape[0]
        none = Proposal(jnp.zeros((B, 0), jnp.int32), context.room, distribution=None, point_mass=jnp.ones(B, bool))
        return state, none
