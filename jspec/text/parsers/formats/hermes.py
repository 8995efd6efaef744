"""Calls as JSON objects between two markers: Hermes, Qwen 2.5, Qwen 3."""

import dataclasses

from jspec.text.parsers.calls import Calls
from jspec.text.parsers.json_text import pass_call
from jspec.text.parsers.reader import BrokenError, Steps
from jspec.text.parsers.tool_format import ToolFormat


@dataclasses.dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """``<tool_call>{"name": "f", "arguments": {..}}</tool_call>``, with one object, several, or a list of them between.

    An object ends at the markers outside of its strings, though it may be incomplete. Brackets too many before the end
    marker are dropped.
    """

    begins: tuple[str, ...] = ("<tool_call>",)
    ends: tuple[str, ...] = ("</tool_call>",)

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begins + self.ends

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, stops = calls.reader, self.begins + self.ends
        yield from reader.blanks()
        yield from reader.match("[")
        yield from reader.blanks()
        while True:
            yield from pass_call(calls, stops)
            yield from reader.blanks()
            while (yield from reader.match("}", "]", ",")):
                yield from reader.blanks()
                reader.keep()
            if (yield from reader.match(*self.ends)) or (yield from reader.at(*self.begins)):
                return
            if (yield from reader.peek()) != "{":
                raise BrokenError


HERMES = JsonCalls()
