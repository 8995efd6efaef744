"""Calls of GLM 4.5 to 5: a name, and keys and values between markers."""

from jspec.text.parsers.argument_writer import ArgumentWriter, RawValue
from jspec.text.parsers.call_grammar import NEWLINE, CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.raw_grammar import RawArguments
from jspec.text.parsers.reader import BrokenError, Steps
from jspec.text.parsers.tool_format import ToolFormat

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"


class Glm45(ToolFormat):
    """``<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, with or without newlines between.

    A value that is not closed ends at the next key or at the call's end.
    """

    markers = (BEGIN, END, KEY, KEY_END, VALUE, VALUE_END)
    begins = (BEGIN,)

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, marker = calls.reader, begin
        while marker == BEGIN:
            yield from reader.blanks()
            name, marker = yield from reader.name((KEY, END, "\n", BEGIN), calls.may_begin)
            name = name.strip()
            if marker is None:
                raise BrokenError
            calls.start(name)
            arguments = ArgumentWriter(calls, name)
            while True:
                if marker in ("\n", VALUE_END):
                    yield from reader.blanks()
                    marker = yield from reader.expect(KEY, END, BEGIN)
                if marker != KEY:
                    break
                marker = yield from self._parameter(calls, arguments)
            arguments.close()
            calls.end()

    def _parameter(self, calls: Calls, arguments: ArgumentWriter) -> Steps[str]:
        """Read a key and its value after the key's marker; returns the marker that ended the value."""
        reader = calls.reader
        key, _ = yield from reader.name((KEY_END,))
        yield from reader.blanks()
        yield from reader.expect(VALUE)
        value = RawValue(calls, arguments.key(key.strip()))
        ended = yield from reader.until((VALUE_END, KEY, END, BEGIN), value.add)
        if ended is None:
            raise BrokenError
        value.end()
        return ended

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        def argument(key: str, value: str, is_string: bool) -> str:
            del is_string
            head = f"{grammar.literal(KEY)} {key} {grammar.literal(KEY_END)} {NEWLINE} {grammar.literal(VALUE)}"
            return f"{head} {value} {NEWLINE}"

        arguments = RawArguments(grammar, function, VALUE_END, self.markers).all(argument)
        return f"{grammar.literal(BEGIN + function.name)} {NEWLINE} {arguments} {grammar.literal(END)}"


GLM45 = Glm45()
