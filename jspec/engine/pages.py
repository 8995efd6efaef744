"""Which pages of the cache are free. Nothing here needs JAX."""

import math

from jspec.config import NULL_PAGE, EngineConfig


class PageAllocator:
    """Hands out pages of the pool, and takes them back.

    The pool has ``config.pool_pages`` pages; one of them is the null page, which is never handed out.
    """

    def __init__(self, config: EngineConfig):
        self._page_size, self._total = config.page_size, config.pool_pages - 1
        self._free = [page for page in reversed(range(config.pool_pages)) if page != NULL_PAGE]  # the last goes first

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def pages(self, slots: int) -> int:
        """How many pages hold ``slots`` tokens."""
        return math.ceil(slots / self._page_size)

    def fits(self, slots: int) -> bool:
        """Whether ``take(slots)`` would succeed right now."""
        return self.pages(slots) <= self.free

    def check(self, index: int, slots: int):
        """Raise a ValueError if request ``index``, of ``slots`` tokens, could not even have the whole pool."""
        if self.pages(slots) > self._total:
            raise ValueError(
                f"prompt {index} needs {self.pages(slots)} pages of {self._page_size} tokens (prompt, max_tokens and "
                f"drafts: {slots}), but the pool has {self._total}; load the model with a larger num_pages"
            )

    def take(self, slots: int) -> list[int]:
        """Pages for ``slots`` tokens, in the order of the tokens."""
        return [self._free.pop() for _ in range(self.pages(slots))]

    def give_back(self, pages: list[int]):
        """Return what ``take`` gave."""
        self._free.extend(reversed(pages))
