"""The prefix cache: which page of the KV cache holds which prefix. Nothing here needs JAX."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

# The most pages whose tokens are converted at a time: a large group converts faster, but most texts are unknown after a few.
PAGE_GROUP = 16


class Link(NamedTuple):
    """The contents of a page.

    Attributes:
      key: a digest of all tokens from the beginning of the text to the end of the page.
      previous: the key of the page before it in the text.
      place: how many pages come before it in the text.
    """

    key: bytes
    previous: bytes
    place: int


class PrefixIndex:
    """Finds the pages that hold a prefix of a text.

    Keys and values of a token depend on all tokens before it, so a page can serve another text only if both agree from
    their first token to the end of the page. The key of a page is therefore the SHA-256 digest of the key of the page
    before it and of its own tokens; the first page has the salt in place of a page before it. Equal keys mean equal
    prefixes: SHA-256 has no known collisions.

    When two requests have written the same text, the page of the first is found. The page of the second only has its key,
    from which the keys of later pages follow without hashing the text again.

    Args:
      page_size: P, the cache slots of a page.
      looks_ahead: whether the cache entry of a token also depends on the token after it. The key of a page then covers the
        token after the page, too.
    """

    def __init__(self, page_size: int, looks_ahead: bool):
        self._page_size, self._ahead = page_size, int(looks_ahead)
        self._links: dict[int, Link] = {}  # of every page whose key is known
        self._pages: dict[bytes, int] = {}  # the page that is found by a key

    def __contains__(self, page: int) -> bool:
        """Whether a text may find this page."""
        link = self._links.get(page)
        return link is not None and self._pages.get(link.key) == page

    def found_as(self, page: int) -> int | None:
        """The registered page with these contents: this one, or the earlier page it duplicates."""
        link = self._links.get(page)
        return None if link is None else self._pages.get(link.key)

    def full_pages(self, tokens: int, slots: int) -> int:
        """How many pages are filled by the first ``slots`` slots of a text of which so many tokens are known."""
        return max(0, min(slots, tokens - self._ahead) // self._page_size)

    def find(
        self,
        tokens: Sequence[int] | np.ndarray,
        before: Sequence[int],
        most_pages: int,
        step: int,
        span: int,
        salt: str,
    ) -> tuple[list[int], bytes | None]:
        """The known pages behind the first pages of a text.

        Args:
          tokens: the text.
          before: pages that hold its beginning. If the key of the last of them is not known, nothing is found.
          most_pages: how many pages to look for, ``before`` included.
          step: the result is a multiple of so many pages.
          span: a number of pages, a multiple of ``step``.
          salt: in place of a page before the first one.

        Returns:
          the pages; and the key of the last of the ``span`` pages that follow them, None if that is beyond ``most_pages``.
        """
        if before and before[-1] not in self._links:
            return [], None
        pages, previous = list[int](), self._links[before[-1]].key if before else _root(salt)
        keys = self._keys(tokens, len(before), most_pages, previous)
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                beyond = len(pages) % step  # known pages past the last multiple of ``step``
                following = [key, *itertools.islice(keys, span - beyond - 1)]
                return pages[: len(pages) - beyond], following[-1] if len(following) == span - beyond else None
            pages.append(page)
        return pages[: len(pages) // step * step], None

    def key_up_to(
        self, tokens: Sequence[int] | np.ndarray, pages: Sequence[int], end: int, most_pages: int
    ) -> bytes | None:
        """The key of the page that ends the first ``end`` pages of a text; None if that is beyond ``most_pages``.

        The text begins with ``pages``, of which there is one at least, and whose keys are known.
        """
        if end > most_pages:
            return None
        known = self._links[pages[min(end, len(pages)) - 1]].key
        return [known, *self._keys(tokens, len(pages), end, known)][-1]

    def add(self, tokens: Sequence[int] | np.ndarray, pages: Sequence[int], salt: str) -> list[int]:
        """Register the first pages of a text; returns those that were not registered before.

        Only pages whose keys are not known yet are hashed. A page that was left out before, because its key led to another
        one, is registered if that one has been forgotten meanwhile.
        """
        links = self._links
        first = next((index for index, page in enumerate(pages) if page not in links), len(pages))
        previous = links[pages[first - 1]].key if first else _root(salt)
        for index, key in enumerate(self._keys(tokens, first, len(pages), previous), first):
            links[pages[index]] = Link(key, previous, index)
            previous = key
        added = [page for page in pages if links[page].key not in self._pages]
        self._pages.update((links[page].key, page) for page in added)
        return added

    def forget(self, page: int):
        """Unregister a page, because it will be overwritten."""
        link = self._links.pop(page, None)
        if link is not None and self._pages.get(link.key) == page:
            del self._pages[link.key]

    def lineage(self, pages: Iterable[int]) -> list[int]:
        """These pages and all pages before them in their texts, the farthest from the beginning first."""
        places: dict[int, int] = {}
        for start in pages:
            page: int | None = start
            while page is not None and page not in places:
                link = self._links[page]
                places[page] = link.place
                page = self._pages.get(link.previous)
        return sorted(places, key=places.__getitem__, reverse=True)

    def _keys(self, tokens: Sequence[int] | np.ndarray, first: int, last: int, previous: bytes) -> Iterator[bytes]:
        """The keys of pages ``first`` .. ``last - 1`` of a text; ``previous`` is the key of the page before them."""
        P, ahead, size = self._page_size, self._ahead, 1
        while first < last:
            size = min(size, last - first)
            text = np.asarray(tokens[first * P : (first + size) * P + ahead], np.int32).tobytes()
            for start in range(0, 4 * P * size, 4 * P):
                previous = hashlib.sha256(previous + text[start : start + 4 * (P + ahead)]).digest()
                yield previous
            first, size = first + size, min(2 * size, PAGE_GROUP)


def _root(salt: str) -> bytes:
    """The digest in place of the key of a page before the first."""
    return hashlib.sha256(b"jspec prefix " + salt.encode(errors="surrogatepass")).digest()
