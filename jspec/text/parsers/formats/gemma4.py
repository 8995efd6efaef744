"""Calls of Gemma 4, whose strings stand between markers."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
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


@dataclasses.dataclass(frozen=True)
class Gemma4(ToolFormat):
    """``<|tool_call>call:f{k:<|"|>text<|"|>,n:42}<tool_call|>``."""

    @property
    def markers(self) -> tuple[str, ...]:
        return (BEGIN, END, QUOTE)

    @property
    def begins(self) -> tuple[str, ...]:
        return (BEGIN,)

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
            yield from GEMMA_VALUES.parameter(calls, types)
        arguments.close()
        calls.end()

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], several: bool) -> str:
        calls = []
        for name, parameters in functions:
            values = _Values(grammar, parameters)
            arguments = [values.object(branch) for branch in objects(parameters)]
            calls.append(grammar.around(f"{BEGIN}call:{name}", grammar.any_of(arguments), END))
        return grammar.repeated(calls, "", several)


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
        known = json.dumps(schema, sort_keys=True)
        if known not in self._rules:
            self._rules[known] = name = self._grammar.reserve()
            ways = [way for branch in branches(schema, self._root) for way in self._ways(branch)]
            self._grammar.define(name, self._grammar.any_of(ways))
        return self._rules[known]

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
        parts = {name: grammar.around(f"{_key(name)}:", self.value(part), "") for name, part in properties.items()}
        needed, others = ([parts[n] for n in parts if (n in required) == there] for there in (True, False))
        return grammar.around("{", grammar.listed(needed, others, ","), "}")

    def _array(self, branch: Branch) -> str:
        known = {"type", "items", "prefixItems", "additionalItems", "minItems", "maxItems"}
        for keyword in branch.keys() - known:
            raise UnheldError(keyword)
        items, first = branch.get("items", True), branch.get("prefixItems", ())
        if isinstance(items, list | tuple):  # as JSON Schema had it before 2020
            items, first = branch.get("additionalItems", True), items
        least, most = branch.get("minItems", 0), branch.get("maxItems")
        return self._grammar.around("[", self._items(list(first), items, 0, least, most), "]")

    def _items(self, first: list[Any], items: Any, place: int, least: int, most: int | None) -> str:
        """An expression for the items from a place on, with the comma before it."""
        if most is not None and place >= most:
            return ""
        comma = '","' if place else ""
        if place < len(first):
            rest = f"{comma} {self.value(first[place])} {self._items(first, items, place + 1, least, most)}"
            return rest if place < least else f"({rest})?"
        if items is False:
            return ""
        item = self.value(items)
        if not place:
            rest = f"{item} {self._items(first, items, 1, least, most)}"
            return rest if least else f"({rest})?"
        until = "" if most is None else most - place
        return f"({comma} {item}){{{max(least - place, 0)},{until}}}"


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
