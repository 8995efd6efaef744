"""Calls of Gemma 4, whose strings stand between markers."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.text.parsers.argument_writer import ArgumentWriter
from jspec.text.parsers.call_grammar import CallGrammar, Function
from jspec.text.parsers.calls import Calls
from jspec.text.parsers.formats.python_values import PYTHON_VALUES
from jspec.text.parsers.literals import Notation
from jspec.text.parsers.reader import BrokenError, Reader, Sink, Steps
from jspec.text.parsers.schema_types import referred
from jspec.text.parsers.tool_format import ToolFormat

KEY = re.compile(r"[\w.\-]+")
MOST_LEVELS = 16  # of a schema and its references
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
        return "null" if text == "None" else text  # which the chat template writes for it


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

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], several: bool) -> str | None:
        calls = []
        for name, parameters in functions:
            if not all(map(KEY.fullmatch, parameters.get("properties") or {})):
                return None
            values = _Values(grammar, parameters)
            arguments = values.object(parameters, 0)
            calls.append(grammar.around(f"{BEGIN}call:{name}", arguments, END))
        return grammar.repeated(calls, "", several)


class _Values:
    """Expressions for values of a schema in this notation.

    Args:
      grammar: gets the rules.
      root: the schema of all arguments, to which references lead.
    """

    def __init__(self, grammar: CallGrammar, root: Mapping[str, Any]):
        self._grammar, self._root = grammar, root

    def object(self, schema: Mapping[str, Any], depth: int) -> str:
        """An expression for an object of the properties that the schema names."""
        grammar, required, parts = self._grammar, schema.get("required") or (), {}
        for name, part in (schema.get("properties") or {}).items():
            parts[name] = grammar.around(f"{name}:", self.value(part, depth + 1), "")
        needed, others = ([parts[n] for n in parts if (n in required) == there] for there in (True, False))
        return grammar.around("{", grammar.listed(needed, others, ","), "}")

    def value(self, schema: Any, depth: int) -> str:
        """An expression for a value. What lies too deep in references may be any scalar."""
        grammar = self._grammar
        if not isinstance(schema, Mapping) or depth > MOST_LEVELS:
            return grammar.any_of([self._text(), grammar.json({"type": ["number", "boolean", "null"]})])
        if isinstance(schema.get("$ref"), str):
            return self.value(referred(schema["$ref"], self._root), depth + 1)
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, Sequence) and choices:
            return grammar.any_of([self._choice(choice) for choice in choices])
        for several in ("anyOf", "oneOf"):
            if isinstance(schema.get(several), Sequence) and schema[several]:
                return grammar.any_of([self.value(part, depth + 1) for part in schema[several]])
        types = schema.get("type")
        if isinstance(types, Sequence) and not isinstance(types, str) and types:
            return grammar.any_of([self.value({**schema, "type": kind}, depth + 1) for kind in types])
        if types == "string":
            return self._text()
        if types == "object":
            return self.object(schema, depth)
        if types == "array":
            item = grammar.rule(self.value(schema.get("items"), depth + 1))
            most = schema.get("maxItems")
            times = "*" if not isinstance(most, int) else f"{{0,{max(most - 1, 0)}}}"
            items = "" if most == 0 else f"({item} ({grammar.literal(',')} {item}){times})?"
            return grammar.around("[", items, "]")
        if types in ("integer", "number", "boolean", "null"):
            return grammar.json(schema)
        return self.value(None, depth)

    def _text(self) -> str:
        return f"{self._grammar.literal(QUOTE)} {self._grammar.text_until(QUOTE)}"

    def _choice(self, choice: Any) -> str:
        text = f"{QUOTE}{choice}{QUOTE}" if isinstance(choice, str) else json.dumps(choice)
        return self._grammar.literal(text)


GEMMA4 = Gemma4()
