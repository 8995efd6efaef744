"""Which pages of the pool are free, on the host."""

import math

from jspec.config import EngineConfig
from jspec.models.cache import NULL_PAGE


class PageAllocator:
    """Hands out pages 1.. of the pool; page 0 is the null page. A request takes all it may touch when it enters."""

    def __init__(self, config: EngineConfig):
        self._page_size, self._total = config.page_size, config.pool_pages - 1
        self._free = [page for page in range(config.pool_pages) if page != NULL_PAGE][::-1]

    def pages(self, slots: int) -> int:
        """Pages that hold ``slots`` tokens."""
        return math.ceil(slots / self._page_size)

    def fits(self, slots: int) -> bool:
        """Whether a request of ``slots`` tokens fits right now."""
        return self.pages(slots) <= len(self._free)

    def check(self, index: int, slots: int):
        """Raise a ValueError if a request of ``slots`` tokens could not even have the whole pool."""
        if self.pages(slots) > self._total:
            raise ValueError(
                f"prompt {index} needs {self.pages(slots)} pages of {self._page_size} tokens (prompt, max_tokens and "
                f"drafts: {slots}), but the pool has {self._total}; load the model with a larger num_pages"
            )

    def take(self, slots: int) -> list[int]:
        """Pages for ``slots`` tokens, in order."""
        return [self._free.pop() for _ in range(self.pages(slots))]

    def give_back(self, pages: list[int]):
        """Return what ``take`` gave."""
        self._free.extend(reversed(pages))
