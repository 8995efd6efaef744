"""Calls as a list of Python calls: Llama 3.2, ToolACE, Llama 4, Olmo 3."""

import re
from collections.abc import Sequence

from jspec.text.parsers.argument_writer import ArgumentWriter
from jspec.text.parsers.branches import UnheldError, members, objects
from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.formats.python_values import PYTHON_VALUES
from jspec.text.parsers.reader import BrokenError, Steps
from jspec.text.parsers.tool_format import ToolFormat

BEGINS = ("<|python_start|>", "<function_calls>")
ENDS = ("<|python_end|>", "</function_calls>")
NAME = re.compile(r"[\w.\-]+")
KEY = re.compile(r"\w+")


class Pythonic(ToolFormat):
    """``[f(a=1, b="x"), g()]`` as the first text, or between markers, where the list may also be one call per line.

    Values are Python's literals, and ``null``, ``true`` and ``false``. A call is text if it has arguments without a name,
    or if there is no such tool.
    """

    markers = BEGINS + ENDS
    begins = BEGINS
    first_begins = ("[",)
    between = ", "

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, listed = calls.reader, begin == "["
        if not listed:
            yield from reader.blanks()
            listed = bool((yield from reader.match("[")))
        while True:
            yield from reader.blanks()
            yield from self._call(calls)
            yield from reader.blanks()
            comma = yield from reader.match(",")
            yield from reader.blanks()
            if listed and (yield from reader.match("]")):
                break
            if listed and not comma:
                raise BrokenError
            if not listed and (yield from reader.match(*ENDS)):
                return
        if begin != "[":
            yield from reader.blanks()
            yield from reader.match(*ENDS)

    def _call(self, calls: Calls) -> Steps[None]:
        reader = calls.reader
        name = yield from reader.all(NAME)
        calls.start(name)
        yield from reader.expect("(")
        yield from reader.blanks()
        ended = yield from reader.match(")")
        key = "" if ended else (yield from self._key(calls))
        arguments = ArgumentWriter(calls, name)
        while not ended:
            types = arguments.key(key)
            yield from PYTHON_VALUES.value(calls, types)
            yield from reader.blanks()
            comma = yield from reader.match(",")
            yield from reader.blanks()
            ended = yield from reader.match(")")
            if not ended:
                if not comma:
                    raise BrokenError
                key = yield from self._key(calls)
        arguments.close()
        calls.end()

    def _key(self, calls: Calls) -> Steps[str]:
        """Read a parameter's name and the sign behind it."""
        reader = calls.reader
        key = yield from reader.all(KEY)
        yield from reader.blanks()
        if not key or not (yield from reader.match("=")):
            raise BrokenError
        yield from reader.blanks()
        return key

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], several: bool) -> str:
        expression = grammar.around("[", super().grammar(grammar, functions, several), "]")
        marker = next((i for i, marker in enumerate(BEGINS) if grammar.has(marker)), None)
        return expression if marker is None else grammar.around(BEGINS[marker], expression, ENDS[marker])

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        """The expression of a call, whose values are JSON.

        Raises:
          UnheldError: a name is none of Python's.
        """
        calls = []
        for branch in objects(function.parameters):
            properties, _, required = members(branch)
            for name, pattern in ((function.name, NAME), *((name, KEY) for name in properties)):
                if not pattern.fullmatch(name):
                    raise UnheldError(name, "Python's names in this format of calls")
            parts = {
                name: grammar.around(f"{name}=", grammar.json_of(schema, function.parameters))
                for name, schema in properties.items()
            }
            calls.append(grammar.around(f"{function.name}(", grammar.listed(parts, required, ", "), ")"))
        return grammar.any_of(calls)


PYTHONIC = Pythonic()
