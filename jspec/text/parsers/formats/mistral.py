"""Calls of Mistral's models, of both generations."""

import random
import string
from collections.abc import Sequence

from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls, begins_name
from jspec.text.parsers.json_text import pass_arguments, pass_call, pass_value
from jspec.text.parsers.reader import BrokenError, Steps
from jspec.text.parsers.tool_format import ToolFormat

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class Mistral(ToolFormat):
    """``[TOOL_CALLS][{"name": "f", "arguments": {..}}]`` before version 11 of the tokenizer, and since then
    ``[TOOL_CALLS]f[ARGS]{..}`` for each call, perhaps with ``[CALL_ID]id`` behind the name, or without ``[ARGS]``."""

    markers = (BEGIN, ARGS, CALL_ID)
    begins = (BEGIN,)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader = calls.reader
        yield from reader.blanks()
        next_ = yield from reader.peek()
        if next_ in ("[", "{") and not (yield from reader.at(*self.markers)):
            yield from self._list(calls)
        else:
            yield from self._call(calls)

    def _list(self, calls: Calls) -> Steps[None]:
        reader = calls.reader
        yield from reader.match("[")
        yield from reader.blanks()
        while True:
            yield from pass_call(calls, self.begins)
            yield from reader.blanks()
            ended = yield from reader.expect("]", ",", "}")
            while ended == "}":
                yield from reader.blanks()
                ended = yield from reader.expect("]", ",", "}")
            if ended == "]":
                return
            yield from reader.blanks()

    def _call(self, calls: Calls) -> Steps[None]:
        reader = calls.reader
        name, marker = yield from reader.name((ARGS, CALL_ID, "{", BEGIN), calls.may_begin)
        id = None
        if marker == CALL_ID:
            id, marker = yield from reader.name((ARGS, "{", BEGIN), begins_name)
            id = id.strip()
        if marker is None or marker == BEGIN:
            raise BrokenError
        calls.start(name.strip(), id)
        if marker == "{":
            calls.arguments("{")
            complete = yield from pass_value(reader, calls.arguments, self.begins, depth=1)
        else:
            complete = yield from pass_arguments(calls, self.begins)
        calls.end(complete)

    def new_id(self) -> str:
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))  # as its templates demand

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], several: bool) -> str:
        calls = [self.call_grammar(grammar, function) for function in functions]
        if grammar.has(ARGS):
            return grammar.repeated(calls, "", several)
        return grammar.around(f"{BEGIN}[", grammar.repeated(calls, ", ", several), "]")

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        if grammar.has(ARGS):
            return grammar.around(f"{BEGIN}{function.name}{ARGS}", grammar.json(function.parameters))
        return grammar.json_object(function)


MISTRAL = Mistral()
