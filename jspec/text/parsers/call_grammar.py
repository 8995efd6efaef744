"""The grammar of tool calls in a format's own syntax, in llguidance's variant of Lark, for calls that are forced."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jspec.text.grammar.schema import closed

ANY_TEXT = r"(.|\n)*"
MOST_CHARACTERS = 2**20  # of the schemas in a grammar
# Terminals that every grammar defines once, since regular expressions are counted.
NEWLINE, NEWLINES = "NEWLINE", "NEWLINES"
SHARED = {NEWLINE: r"/\n?/", NEWLINES: r"/\n{0,2}/"}
BLANKS = "[ ]?"  # between the parts of JSON; weak models write lines of them without end


class Function(NamedTuple):
    """A tool of a request.

    Attributes:
      name: of the tool.
      parameters: the JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> "Function":
        """That of a tool in OpenAI's form, or of its function alone."""
        function = tool.get("function", tool)
        given = function.get("parameters")
        return cls(function["name"], {"type": "object", **given} if given else {"type": "object", "properties": {}})


class CallGrammar:
    """Writes the parts of a grammar: expressions of Lark, and the rules that they need.

    Args:
      tokens: the ids of the tokenizer's added tokens, by their text. Text that only looks like such a marker consists of
        other tokens, which parsers do not take for it, so the grammar asks for the token.
    """

    def __init__(self, tokens: Mapping[str, int]):
        self._tokens = {text: id for text, id in tokens.items() if text}
        by_length = sorted(self._tokens, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._rules: list[str] = []
        self._names = dict[str, str]()  # of rules and terminals, by their expressions
        self._size = 0

    def literal(self, text: str) -> str:
        """An expression for exactly this text."""
        parts, done = list[str](), 0
        for found in self._markers.finditer(text):
            parts += [json.dumps(text[done : found.start()])] if found.start() > done else []
            parts.append(f"<[{self._tokens[found[0]]}]>")
            done = found.end()
        return " ".join([*parts, json.dumps(text[done:])] if done < len(text) else parts)

    def text_until(self, end: str, without: Sequence[str] = (), text: str = f"/{ANY_TEXT}/") -> str:
        """An expression for a text, through the first ``end``.

        Args:
          without: what the text does not contain.
          text: an expression for terminals, for what it may be.
        """
        is_token = end in self._tokens
        parts = "|".join(map(re.escape, dict.fromkeys([*without, end])))  # llguidance takes some tokens for plain text
        parts = parts.replace("/", "\\/").replace("\n", "\\n")
        text = self._named("TEXT", f": ({text}) & ~/{ANY_TEXT}({parts}){ANY_TEXT}/")
        return f"{text} {self.literal(end)}" if is_token else self.rule(text, f"[suffix={json.dumps(end)}]")

    def json(self, schema: Mapping[str, Any]) -> str:
        """An expression for JSON of a schema, whose objects have no other properties than it names."""
        return self._counted(f"%json {json.dumps({**closed(schema), 'x-guidance': {'whitespace_pattern': BLANKS}})}")

    def _counted(self, text: str) -> str:
        """The text, if the grammar is not too large with it.

        Raises:
          ValueError: schemas that refer to themselves may make a small one grow without end.
        """
        self._size += len(text)
        if self._size > MOST_CHARACTERS:
            raise ValueError(f"its grammar has more than {MOST_CHARACTERS} characters")
        return text

    def json_of(self, schema: Any, root: Mapping[str, Any]) -> str:
        """An expression for JSON of a schema whose references lead to ``root``; one that is no mapping allows anything."""
        schema = schema if isinstance(schema, Mapping) else {}
        if '"$ref"' in json.dumps(schema):  # so the root comes along
            place = "#/$defs/arguments"
            schema = {**moved(schema, place), "$defs": {"arguments": moved(root, place)}}
        return self.json(schema)

    def listed(self, parts: Mapping[str, str], required: Collection[str], separator: str) -> str:
        """An expression for a list of the parts of all required names and then any of the others, with a text between."""
        between = self.literal(separator)
        needed = [part for name, part in parts.items() if name in required]
        optional = [part for name, part in parts.items() if name not in required]
        rest = [f" ({between} {part})?" for part in optional]
        if needed:
            return f" {between} ".join(needed) + "".join(rest)
        begun = [part + "".join(rest[i + 1 :]) for i, part in enumerate(optional)]
        return f"{self.any_of(begun)}?" if begun else ""

    def among_text(self, calls: str, without: Sequence[str]) -> str:
        """An expression for any text in which these calls may stand.

        Args:
          calls: what follows where one of ``without`` comes.
          without: markers that are tokens, which begin calls or belong to them.
        """
        others = sorted(id for text, id in self._tokens.items() if text not in without)
        tokens = f" | <[{','.join(map(str, others))}]>" if others else ""
        free = self.rule(f"(/(.|\\n)+/{tokens})*")
        return f"{free} ({calls} {free})*"

    def has(self, marker: str) -> bool:
        """Whether this text is a token."""
        return marker in self._tokens

    def around(self, begin: str, expression: str, end: str = "") -> str:
        """An expression between two texts."""
        return " ".join((self.literal(begin), expression, self.literal(end)))

    def json_object(self, function: Function, begin: str = "", end: str = "", key: str = "arguments") -> str:
        """An expression for a call that is a JSON object with ``name`` and ``key``, between two texts."""
        head = f'{begin}{{"name": {json.dumps(function.name)}, "{key}": '
        return self.around(head, self.json(function.parameters), f"}}{end}")

    def repeated(self, calls: Sequence[str], separator: str, several: bool) -> str:
        """An expression for one of these, or for one or more if there may be several.

        Args:
          separator: a text, or one of ``SHARED``, between them.
        """
        call = self.rule(self.any_of(calls))
        between = separator if separator in SHARED else self.literal(separator)
        return f"{call} ({between} {call})*" if several else call

    def any_of(self, expressions: Sequence[str]) -> str:
        return self._counted(f"({' | '.join(expressions)})")

    def rule(self, expression: str, attributes: str = "") -> str:
        """The name of a rule."""
        return self._named("rule", f"{attributes}: {expression}")

    def reserve(self) -> str:
        """The name of a new rule that ``define`` gives its expression, which may lead to the rule again."""
        self._rules.append("")
        return f"rule_{len(self._rules) - 1}"

    def define(self, name: str, expression: str):
        """Set the expression of a reserved rule."""
        self._rules[int(name.removeprefix("rule_"))] = f"{name}: {self._counted(expression)}"

    def _named(self, kind: str, line: str) -> str:
        if kind + line not in self._names:
            name = self._names[kind + line] = f"{kind}_{len(self._rules)}"
            self._rules.append(name + self._counted(line))
        return self._names[kind + line]

    def text(self, start: str) -> str:
        """The grammar of an expression."""
        return "\n".join((f"start: {start}", *self._rules, *(f"{name}: {text}" for name, text in SHARED.items())))


def moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own root, ``#..``, lead to ``place``."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return [moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    result = {name: moved(item, place) for name, item in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        result["$ref"] = place + reference[1:]
    return result
