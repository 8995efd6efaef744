"""Prompt lookup beside a drafter: rounds in which a text repeats itself draft from the text, others as the drafter does."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Drafter, Forced, Prompt
from jspec.drafting.ngram import NGram
from jspec.sampling.confidence import confidence_of

SURE = 1.0  # the confidence of looked-up drafts, which a verification budget treats like the drafter's surest ones


@dataclasses.dataclass(frozen=True)
class WithLookup:
    """A drafter whose drafts give way to looked-up ones in each row whose newest tokens occur earlier in its text.

    Which rows these are follows from committed tokens alone, before the drafter is asked. So it is settled before anything
    is drawn, and looked-up drafts are point masses: the verification rules stay exact. (To look up only where the drafter's
    own draft seems bad would not be exact, because the draft has been drawn by then.)

    To the drafter, looked-up drafts are like those that a grammar forces: it makes its passes as ever, reads them as its
    own, and so has its caches in order when it drafts again. All drafts of such a row are looked up, also those for which
    the drafter has no position. Drafts that a grammar forces stand, and the drafter continues them; that row looks nothing
    up.

    Attributes:
      drafter: any drafter but one that looks drafts up itself.
      lookup: finds the drafts, as many as the drafter has.
    """

    drafter: Drafter
    lookup: NGram

    @property
    def num_draft_tokens(self) -> int:
        return self.drafter.num_draft_tokens

    @property
    def aux_layers(self) -> tuple[int, ...] | None:
        return self.drafter.aux_layers

    @property
    def longest_text(self) -> int | None:
        """That of the drafter. After longer texts there are drafts only in rounds that look them up."""
        return self.drafter.longest_text

    @property
    def slots_beyond(self) -> int:
        return self.drafter.slots_beyond

    def init(self, pages: int, page_size: int, dtype) -> Any:
        return self.drafter.init(pages, page_size, dtype)

    def prefill(self, state: Any, prompt: Prompt) -> Any:
        return self.drafter.prefill(state, prompt)

    def propose(self, state: Any, context: Context):
        tokens, found = self.lookup.continuation(context)
        count = found
        if context.forced is not None:
            by_grammar = context.forced.count > 0
            found = jnp.where(by_grammar, 0, found)
            tokens = jnp.where(by_grammar[:, None], context.forced.tokens, tokens)
            count = jnp.where(by_grammar, context.forced.count, found)
        context = dataclasses.replace(context, forced=Forced(tokens, count))
        state, proposal = self.drafter.propose(state, context)
        # The drafter counts no more than it has positions for, and none behind logits of its own that are not finite.
        count = jnp.where(found > 0, found, proposal.count)
        confidence = jnp.where((found > 0)[:, None], SURE, confidence_of(proposal))
        return state, dataclasses.replace(proposal, count=count, confidence=confidence)


def with_lookup(drafter: Drafter, speculation: Speculation) -> Drafter:
    """The drafter, with prompt lookup beside it if ``speculation`` says so."""
    if not speculation.lookup:
        return drafter
    lookup = NGram(drafter.num_draft_tokens, *speculation.ngram_lengths)
    return WithLookup(drafter, lookup)  # pyright: ignore[reportReturnType] - built around a drafter, it has no ``build``
