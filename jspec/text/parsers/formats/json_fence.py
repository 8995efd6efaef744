"""Calls as JSON in a fence, or bare: Qwen 2.5 Coder, whatever its chat template asks for."""

from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.json_text import pass_call
from jspec.text.parsers.reader import Steps
from jspec.text.parsers.tool_format import ToolFormat

FENCE = "```"


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


JSON_FENCE = JsonFence()
