"""Plain decoding by the same compiled step: a drafter with K = 0."""

import dataclasses

import jax.numpy as jnp

from jspec.drafting.base import Context, Setup, Stateless
from jspec.sampling.verify import Proposal


@dataclasses.dataclass(frozen=True)
class NoDrafts(Stateless):
    """Drafts nothing, so that every round emits one token, which the target draws.

    Attributes:
      aux_layers: the hidden states that the target has to return although nothing is drafted. A drafter that pauses needs
        them when it drafts again; see ``DecodeStep.decode_plainly``.
    """

    aux_layers: tuple[int, ...] | None = None
    num_draft_tokens: int = 0

    @classmethod
    def build(cls, setup: Setup):
        del setup
        return cls()

    def propose(self, state, context: Context):
        nothing = jnp.zeros((context.length.shape[0], 0), jnp.int32)
        return state, Proposal(nothing, context.room, distribution=None, point_mass=nothing == 0)
