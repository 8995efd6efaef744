"""Draws draft tokens from a drafter's logits, all at once or in a chain of passes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Setup, Stateless
from jspec.models.protocols import Target
from jspec.pallas.sampling.warped_logits import WarpedLogits
from jspec.registry import argmax_below
from jspec.sampling.distribution import Distribution, Warp, leading, make_distribution
from jspec.sampling.draft_vocabulary import DraftVocabulary
from jspec.sampling.params import GREEDY_BELOW
from jspec.sampling.verify import Proposal

# Up to so many passes are unrolled, so that one CUDA graph holds the whole round. More would compile too slowly: they are a
# loop that unrolls so many passes at a time.
UNROLLED_PASSES = 8


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Draws the drafts of a round.

    Attributes:
      speculation: how drafts are drawn.
      context: the context of the round.
      method: name of the drafting method. It gives the temperature from which ``draft_sampling="auto"`` samples, unless
        the user has set ``argmax_below``.
      vocabulary: the draft vocabulary that the logits are over, ``[B, J, Vd]``; None if they are over all tokens.

    Example::

        def propose(speculation: Speculation, context: Context, logits):  # logits [B, K, V], all from one pass
            drawing = Drawing(speculation, context, method="medusa", vocabulary=None)
            return drawing.proposal(*drawing.draw(logits, 0), context.room)
    """

    speculation: Speculation
    context: Context
    method: str
    vocabulary: DraftVocabulary | None

    @property
    def warp(self) -> Warp:
        """The sampling settings of each request, with the temperature of the drafts.

        A temperature of 0 takes the likeliest token, so that the draft's distribution is a point mass.
        """
        speculation, draft_temperature = self.speculation, self.speculation.draft_temperature
        request_temperature = self.context.warp.temperature
        temperature = request_temperature
        if draft_temperature is not None:
            temperature = jnp.full_like(temperature, 0.0 if draft_temperature < GREEDY_BELOW else draft_temperature)
        if speculation.draft_sampling == "argmax":
            temperature = jnp.zeros_like(temperature)
        elif speculation.draft_sampling == "auto":
            below = argmax_below(self.method) if speculation.argmax_below is None else speculation.argmax_below
            temperature = jnp.where(request_temperature < below, 0.0, temperature)
        return dataclasses.replace(self.context.warp, temperature=temperature)

    def draw(self, logits, first, drafts=None) -> tuple[Distribution, jax.Array]:
        """Draw drafts ``first``, ``first + 1``, .., ``first + J - 1`` of each row from their logits ``[B, J, Vd]``.

        Args:
          logits: of the drafter.
          first: an integer, of Python's or int32 ``[]``.
          drafts: int32 ``[B, n]``, the drafts so far, which count as text for penalties and bad words. None if they are not
            known, because all are drawn at once; the drafts' distributions then leave them out.

        Returns:
          the distributions that they are drawn from, and the tokens, int32 ``[B, J]``. A fixed draft is its fixed token,
          for any distribution.
        """
        B, J, _ = logits.shape
        context, vocabulary = self.context, self.vocabulary
        index = first + jnp.broadcast_to(jnp.arange(J, dtype=jnp.int32), (B, J))
        coupled = self.speculation.draft_sampling == "coupled"
        if coupled and vocabulary is not None:
            # The noise of a draft is that of the target's draw, token by token.
            logits, vocabulary = vocabulary.widened(logits), None
        logits = context.processing.apply(logits, drafts, first, vocabulary)
        keys = context.noise.sample_keys(index) if coupled else context.noise.draft_keys(index)
        distribution, tokens = make_distribution(logits, self.warp, keys, vocabulary)
        return distribution, context.with_fixed(tokens, first)

    def proposal(self, distribution: Distribution, tokens, room) -> Proposal:
        """The proposal of K drafts in each row, int32 ``tokens [B, K]``.

        A row counts at most ``room`` of them, int32 ``[B]``. It stops before the first draft whose distribution is not
        finite, for example because the drafter computed NaN.
        """
        usable = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None] < room[:, None]
        point_mass = self.warp.greedy[:, None] | self.context.fixed_among(tokens)
        return Proposal(tokens, leading(distribution.finite & usable), distribution, point_mass)

    def at_once(self, logits, room) -> Proposal:
        """The proposal of K drafts that are drawn from their logits ``[B, K, Vd]``, none of which depends on another."""
        return self.proposal(*self.draw(logits, 0), room)

    def chain(self, logits, carry, read: Callable, room, unroll_all: bool = False) -> tuple[Any, Proposal]:
        """Draw K tokens one after another.

        Args:
          logits: ``[B, 1, Vd]``, the logits of draft 0.
          carry: the state that each pass hands to the next, such as the drafter's cache.
          read: ``(carry, token int32 [B, 1], i) -> (carry, logits [B, 1, Vd])``, the pass that reads draft i - 1 and
            returns the logits of draft i.
          room: int32 ``[B]``, the largest number of drafts that the row can use.
          unroll_all: whether all passes are unrolled, for any K, because each has weights of its own or takes
            hardly any time. Then i is a Python integer. Otherwise more than ``UNROLLED_PASSES`` passes are a loop, in which
            i is traced.

        Returns:
          the carry after the last pass, and the proposal.
        """
        later = self.speculation.most_draft_tokens - 1
        distribution, token = self.draw(logits, 0)
        drawn = [(distribution.warped, token)]
        if unroll_all or later <= UNROLLED_PASSES:
            for i in range(1, later + 1):
                carry, logits = read(carry, token, i)
                distribution, token = self.draw(logits, i, jnp.concatenate([token for _, token in drawn], axis=1))
                drawn.append((distribution.warped, token))
        else:

            def next_pass(state, i):
                carry, token, drafts = state
                drafts = drafts.at[:, i - 1].set(token[:, 0])
                carry, logits = read(carry, token, i)
                distribution, token = self.draw(logits, i, drafts)
                return (carry, token, drafts), (distribution.warped, token)

            state = carry, token, jnp.zeros((len(token), later), jnp.int32)
            index = jnp.arange(1, later + 1, dtype=jnp.int32)
            (carry, *_), others = jax.lax.scan(next_pass, state, index, unroll=UNROLLED_PASSES)
            drawn.append(jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), others))
        warped, tokens = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *drawn)
        distribution = dataclasses.replace(distribution, warped=WarpedLogits(*warped))
        return carry, self.proposal(distribution, tokens, room)


class Drawn:
    """What drafters have in common whose drafts are drawn from the logits of ``head`` as ``speculation`` says."""

    head: Any
    speculation: Speculation

    @property
    def num_draft_tokens(self) -> int:
        return self.speculation.most_draft_tokens

    def drawing(self, context: Context) -> Drawing:
        """How the drafts of a round are drawn."""
        return Drawing(self.speculation, context, self.head.config.method, DraftVocabulary.of(self.head))


@dataclasses.dataclass(frozen=True)
class FromNewestFeature(Drawn, Stateless):
    """A drafter that keeps nothing between rounds: it reads the newest feature of the target, which is the hidden state of
    the token before the newest one.

    After a prompt of one token there is none yet, and the first round drafts nothing.

    Attributes:
      head: the draft head.
      target: the target, whose embedding and output head it may borrow.
      speculation: K, and how drafts are drawn.
    """

    head: Any
    target: Target
    speculation: Speculation

    aux_layers = ()

    @classmethod
    def build(cls, setup: Setup):
        return cls(setup.draft, setup.target, setup.speculation)

    @staticmethod
    def room(context: Context) -> jax.Array:
        """The largest number of drafts that each row can use, int32 ``[B]``."""
        return jnp.where(context.length > 1, context.room, 0)
