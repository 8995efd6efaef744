"""Where the owner of some requests learns of their progress, whichever thread steps the engine meanwhile."""

import collections
import threading
from typing import NamedTuple

from jspec.engine.request import ActiveRequest


class Progress(NamedTuple):
    """What a step did for one request: its new tokens, whether it has ended, and which tokens were accepted drafts."""

    active: ActiveRequest
    token_ids: list[int]
    finished: bool
    accepted: list[bool]


class Inbox:
    """The requests of one owner, and what has happened to them that the owner has not been told yet.

    Only who has the engine's turn writes into it. The owner takes things out at any time.

    Args:
      streams: whether the owner wants every progress, and not only the ends.

    Attributes:
      items: what the owner has not taken yet, the oldest first.
      unfinished: the owner's requests that have not ended, by order.
      thread: the thread in which the owner last did something.
    """

    def __init__(self, streams: bool):
        self.streams = streams
        self.items: collections.deque[Progress] = collections.deque()
        self.unfinished: dict[int, ActiveRequest] = {}
        self.thread = threading.current_thread()

    def taken(self) -> list[Progress]:
        """Everything that is in it, which is taken out."""
        items = []
        while self.items:
            items.append(self.items.popleft())
        return items
