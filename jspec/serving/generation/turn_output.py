"""One text of a turn of a chat as blocks: reasoning, text and calls."""

import dataclasses
from collections.abc import Iterator

from jspec.outputs import Delta, Result
from jspec.text.parsers.blocks import Blocks, Step
from jspec.text.parsers.parser import OutputParser


@dataclasses.dataclass(frozen=True)
class TurnOutput:
    """Parses a text and collects its blocks.

    Attributes:
      parser: of the text.
      blocks: those that have begun.
    """

    parser: OutputParser
    blocks: Blocks

    def add(self, new: Delta | Result) -> Iterator[Step]:
        """The steps of the next delta, or of a whole text; the last delta has the result."""
        result = new if isinstance(new, Result) else new.result
        events = self.parser.feed(new.text or "", new.token_ids)
        if result is None:
            return self.blocks.add(events)
        events = [*events, *self.parser.finish(ended=not result.was_cut)]
        return self.blocks.add(events, ended=True, complete=result.finish_reason != "length")
