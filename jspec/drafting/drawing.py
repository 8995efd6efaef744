"""How a drafter's logits become tokens, and the chain of passes that draws them one after another."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context
from jspec.pallas.warped_logits import WarpedLogits
from jspec.registry import argmax_below
from jspec.sampling.distribution import Distribution, Warp, leading, make_distribution
from jspec.sampling.params import GREEDY_BELOW
from jspec.sampling.stops import forbid_early_stops
from jspec.sampling.verify import Proposal

UNROLLED_PASSES = 8  # straight-line passes let one device graph hold the round; past that, compile time matters more


@dataclasses.dataclass(frozen=True)
class Drawing:
    """The draws of one round.

    Attributes:
      speculation: how tokens are drawn.
      context: the round.
      method: the kind of drafter, which decides where ``auto`` changes over unless the user says so.
    """

    speculation: Speculation
    context: Context
    method: str

    @property
    def warp(self) -> Warp:
        """The request's settings at the draft's temperature; 0 makes the draft an argmax, that is, a point mass."""
        how, fixed = self.speculation, self.speculation.draft_temperature
        asked = self.context.warp.temperature
        temperature = asked
        if fixed is not None:
            temperature = jnp.full_like(temperature, 0.0 if fixed < GREEDY_BELOW else fixed)
        if how.draft_sampling == "argmax":
            temperature = jnp.zeros_like(temperature)
        elif how.draft_sampling == "auto":
            below = argmax_below(self.method) if how.argmax_below is None else how.argmax_below
            temperature = jnp.where(asked < below, 0.0, temperature)
        return dataclasses.replace(self.context.warp, temperature=temperature)

    def draw(self, logits, first) -> tuple[Distribution, jax.Array]:
        """Distributions of drafts ``first``, ``first + 1``, .. from logits ``[B, J, V]``, and their tokens, int32 ``[B,
        J]``."""
        B, J, _ = logits.shape
        context = self.context
        index = first + jnp.broadcast_to(jnp.arange(J, dtype=jnp.int32), (B, J))
        logits = forbid_early_stops(logits, context.length[:, None] + index, context.stop_tokens, context.min_length)
        coupled = self.speculation.draft_sampling == "coupled"
        keys = context.noise.sample_keys(index) if coupled else context.noise.draft_keys(index)
        return make_distribution(logits, self.warp, keys)

    def proposal(self, distribution: Distribution, tokens, room) -> Proposal:
        """K drafts, of which each row can use ``room``, int32 ``[B]``; a row ends before its first distribution that is
        none."""
        usable = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < room[:, None]
        return Proposal(tokens, leading(distribution.finite & usable), distribution, point_mass=self.warp.greedy)

    def chain(self, logits, carry, read: Callable, room, unroll: int = UNROLLED_PASSES) -> tuple[Any, Proposal]:
        """Draw K tokens one after another.

        Args:
          logits: ``[B, 1, V]`` of the first.
          carry: what the passes hand on.
          read: ``(carry, token int32 [B, 1], i) -> (carry, logits [B, 1, V])``, the pass that draft i is drawn from,
            after it has read draft i - 1.
          room: int32 ``[B]``, drafts that the row can use.
          unroll: up to so many passes are straight-line code, in which i is a Python integer.
        """
        later = self.speculation.most_draft_tokens - 1

        def next_pass(state, i):
            carry, token = state
            carry, logits = read(carry, token, i)
            distribution, token = self.draw(logits, i)
            return (carry, token), (distribution.warped, token)

        distribution, token = self.draw(logits, 0)
        state, drawn = (carry, token), [(distribution.warped, token)]
        if later <= unroll:
            for i in range(1, later + 1):
                state, one = next_pass(state, i)
                drawn.append(one)
        else:
            state, rest = jax.lax.scan(next_pass, state, jnp.arange(1, later + 1, dtype=jnp.int32), unroll=unroll)
            drawn.append(jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), rest))
        rows, tokens = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *drawn)
        return state[0], self.proposal(Distribution(WarpedLogits(*rows), distribution.greedy), tokens, room)
