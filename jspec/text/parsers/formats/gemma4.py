"""Calls of Gemma 4, whose strings stand between markers."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jspec.text.parsers.argument_writer import ArgumentWriter
from jspec.text.parsers.branches import Branch, UnheldError, branches, members, objects
from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.formats.python_values import PYTHON_VALUES, WORDS
from jspec.text.parsers.literals import Notation
from jspec.text.parsers.reader import BrokenError, Reader, Sink, Steps
from jspec.text.parsers.string_grammar import string_expression
from jspec.text.parsers.tool_format import ToolFormat

KEY = re.compile(r"[\w.\-]+")
BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'


class GemmaValues(Notation):
    """``{k:<|"|>text<|"|>,n:42,a:[true,null]}``, with keys without quotes. JSON's quotes and Python's stand for its own."""

    opening = "{["
    bare = re.compile(r"[^,{}\[\]<\ud800-\udfff]+")

    def string(self, reader: Reader, sink: Sink) -> Steps[bool]:
        if not (yield from reader.match(QUOTE)):
            return (yield from PYTHON_VALUES.string(reader, sink))
        if not (yield from reader.until((QUOTE,), sink)):
            raise BrokenError
        return True

    def key(self, reader: Reader) -> Steps[str]:
        pieces = list[str]()
        if (yield from self.string(reader, pieces.append)):
            yield from reader.blanks()
            yield from reader.expect(":")
            return "".join(pieces).strip()
        key, ended = yield from reader.name((":",))
        if ended is None:
            raise BrokenError
        return key.strip()

    def word(self, text: str) -> str:
        return WORDS.get(text, text)  # ``None`` is what the chat template writes


GEMMA_VALUES = GemmaValues()


class Gemma4(ToolFormat):
    """``<|tool_call>call:f{k:<|"|>text<|"|>,n:42}<tool_call|>``."""

    markers = (BEGIN, END, QUOTE)
    begins = (BEGIN,)
    between = ""

    def read(self, calls: Calls, begin: str) -> Steps[None]:
        reader, separator = calls.reader, ","
        while separator == ",":
            yield from reader.blanks()
            yield from reader.expect("call:")
            yield from self._call(calls)
            yield from reader.blanks()
            separator = yield from reader.expect(END, ",")

    def _call(self, calls: Calls) -> Steps[None]:
        reader = calls.reader
        name, opened = yield from reader.name(("{", BEGIN, END), calls.may_begin)
        if opened != "{":
            raise BrokenError
        calls.start(name.strip())
        arguments = ArgumentWriter(calls, name.strip())
        while True:
            yield from reader.blanks()
            ended = yield from reader.match("}", ",")
            if ended == "}":
                break
            if ended == ",":
                continue
            types = arguments.key((yield from GEMMA_VALUES.key(reader)))
            yield from reader.blanks()
            yield from GEMMA_VALUES.value(calls, types)
        arguments.close()
        calls.end()

    def call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        values = _Values(grammar, function.parameters)
        arguments = [values.object(branch) for branch in objects(function.parameters)]
        return grammar.around(f"{BEGIN}call:{function.name}", grammar.any_of(arguments), END)


class _Values:
    """Expressions for values of a schema in this notation.

    Args:
      grammar: gets the rules, one for each schema that is met, since schemas may refer to themselves.
      root: the schema of all arguments, to which references lead.
    """

    def __init__(self, grammar: CallGrammar, root: Mapping[str, Any]):
        self._grammar, self._root = grammar, root
        self._rules = dict[str, str]()

    def value(self, schema: Any) -> str:
        """An expression for a value.

        Raises:
          UnheldError: the notation cannot hold the schema.
        """
        key = json.dumps(schema, sort_keys=True)
        if key not in self._rules:
            self._rules[key] = name = self._grammar.reserve()
            ways = [way for branch in branches(schema, self._root) for way in self._ways(branch)]
            self._grammar.define(name, self._grammar.any_of(ways))
        return self._rules[key]

    def _ways(self, branch: Branch) -> list[str]:
        kind = branch.get("type")
        if kind is None:
            return [self._grammar.literal(_written(choice)) for choice in branch["enum"]]
        if kind == "string":
            text = self._grammar.text_until(QUOTE, (), string_expression(branch))
            return [f"{self._grammar.literal(QUOTE)} {text}"]
        if kind == "object":
            return [self.object(branch)]
        return [self._array(branch) if kind == "array" else self._grammar.json(branch)]

    def object(self, branch: Branch) -> str:
        """An expression for an object of the properties that the schema names, or of any if it names none."""
        grammar, (properties, others, required) = self._grammar, members(branch)
        if others is not None:
            entry = grammar.rule(f'/[A-Za-z_][\\w.\\-]{{0,63}}/ ":" {self.value(others)}')
            return grammar.around("{", f'({entry} ("," {entry})*)?', "}")
        parts = {name: grammar.around(f"{_key(name)}:", self.value(part)) for name, part in properties.items()}
        return grammar.around("{", grammar.listed(parts, required, ","), "}")

    def _array(self, branch: Branch) -> str:
        items, least, most = branch.get("items", True), branch.get("minItems", 0), branch.get("maxItems")
        for keyword in branch.keys() - {"type", "items", "minItems", "maxItems"}:
            raise UnheldError(keyword)
        if not isinstance(items, Mapping | bool):
            raise UnheldError("items", "one schema of all items in this format of calls")
        if most == 0 or items is False:
            return self._grammar.literal("[]")
        item, rest = self.value(items), "" if most is None else most - 1
        listed = item if most == 1 else f'{item} ("," {item}){{{max(least - 1, 0)},{rest}}}'
        return self._grammar.around("[", listed if least else f"({listed})?", "]")


def _key(name: str) -> str:
    if name != name.strip() or not name or ":" in name or QUOTE in name:
        raise UnheldError(name, "names without colons and blanks around them in this format of calls")
    return name if KEY.fullmatch(name) else f"{QUOTE}{name}{QUOTE}"


def _written(value: Any) -> str:
    """A value in this notation."""
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_key(name)}:{_written(part)}' for name, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, str) and any(marker in value for marker in (BEGIN, END, QUOTE)):
        raise UnheldError("enum", "values without the markers of this format of calls")
    return f"{QUOTE}{value}{QUOTE}" if isinstance(value, str) else json.dumps(value)


GEMMA4 = Gemma4()
