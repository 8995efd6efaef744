"""The newest responses, for ``previous_response_id``, and their items, for ``item_reference``."""

import collections
import dataclasses
import json
import threading
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Stored:
    """A response, and the conversation through it, as JSON: objects may take many times the memory of their text.

    Attributes:
      tenant: the digest of the API key of who asked for it; nobody else gets it.
      messages: the list of messages of a chat, the response's last.
      response: the complete response.
      items: those of its output, by their ids.
    """

    tenant: bytes
    messages: bytes
    response: bytes
    items: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return len(self.messages) + len(self.response) + sum(map(len, self.items.values()))


class ResponseStore:
    """Keeps responses in memory, the newest ones. Thread-safe.

    Args:
      most: how many are kept.
      most_bytes: how many bytes they have together.
    """

    def __init__(self, most: int, most_bytes: int):
        self._most, self._most_bytes = most, most_bytes
        self._stored = collections.OrderedDict[str, Stored]()
        self._responses_of = dict[str, str]()  # by the ids of their items
        self._bytes, self._lock = 0, threading.Lock()

    def add(self, id: str, stored: Stored):
        """Keep a response, if it is not too large by itself."""
        with self._lock:
            self._remove(id)
            self._stored[id] = stored
            self._responses_of |= dict.fromkeys(stored.items, id)
            self._bytes += stored.num_bytes
            while len(self._stored) > self._most or self._bytes > self._most_bytes:
                self._remove(next(iter(self._stored)))

    def get(self, id: str, tenant: bytes) -> Stored | None:
        """The response with this id; None if there is none, or if another tenant asked for it."""
        with self._lock:
            stored = self._stored.get(id)
            return stored if stored is not None and stored.tenant == tenant else None

    def item(self, id: str, tenant: bytes) -> dict[str, Any] | None:
        """The item with this id; None if there is none, or if another tenant asked for its response."""
        stored = self.get(self._responses_of.get(id, ""), tenant)
        return None if stored is None else json.loads(stored.items[id])

    def remove(self, id: str):
        with self._lock:
            self._remove(id)

    def _remove(self, id: str):
        stored = self._stored.pop(id, None)
        if stored is not None:
            self._bytes -= stored.num_bytes
            for item in stored.items:
                del self._responses_of[item]
