"""Calls as bare JSON objects: Llama 3 and 4."""

from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.json_text import pass_call
from jspec.text.parsers.reader import Steps
from jspec.text.parsers.tool_format import ToolFormat

TAG = "<|python_tag|>"


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


LLAMA3_JSON = Llama3Json()
