"""The grammar of arguments that models write as raw text: what may be written is read back as a value of the schema."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from jspec.text.parsers.branches import Branch, UnheldError, branches, members, objects
from jspec.text.parsers.call_grammar import ANY_TEXT, NEWLINE, CallGrammar, Function
from jspec.text.parsers.schema_types import TYPES, Types, parameter_types, raw_to_json
from jspec.text.parsers.string_grammar import string_expression

ANY_KEY = r"/[^<>\"\s]{1,64}/"  # of an argument that the schema does not name
KEY = re.compile(r"""[^\s<>"'](?:[^<>"'\n]*[^\s<>"'])?""")
# Text that is read as of another type, with blanks around it, where a value may be a string, too.
READ_AS = {
    "null": r"/(?i:null|none)/",
    "boolean": r"/(?i:true|false|[01])/",
    "array": rf"/\[{ANY_TEXT}/",
    "object": rf"/\{{{ANY_TEXT}/",
}
WRITTEN = {"null": '"null"', "boolean": '"true" | "false"'}  # what is written of such a type instead
BLANKS = r"/[\s\x1c-\x1f]*/"
NO_EDGES = r"~/\n(.|\n)*/ & ~/(.|\n)*\n/"

Argument = Callable[[str, str, bool], str]


@dataclasses.dataclass(frozen=True)
class RawArguments:
    """Expressions for the arguments of a call.

    Attributes:
      grammar: gets the rules.
      function: whose arguments they are.
      end: the marker behind a value.
      without: markers that a value does not contain.
      newlines: whether one newline at each end of a value is markup.
      typed: whether the format says of each value if it is a string.
    """

    grammar: CallGrammar
    function: Function
    end: str
    without: Sequence[str]
    newlines: bool = False
    typed: bool = False

    @functools.cached_property
    def _types(self) -> dict[str, Types]:
        return parameter_types({"parameters": self.function.parameters})

    def all(self, argument: Argument) -> str:
        """An expression for all arguments, in the order of the schema.

        Args:
          argument: makes the expression of one, of those for its key and for its value through ``end``, and of whether
            the value is a string.

        Raises:
          UnheldError: the format cannot hold the schema.
        """
        return self.grammar.any_of([self._object(branch, argument) for branch in objects(self.function.parameters)])

    def _object(self, branch: Branch, argument: Argument) -> str:
        properties, others, required = members(branch)
        if others is not None:
            return f"({self._one_of(ANY_KEY, '', others, argument)})*"
        parts = []
        for name, schema in properties.items():
            if not KEY.fullmatch(name):
                raise UnheldError(name, "names without quotes and brackets in this format of calls")
            part = self._one_of(self.grammar.literal(name), name, schema, argument)
            parts.append(part if name in required else f"({part})?")
        return " ".join(parts)

    def _one_of(self, key: str, name: str, schema: Any, argument: Argument) -> str:
        types = self._types.get(name, frozenset())
        if types and "string" not in types:
            return argument(key, self._until_end([self.grammar.json_of(schema, self.function.parameters)]), False)
        alternatives = branches(schema, self.function.parameters)
        strings = [branch for branch in alternatives if branch.get("type") == "string"]
        other_branches = [branch for branch in alternatives if branch.get("type", "string") != "string"]
        choices = [choice for branch in alternatives for choice in branch.get("enum", ())]
        if not self.typed:
            return argument(key, self._text(strings, other_branches, choices, types), True)
        texts = [choice for choice in choices if isinstance(choice, str)]
        values = [choice for choice in choices if not isinstance(choice, str)]
        ways, other_branches = [], [*other_branches, *([{"enum": values}] if values else [])]
        if strings or texts:
            ways.append(argument(key, self._text(strings, [], texts, frozenset({"string"})), True))
        if other_branches:
            ways.append(argument(key, self._until_end(self._json(other_branches)), False))
        return self.grammar.any_of(ways)

    def _text(self, strings: list[Branch], others: list[Branch], choices: list[Any], types: Types) -> str:
        """An expression for a value that may be a string.

        Args:
          strings, others: the branches of strings and of other values.
          choices: values that the schema lists.
          types: as which the text is read.
        """
        pairs = [(choice if isinstance(choice, str) else json.dumps(choice), choice) for choice in choices]
        words = [text for text, value in pairs if self._is_read(text, value, types)]
        if not strings:
            return self._until_end([*map(self.grammar.literal, words), *self._json(others)])
        kinds = set(types or TYPES) - {"string"}
        plain = {branch["type"] for branch in (*strings, *others) if branch.keys() == {"type"}}
        if {"string", *kinds} <= plain | ({"integer"} if "number" in plain else set()):  # so any text will do
            return self.grammar.text_until(self.end, self.without)
        if kinds & {"integer", "number"}:  # of which text is not told before its end
            raise UnheldError("type", "no numbers beside limited strings, or the reverse, in this format of calls")
        limited = [branch for branch in others if branch["type"] not in WRITTEN]
        without = "".join(f" & ~({BLANKS} {READ_AS[kind]} {BLANKS})" for kind in READ_AS if kind in kinds)
        exact = [*map(json.dumps, words), *(WRITTEN[kind] for kind in WRITTEN if kind in plain)]
        ways = [f"({self._padded(branch)}{without})" for branch in strings]
        ways += [self._pad(" | ".join(exact))] if exact else []
        text = self.grammar.text_until(self.end, self.without, " | ".join(ways))
        return self.grammar.any_of([text, self._until_end(self._json(limited))]) if limited else text

    def _padded(self, branch: Branch) -> str:
        """An expression for a string and the newlines around it, which do not belong to it."""
        text = f"({string_expression(branch)})"
        may_shrink = self.newlines and branch.keys() & {"minLength", "pattern", "format"}
        return self._pad(f"{text} & {NO_EDGES}") if may_shrink else text

    def _pad(self, text: str) -> str:
        return f"({NEWLINE} ({text}) {NEWLINE})" if self.newlines else f"({text})"

    def _is_read(self, text: str, value: Any, types: Types) -> bool:
        """Whether a text is read as this value."""
        edges = self.newlines and (text.startswith("\n") or text.endswith("\n"))
        marked = any(marker in text for marker in (self.end, *self.without))
        return not edges and not marked and json.loads(raw_to_json(text, types)) == value

    def _json(self, found: list[Branch]) -> list[str]:
        schema = found[0] if len(found) == 1 else {"anyOf": found}
        return [self.grammar.json_of(schema, self.function.parameters)] if found else []

    def _until_end(self, values: list[str]) -> str:
        newline = NEWLINE if self.newlines else ""
        if not values:
            raise UnheldError("enum", "a value that can be written in this format of calls")
        return f"{newline} {self.grammar.any_of(values)} {newline} {self.grammar.literal(self.end)}"
