"""Who waits, who enters which row with which pages, and who leaves: decisions on the host, made on numbers alone.

Nothing here needs JAX. The scheduler decides; ``runner.py`` carries out.
"""

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jspec.config import EngineConfig
from jspec.engine.pages import PageAllocator
from jspec.engine.request import LIVE, ActiveRequest, Request
from jspec.sampling.params import MAX_STOP_TOKENS

if TYPE_CHECKING:
    from jspec.engine.step import RoundLog


class Scheduler:
    """Keeps the queue, the rows and the pages.

    A request waits until a row is free and as many pages as it may ever touch, first come, first served: a request
    that needs many pages is not overtaken by one that needs few.

    Args:
      config: how many rows and pages there are, and how long a text may become.
      num_draft_tokens: K, the most drafts of a round. The last round of a request may draft past its end, so these
        slots are counted.

    Attributes:
      waiting: requests that have no row yet, the next one first.
      rows: who is in each row of the batch, None for a free row.
      pages: the allocator.
    """

    def __init__(self, config: EngineConfig, num_draft_tokens: int):
        self._config, self._num_draft_tokens = config, num_draft_tokens
        self.clear()

    def clear(self):
        """Forget every request, and have all rows and pages free again. An interrupted ``clear`` can be repeated."""
        self.waiting: collections.deque[Request] = collections.deque()
        self.rows: list[ActiveRequest | None] = [None] * self._config.max_batch
        self.pages = PageAllocator(self._config)

    @property
    def occupied(self) -> bool:
        """Whether any request is in a row."""
        return any(row is not None for row in self.rows)

    @property
    def unfinished(self) -> bool:
        """Whether any request waits or is in a row."""
        return bool(self.waiting) or self.occupied

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
        self.pages.check(request.index, self._slots(request))

    def add(self, request: Request):
        """Let a request wait, which ``check`` has passed."""
        self.waiting.append(request)

    def enter(self) -> list[tuple[int, ActiveRequest]]:
        """Give free rows, and pages, to requests that wait; returns those rows and who has entered them."""
        entered = []
        for row, occupied in enumerate(self.rows):
            if occupied is None and self.waiting and self.pages.fits(self._slots(self.waiting[0])):
                request = self.waiting.popleft()
                active = ActiveRequest(request, self.pages.take(self._slots(request)))
                self.rows[row] = active
                entered.append((row, active))
        return entered

    def may_send_ahead(self) -> bool:
        """Whether the next call may be sent before the host knows what the last one did.

        Then the device need not wait for the host. A row that ends on the device is left alone by the next call. But
        while a request waits, the host has to give it the row, and a stop string is seen by the host alone.
        """
        watched = any(active.request.find_stop for active in self.rows if active is not None)
        return not self.waiting and not watched

    def follow(self, rows: Sequence[ActiveRequest | None], logs: "RoundLog") -> tuple[list[int], list[int]]:
        """Take notice of what one call did.

        Args:
          rows: who was in each row when the call was sent.
          logs: the rounds of the call on the host, fields ``[rounds, B]``.

        Returns:
          the rows whose requests have ended with this call; and, for every row and round that counts, how many drafts
          the target accepted, in any order.

        Raises:
          RuntimeError: the device made no round although a request has not ended, so that it would never end.
        """
        live, finished, accepted = [], [], []
        for row, active in enumerate(rows):
            if active is not None and active.outcome == LIVE:
                live.append(row)
                followed = len(active.accepted)
                active.follow(logs.of_row(row))
                accepted += active.accepted[followed:]
                if active.outcome != LIVE:
                    finished.append(row)
        if live and not accepted:
            raise RuntimeError(f"the device made no round, although the requests in rows {live} have not ended")
        return finished, accepted

    def leave(self, rows: Sequence[int]) -> list[ActiveRequest]:
        """Free these rows and their pages; returns who was there."""
        left = []
        for row in rows:
            active = self.rows[row]
            if active is not None:
                self.pages.give_back(active.pages)
                self.rows[row] = None
                left.append(active)
        return left

    def _slots(self, request: Request) -> int:
        """How many cache slots the request may touch."""
        return min(len(request.prompt) + request.params.max_tokens + self._num_draft_tokens, self._config.max_len)
