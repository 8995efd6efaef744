"""Snapshots of recurrent states, by the page of the KV cache behind which they were made. Nothing here needs JAX.

Keys and values of a page serve every text that has the page's tokens before them. A recurrent state serves only texts that
go on exactly where it was saved, so that a prompt can skip as much of a cached prefix as ends with a snapshot. Snapshots are
made while prompts are prefilled, of tokens that are all committed: a state has never seen a draft."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class Snapshot:
    """The recurrent states of a row behind a part of its prompt.

    Attributes:
      row: the row that has them.
      page: the page whose last slot is that of the last token they have read.
      saved: the copy, once it was made: any object, which frees its memory when nobody holds it any more.
    """

    row: int
    page: int
    saved: Any = None


@dataclasses.dataclass(frozen=True)
class Restore:
    """A snapshot that is to be copied into a row, which then reads what follows."""

    row: int
    snapshot: Snapshot


class Snapshots:
    """The snapshots that there are, of which the one used longest ago makes room for another.

    Args:
      most: how many there may be, also an attribute.
    """

    def __init__(self, most: int):
        self.most = most
        self._of_page: collections.OrderedDict[int, Snapshot] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._of_page)

    def __contains__(self, page: int) -> bool:
        return page in self._of_page

    def clear(self):
        """Forget all of them."""
        self._of_page.clear()

    def add(self, page: int, snapshot: Snapshot):
        """Keep a snapshot that was made behind a page, unless there is one already."""
        if page in self._of_page or not self.most:
            return
        while len(self._of_page) >= self.most:
            self._of_page.popitem(last=False)
        self._of_page[page] = snapshot

    def use(self, page: int) -> Snapshot:
        """The snapshot behind a page that has one."""
        self._of_page.move_to_end(page)
        return self._of_page[page]

    def forget(self, page: int):
        """Forget the snapshot of a page, if there is one, because the page will be overwritten."""
        self._of_page.pop(page, None)

    def known(self, pages: Sequence[int], step: int) -> list[int]:
        """As many of the first pages of a text as end with a snapshot; a multiple of ``step`` pages."""
        end = len(pages) // step * step
        while end and pages[end - 1] not in self._of_page:
            end -= step
        return list(pages[:end])
