"""Limits of a grammar's compilation, and static checks that refuse large grammars before they are compiled."""

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from jspec._validation import is_number, require
from jspec.sampling.structured import StructuredOutputsParams

MAX_BYTES = 2**20  # of a grammar
MAX_DEPTH = 64  # of the objects and lists of a schema, and of the brackets of a Lark grammar
MAX_REFERENCES = 512  # different values of ``$ref`` in a schema
MAX_PATTERNS = 256  # regular expressions in a schema or in a Lark grammar
MAX_RULES = 1000  # rules and terminals of a Lark grammar

# Comments, strings and regular expressions of Lark. One that is not closed ends with its line: each alternative matches
# wherever it begins, and gives nothing back (``++``), so that no text is looked at twice.
_STRINGS = re.compile(r'//[^\n]*+|"(?:\\.|[^"\\\n])*+"?+i?|/(?:\\.|[^/\\\n])++/?+[imslux]*+')
_RULE = re.compile(r"^[ \t]*+[?!]?+[A-Za-z_][^:\n|]*+:", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class GrammarLimits:
    """Limits of the compilation of one grammar, and how many are compiled at a time.

    Compiling happens in a child process (``jspec.text.grammar.worker``). A grammar that exceeds ``seconds`` or
    ``memory`` there is refused permanently. If no child is free, the client may try again.

    Attributes:
      seconds: the most CPU seconds of compiling and of the first tokens.
      memory: the most bytes of both, in addition to the tokenizer.
      wait: the most seconds of waiting for a free child; None is any time.
      children: how many grammars are compiled at a time.

    Raises:
      ValueError: a value is out of range.
    """

    seconds: float = 3.0
    memory: int = 256 * 2**20
    wait: float | None = None
    children: int = 2

    def __post_init__(self):
        for name in ("seconds", "memory", "children"):
            value = getattr(self, name)
            require(is_number(value) and value > 0, name, value, "a number above 0")
        require(self.wait is None or (is_number(self.wait) and self.wait > 0), "wait", self.wait, "a number above 0")


def check_size(asked: StructuredOutputsParams):
    """Check depth and the numbers of rules, patterns and references of a schema or grammar, in linear time.

    The limits are above those of grammars in use. A grammar that passes may still exceed the limits of compilation.

    Raises:
      ValueError: one sentence with the number that is too large, and its limit.
    """
    if asked.json is not None:
        try:
            schema = json.loads(asked.json)
        except RecursionError:  # which depends on how deep the caller's own stack is
            raise ValueError(f"its schema is nested too deeply: expected at most {MAX_DEPTH} levels") from None
        _check_schema(schema)
    elif asked.grammar is not None:
        _check_lark(asked.grammar)
    for grammar in (asked.preamble, asked.alternative):
        if grammar is not None:
            _check_lark(grammar)


def _check_schema(schema: Any):
    references, patterns = set(), 0
    for depth, part in _parts(schema):
        _require_at_most("its schema is nested", depth, MAX_DEPTH, "levels deep")
        if isinstance(part, dict):
            reference, named = part.get("$ref"), part.get("patternProperties")
            patterns += isinstance(part.get("pattern"), str) + (len(named) if isinstance(named, dict) else 0)
            if isinstance(reference, str):
                references.add(reference)
    _require_at_most("its schema refers ($ref) to", len(references), MAX_REFERENCES, "parts")
    _require_at_most("its schema has", patterns, MAX_PATTERNS, "patterns")


def _parts(schema: Any) -> Iterator[tuple[int, Any]]:
    """The schema and everything in it, level by level, each with its depth, the schema's being 0."""
    level, depth = [schema], 0
    while level:
        yield from ((depth, part) for part in level)
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level, depth = [part for parts in inner for part in parts], depth + 1


def _check_lark(grammar: str):
    quoted = [found[0] for found in _STRINGS.finditer(grammar)]
    patterns = sum(text.startswith("/") and not text.startswith("//") for text in quoted)
    _require_at_most("it has", patterns, MAX_PATTERNS, "regular expressions")
    plain = _STRINGS.sub("", grammar)
    _require_at_most("it has", len(_RULE.findall(plain)), MAX_RULES, "rules")
    depth = deepest = 0
    for bracket in re.findall(r"[()\[\]{}]", plain):
        depth += 1 if bracket in "([{" else -1
        deepest = max(deepest, depth)
    _require_at_most("its brackets are nested", deepest, MAX_DEPTH, "levels deep")


def _require_at_most(what: str, count: int, most: int, unit: str):
    if count > most:
        raise ValueError(f"{what} {count} {unit}: expected at most {most}")
