"""How many cache slots and pages requests need, and which requests can never be served. Nothing here needs JAX."""

from collections.abc import Sequence

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.scheduler.page_pool import PagePool
from jspec.sampling.params import MAX_STOP_TOKENS


class PageRequirements:
    """Slots and pages that requests need.

    Args:
      config: its ``max_len`` bounds a text.
      num_draft_tokens: K, the most drafts of a round.
      pages: the number and the size of pages.
      slots_beyond: how many cache slots the drafter may write in a round behind those of K drafts.
      states: how many pages take as much host memory as the recurrent states of a request that is swapped.
    """

    def __init__(
        self, config: EngineConfig, num_draft_tokens: int, pages: PagePool, slots_beyond: int = 0, states: int = 0
    ):
        self.states = states
        self._config, self._num_draft_tokens, self._pages = config, num_draft_tokens, pages
        self._ahead = num_draft_tokens + slots_beyond

    def check(self, request: Request):
        """Raise a ValueError, with numbers, if the request can never be served."""
        length, S = len(request.prompt), self._config.max_len
        if length == 0:
            raise ValueError(f"prompt {request.index} is empty: expected at least one token")
        if length + 1 > S:
            raise ValueError(
                f"prompt {request.index} has {length} tokens, but max_len={S} leaves room for {S - 1} and one new token; "
                "load the model with a larger max_len, or shorten the prompt"
            )
        if len(request.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(
                f"prompt {request.index} has {len(request.stop_tokens)} stop tokens, end-of-sequence ids included: "
                f"expected at most {MAX_STOP_TOKENS}"
            )
        slots, pool = self.most_slots(request), self._pages
        if pool.pages(slots) > pool.total:
            raise ValueError(
                f"prompt {request.index} needs {pool.pages(slots)} pages of {pool.page_size} tokens (prompt, max_tokens "
                f"and drafts: {slots}), but the pool has {pool.total}; load the model with a larger num_pages"
            )

    def most_slots(self, request: Request) -> int:
        """The most cache slots that the request may ever use."""
        return min(request.limit(self._config.max_len) + self._ahead, self._config.max_len)

    def pages_for(self, active: ActiveRequest, rounds: int) -> int:
        """The most pages that the request needs for so many more rounds."""
        committed = active.length + (active.unread_rounds + rounds) * (self._num_draft_tokens + 1)
        slots = min(committed + self._ahead, active.most_slots)
        return self._pages.pages(slots)

    def fits_together(self, actives: Sequence[ActiveRequest], swap_pages: int) -> bool:
        """Whether these requests can be admitted together without risk of deadlock on pages.

        If each of them grew to its longest, their pages would have to fit into the pool and into host memory, which has
        room for ``swap_pages``. A request is swapped as a whole, so as much room as the largest one takes may remain unused.
        """
        pages = [self._pages.pages(active.most_slots) for active in actives]
        beyond, states = sum(pages) - self._pages.total, self.states
        return beyond <= 0 or beyond + states * len(pages) <= max(swap_pages - max(pages) - states, 0)
