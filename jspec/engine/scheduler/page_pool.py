"""The page pool: which pages of the KV cache are free, held by requests, or cached. Nothing here needs JAX."""

import collections
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jspec.config import NULL_PAGE
from jspec.engine.scheduler.prefix_cache import PrefixIndex
from jspec.engine.scheduler.snapshots import Snapshot, Snapshots


class PagePool:
    """The pages of the KV cache: free, held by requests, or cached for later requests with the same prefix.

    Every page is in one of three states::

        free    -- take -->     held, by one request
        held    -- match -->    held, by one request more, if it is registered
        held    -- release -->  cached if it is registered, else free; once its last holder has released it
        cached  -- match -->    held
        cached  -- take -->     held, for other contents, when no page is free: the page is evicted

    A registered page is immutable. The pool cannot see writes: the caller of ``register`` guarantees that the slots are
    written already, for programs sent to the device later, and never again. So a request writes only behind the slots that
    ``match`` gave it or that it has registered, on pages that ``take`` gave it.

    Cached pages are evicted least recently used first, and of the pages of one text the last one goes first: without its
    predecessor a page would take up space, but no text would find it.

    After an exception from outside (a Ctrl-C) in the middle of a method, only ``clear`` makes the pool consistent.

    Args:
      total: how many pages there are. They are numbered 1 .. ``total``; page 0 is the null page and never handed out.
      page_size: P, the cache slots of a page.
      prefix_cache: whether pages are cached at all. Otherwise ``match`` finds nothing, and ``register`` does nothing.
      looks_ahead: whether slot i of the drafter's cache also depends on token i + 1, as with heads that are fed features
        of the target. A page is then found only by texts that have the same token after it.
      snapshots: of recurrent states. A prefix is then found only as far as it ends with a snapshot. None for targets without
        such states.

    Attributes:
      total: how many pages there are.
      page_size: P, the cache slots of a page.
    """

    def __init__(
        self,
        total: int,
        page_size: int,
        prefix_cache: bool = True,
        looks_ahead: bool = False,
        snapshots: Snapshots | None = None,
    ):
        self.total, self.page_size, self._snapshots = total, page_size, snapshots
        self._prefix_cache, self._looks_ahead = prefix_cache, looks_ahead
        self.clear()

    def clear(self) -> None:
        """Make all pages free and unregistered. An interrupted ``clear`` can be repeated."""
        self._index = PrefixIndex(self.page_size, self._looks_ahead)
        self._holders: dict[int, int] = {}  # of every held page, how many requests hold it
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()  # the next to be evicted first
        self._outdated: set[int] = set()  # held pages that are never to be registered
        pages = range(NULL_PAGE + 1, NULL_PAGE + 1 + self.total)
        self._free = list(reversed(pages))  # the last is handed out first
        if self._snapshots is not None:
            self._snapshots.clear()

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """How many pages are cached and without a holder."""
        return len(self._cached)

    @property
    def used(self) -> int:
        """How many pages are held; a page that several requests share counts once."""
        return len(self._holders)

    @property
    def available(self) -> int:
        """How many pages ``take`` can give."""
        return self.free + self.cached

    def pages(self, slots: int) -> int:
        """How many pages hold ``slots`` slots."""
        return math.ceil(slots / self.page_size)

    def take(self, count: int) -> list[int]:
        """New pages for one request, in any order; what they hold is undefined.

        Cached pages are evicted when there are too few free ones.

        Raises:
          ValueError: fewer than ``count`` pages are available. Nothing has changed then.
        """
        if count > self.available:
            raise ValueError(
                f"take({count}) of a pool of {self.total} pages: {self.free} are free and {self.cached} cached, the other "
                f"{self.used} are held; take at most {self.available}, or release pages first"
            )
        while self.free < count:
            page, _ = self._cached.popitem(last=False)
            self._index.forget(page)
            if self._snapshots is not None:
                self._snapshots.forget(page)
            self._free.append(page)
        taken = [self._free.pop() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Take away one holder of each page. A page without holders is cached if it is registered, else free.

        Args:
          pages: what ``take`` and ``match`` gave, in any order.

        Raises:
          ValueError: more holders would be taken away than a page has. Nothing has changed then.
        """
        for page, times in collections.Counter(pages).items():
            if times > self._holders.get(page, 0):
                raise ValueError(
                    f"release: page {page} has {self._holders.get(page, 0)} holders, not {times}; release each page once "
                    "for each time that take or match has given it"
                )
        newly_cached = []
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._index:
                self._cached[page] = None
                newly_cached.append(page)
            else:
                self._index.forget(page)
                self._outdated.discard(page)
                self._free.append(page)
        self._touch(newly_cached)

    def match(self, tokens: Sequence[int] | np.ndarray, most_slots: int, grid: int = 1, salt: str = "") -> list[int]:
        """Pages that hold the longest known prefix of ``tokens``, in the order of the text.

        The caller holds them from now on, and releases them as any other page, but must not write to them.

        Args:
          tokens: a text. An array of int32 is read fastest.
          most_slots: the pages returned have at most so many slots. A request that needs the logits after its prompt
            has at least one token to read and passes one less than the tokens of the prompt.
          grid: the number of slots is a multiple of this, and of the page size.
          salt: anything else that the contents of a page depend on. Only pages registered with the same salt are found.

        Returns:
          full pages alone; with ``looks_ahead``, only pages after which ``tokens`` has the same next token. ``[]`` if
          there are none, or without ``prefix_cache``.
        """
        return self._match(tokens, [], most_slots, grid, salt, span=1)[0]

    def look_again(
        self,
        tokens: Sequence[int] | np.ndarray,
        pages: Sequence[int],
        slots: int,
        most_slots: int,
        grid: int = 1,
        span: int = 1,
        salt: str = "",
    ) -> tuple[list[int], int, bytes | None]:
        """The result of ``match`` for a request whose prefill has begun.

        Its own pages are exchanged for those that others have registered meanwhile. It holds these from now on, and no
        longer its own.

        Args:
          tokens, most_slots, grid, salt: as for ``match``.
          pages: all pages of the request, in the order of the text.
          slots: so many of their slots have been prefilled, or were cached; full pages among them are registered.
          span: how many slots the key covers behind the cached ones, at least, rounded up to slots that can be found
            together.

        Returns:
          the pages of the request; how many of their slots need no prefill; and a key of the text so far and of the
          ``span`` that follows. Of two requests with the same key, one finds what the other prefills. None if so much
          cannot be found in any case.
        """
        if not self._prefix_cache:
            return list(pages), slots, None
        first = slots // (step := self._step(grid)) * step // self.page_size
        cached, key = self._match(tokens, pages[:first], most_slots, grid, salt, span)
        end = first + len(cached)
        if not cached:
            return list(pages), slots, key
        self.release(pages[first:end])
        return [*pages[:first], *cached, *pages[end:]], end * self.page_size, key

    def register(self, tokens: Sequence[int] | np.ndarray, pages: Sequence[int], slots: int, salt: str = "") -> None:
        """Let ``match`` find every full page among the first ``slots`` slots of a request.

        The time is proportional to the number of pages, though each is hashed only once, so it is best called when a page
        has become full, and before the pages are released. A page stays private if another one with the same text up to its
        end is registered already. A page that was held at ``forget_prefixes`` stays private too, as do all later ones of
        its text.

        Args:
          tokens: the text of the request, at least ``slots`` tokens. With ``looks_ahead``, a page is left out whose next
            token is not among them.
          pages: the pages of the request in the order of the text, those from ``match`` included; all of them held.
          slots: so many slots hold the first ``slots`` tokens and are never written again.
          salt: anything else that the contents depend on, the same in every call for these pages.

        Raises:
          ValueError: the pages have fewer than ``slots`` slots, or a full page is not held. Nothing has changed then.
        """
        if not self._prefix_cache:
            return
        if self.pages(slots) > len(pages):
            raise ValueError(
                f"register: {slots} slots need {self.pages(slots)} pages of {self.page_size}, not {len(pages)}; pass all "
                "pages of the request, or fewer slots"
            )
        full = pages[: self._index.full_pages(len(tokens), slots)]
        for page in full:
            if page not in self._holders:
                raise ValueError(f"register: page {page} has no holder; register pages before they are released")
        if self._outdated:
            current = next((index for index, page in enumerate(full) if page in self._outdated), len(full))
            full = full[:current]
        self._touch(self._index.add(tokens, full, salt))

    def forget_prefixes(self) -> None:
        """Drop all registrations, because the contents of the pages are lost or belong to other weights.

        Cached pages become free. Held ones stay with their requests and are free when released: neither they nor later
        pages of the same texts, whose contents depend on them, can be registered any more.
        """
        self._index = PrefixIndex(self.page_size, self._looks_ahead)
        self._outdated = set(self._holders)
        self._free.extend(self._cached)
        self._cached.clear()
        if self._snapshots is not None:
            self._snapshots.clear()

    def keep(self, snapshot: Snapshot) -> None:
        """Keep a snapshot that was made behind a page which has been registered since, or whose contents another one has."""
        page = self._index.found_as(snapshot.page)
        if self._snapshots is not None and page is not None:
            self._snapshots.add(page, snapshot)

    def snapshot_behind(self, page: int) -> Snapshot | None:
        """The snapshot behind a page that ``match`` or ``look_again`` gave last; None for targets without recurrent
        states."""
        return None if self._snapshots is None else self._snapshots.use(page)

    def _match(
        self,
        tokens: Sequence[int] | np.ndarray,
        before: Sequence[int],
        most_slots: int,
        grid: int,
        salt: str,
        span: int,
    ) -> tuple[list[int], bytes | None]:
        """The known pages behind ``before``, which are held from now on, and the key of the pages that follow."""
        if not self._prefix_cache or (self._snapshots is not None and not self._snapshots.most):
            return [], None
        most_pages, step = self._index.full_pages(len(tokens), most_slots), self._step(grid) // self.page_size
        steps = math.ceil(span / self._step(grid))
        cached, key = self._index.find(tokens, before, most_pages, step, steps * step, salt)
        if self._snapshots is not None:
            known = self._snapshots.known(cached, step)
            if len(known) < len(cached):
                end = len(before) + len(known) + steps * step
                key = self._index.key_up_to(tokens, [*before, *cached], end, most_pages)
                cached = known
        for page in cached:
            self._holders[page] = self._holders.get(page, 0) + 1
            self._cached.pop(page, None)
        return cached, key

    def _step(self, grid: int) -> int:
        """How many slots are found at a time."""
        return math.lcm(self.page_size, grid)

    def _touch(self, pages: Iterable[int]):
        """Mark registered pages, and all pages before them in their texts, as used just now.

        So a cached page is never evicted before a page that is found only through it. The order of releases does not ensure
        that: a request may have written the first page of a text again, and share only later pages.
        """
        for page in self._index.lineage(pages):
            if page in self._cached:
                self._cached.move_to_end(page)
