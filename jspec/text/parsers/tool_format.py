"""What a format of tool calls and one of reasoning say about themselves."""

import dataclasses
from abc import ABC, abstractmethod

from jspec.text.parsers.calls import Calls
from jspec.text.parsers.reader import Steps


class ToolFormat(ABC):
    """How a family of models writes tool calls."""

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """All markers that may be single tokens."""

    @property
    @abstractmethod
    def begins(self) -> tuple[str, ...]:
        """The markers that begin a call, in reasoning too."""

    @property
    def plain_begins(self) -> tuple[str, ...]:
        """Plain text that begins a call in content."""
        return ()

    @property
    def first_begins(self) -> tuple[str, ...]:
        """Plain text that begins a call where no content comes before."""
        return ()

    @abstractmethod
    def read(self, calls: Calls, begin: str) -> Steps[None]:
        """Read one or more calls, after the marker that begins them.

        Raises:
          BrokenError: this is no call, or one that breaks off.
        """


@dataclasses.dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks the text in which it thinks.

    Attributes:
      start, end: around the reasoning.
      open: whether a completion begins with reasoning if the end of its prompt says nothing.
      markers: those that may be single tokens, if ``start`` and ``end`` are not.
      turns: what a chat template writes before the model's turn. The reasoning's start and end count behind the last.
    """

    start: str = "<think>"
    end: str = "</think>"
    open: bool = True
    markers: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()

    def all_markers(self) -> tuple[str, ...]:
        return self.markers or (self.start, self.end)

    def opened_by(self, prompt: str) -> bool:
        """Whether a completion of this prompt begins with reasoning."""
        turn = max((prompt.rfind(marker) + len(marker) for marker in self.turns if marker in prompt), default=-1)
        if turn < 0:  # another template's prompt, of which only the very end is the model's turn
            written = prompt.rstrip()
            start, end = self.start.rstrip(), self.end.rstrip()
            return written.endswith(start) or (self.open and not written.endswith(end))
        begun, ended = prompt.rfind(self.start.rstrip(), turn), prompt.rfind(self.end.rstrip(), turn)
        return self.open if begun == ended else begun > ended
