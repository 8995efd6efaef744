"""Calls as JSON objects: Hermes, Qwen 2.5 and 3 between markers, Llama 3 and 4 bare, Qwen 2.5 Coder in a fence."""

from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.json_text import pass_call
from jspec.text.parsers.reader import BrokenError, Steps
from jspec.text.parsers.tool_format import ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"  # of Hermes
TAG = "<|python_tag|>"  # of Llama
FENCE = "```"


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


class Llama3Json(ToolFormat):
    """``{"name": "f", "parameters": {..}}``, perhaps behind ``<|python_tag|>``, several separated by ``;``.

    Any ``{`` may begin a call. The object is text if it has other keys than calls have, or if its name is not a tool's.
    """

    markers = (TAG,)
    begins = (TAG,)
    plain_begins = ("{",)
    between = "; "

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, opened = calls.reader, begin == "{"
        while True:
            if not opened:
                yield from reader.blanks()
            yield from pass_call(calls, self.begins, opened=opened, strict=True)
            opened = False
            yield from reader.blanks()
            yield from reader.expect(";", ",")

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        return grammar.json_object(function, key="parameters")


class JsonFence(ToolFormat):
    """``{"name": "f", "arguments": {..}}`` at the start of a line, or one or several of them in a fence of ``json`` or of
    no language. It is text if the object has other keys than calls have, or if its name is not a tool's."""

    line_begins = (FENCE, "{")

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, bare = calls.reader, begin == "{"
        if not bare:
            yield from reader.match("json")
        while True:
            yield from reader.blanks()
            yield from pass_call(calls, (), opened=bare, strict=True)
            if bare:
                return
            yield from reader.blanks()
            if (yield from reader.match(FENCE, ",")) == FENCE:
                return

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        return grammar.json_object(function, f"{FENCE}json\n", f"\n{FENCE}")


HERMES, LLAMA3_JSON, JSON_FENCE = Hermes(), Llama3Json(), JsonFence()
