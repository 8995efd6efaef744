"""The multi-token prediction layers of the target's own checkpoint as drafter."""

import dataclasses

from jspec.drafting.eagle import Eagle
from jspec.models.heads.mtp import MTPHead


@dataclasses.dataclass(frozen=True)
class MTP(Eagle):
    """Multi-token prediction layers (DeepSeek-V3, 2024), which draft as an EAGLE head does.

    Layer k drafts token k of a round, and the last layer all further ones.
    """

    head: MTPHead

    @property
    def passes_differ(self) -> bool:
        return len(self.head.layers) > 1

    def read(self, i, embedded, features, positions, cache, view):
        last = len(self.head.layers) - 1
        k = min(i, last) if last else 0  # with one layer, passes may be a loop, where i is traced
        return self.head.read(k, embedded, features, positions, cache, view)
