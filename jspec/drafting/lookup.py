"""Prompt lookup beside a drafter: rounds in which a text repeats itself draft from the text, others by the drafter."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.config import Speculation
from jspec.drafting.base import Context, Drafter, FixedDrafts, Prompt
from jspec.drafting.ngram import NGram
from jspec.sampling.confidence import confidence_of

LOOKUP_CONFIDENCE = 1.0  # of looked-up drafts: a verification budget treats them like the drafter's most confident ones


@dataclasses.dataclass(frozen=True)
class WithLookup:
    """A drafter whose drafts give way to looked-up ones in each row whose newest tokens occur earlier in its text.

    Committed tokens alone decide in which rows, before the drafter runs. So it is settled before anything is drawn, and
    looked-up drafts are point masses: the verification rules stay exact. (To look up only where the drafter's own draft
    seems bad would not be exact, because that draft has been drawn by then.)

    The drafter makes its passes as usual and reads looked-up drafts as its own, so its caches are complete when it drafts
    again. All drafts of such a row are looked up, also those for which the drafter has no position.

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
        """That of the drafter. After longer texts only rounds with looked-up drafts draft."""
        return self.drafter.longest_text

    @property
    def slots_beyond(self) -> int:
        return self.drafter.slots_beyond

    def init(self, pages: int, page_size: int, dtype, num_rows: int) -> Any:
        return self.drafter.init(pages, page_size, dtype, num_rows)

    def prefill(self, state: Any, prompt: Prompt) -> Any:
        return self.drafter.prefill(state, prompt)

    def propose(self, state: Any, context: Context):
        tokens, looked_up = self.lookup.continuation(context)
        context = dataclasses.replace(context, fixed=FixedDrafts(tokens, looked_up))
        state, proposal = self.drafter.propose(state, context)
        # The drafter counts no more than it has positions for, and none behind logits of its own that are not finite.
        count = jnp.where(looked_up > 0, looked_up, proposal.count)
        confidence = jnp.where((looked_up > 0)[:, None], LOOKUP_CONFIDENCE, confidence_of(proposal))
        return state, dataclasses.replace(proposal, count=count, confidence=confidence)


def with_lookup(drafter: Drafter, speculation: Speculation) -> Drafter:
    """The drafter, with prompt lookup beside it if ``speculation`` says so."""
    if not speculation.lookup:
        return drafter
    lookup = NGram(drafter.num_draft_tokens, *speculation.ngram_lengths)
    return WithLookup(drafter, lookup)  # pyright: ignore[reportReturnType] - built around a drafter, it has no ``build``
