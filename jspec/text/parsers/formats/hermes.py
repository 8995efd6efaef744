"""Calls as JSON objects between two markers: Hermes, Qwen 2.5, Qwen 3."""

from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.json_text import pass_call
from jspec.text.parsers.reader import BrokenError, Steps
from jspec.text.parsers.tool_format import ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    """``<tool_call>{"name": "f", "arguments": {..}}</tool_call>``, with one object, several, or a list of them between.

    An object ends at the markers outside of its strings, though it may be incomplete. Brackets too many before the end
    marker are dropped.
    """

    markers = (BEGIN, END)
    begins = (BEGIN,)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader = calls.reader
        yield from reader.blanks()
        yield from reader.match("[")
        yield from reader.blanks()
        while True:
            yield from pass_call(calls, self.markers)
            yield from reader.blanks()
            while (yield from reader.match("}", "]", ",")):
                yield from reader.blanks()
                reader.keep()
            if (yield from reader.match(END)) or (yield from reader.at(BEGIN)):
                return
            if (yield from reader.peek()) != "{":
                raise BrokenError

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        return grammar.json_object(function, f"{BEGIN}\n", f"\n{END}")


HERMES = Hermes()
