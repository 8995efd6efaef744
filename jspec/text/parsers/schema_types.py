"""The types of a tool's parameters by its JSON schema, and values that models write as raw text."""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec.text.grammar.schema import referred

Types = frozenset[str]

TYPES = ("null", "integer", "number", "boolean", "object", "array", "string")
LARGEST = sys.float_info.max
MOST_SCHEMAS = 256  # that are read of one parameter
INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
TOKEN = re.compile(r"""-?[\w.]+|'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\"""", re.DOTALL)
PYTHON = re.compile(rf"(?:[\s\[\](){{}},:]|{TOKEN.pattern})*+", re.DOTALL)  # nothing that takes long to read
ESCAPE, ESCAPES = re.compile(r"\\(.)", re.DOTALL), "\\'\"abfnrtvxuU01234567"
JSON_WORDS = {"true": "True", "false": "False", "null": "None"}
LITERALS = frozenset({"null", "boolean", "object", "array"})
MOST_LITERAL = 65_536  # characters
JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def functions_by_name(tools: Sequence[Mapping]) -> dict[str, Mapping]:
    """The functions of a request's tools."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    return {str(function.get("name")): function for function in functions if isinstance(function, Mapping)}


def parameter_types(function: Mapping) -> dict[str, Types]:
    """The types that a function's schema allows for each parameter; none are known if it is empty."""
    root, types = function.get("parameters"), dict[str, Types]()
    for schema in _reached(root, root):
        properties = schema.get("properties")
        for name, parameter in properties.items() if isinstance(properties, Mapping) else ():
            types[str(name)] = types.get(str(name), frozenset()) | _types(parameter, root)
    return types


def _types(schema: Any, root: Any) -> Types:
    """The types of ``type``, ``enum``, ``const``, and of all schemas in ``anyOf``, ``oneOf``, ``allOf`` and ``$ref``."""
    types = set[str]()
    for part in _reached(schema, root):
        named = part.get("type")
        types.update(name for name in (named if isinstance(named, list | tuple) else [named]) if isinstance(name, str))
        values = part.get("enum")
        values = list(values) if isinstance(values, list | tuple) else []
        if "const" in part:
            values.append(part["const"])
        types.update(type_of(value) for value in values)
    return frozenset(types & set(TYPES))


def _reached(schema: Any, root: Any) -> Iterator[Mapping]:
    """A schema, and those that say something of the same value: in ``anyOf``, ``oneOf``, ``allOf`` and ``$ref``."""
    waiting, read = [schema], 0
    while waiting and read < MOST_SCHEMAS:
        schema, read = waiting.pop(), read + 1
        if not isinstance(schema, Mapping):
            continue
        yield schema
        for several in ("anyOf", "oneOf", "allOf"):
            if isinstance(schema.get(several), list | tuple):
                waiting += schema[several]
        if isinstance(schema.get("$ref"), str):
            waiting.append(referred(schema["$ref"], root))


def type_of(value: Any) -> str:
    kinds = ((bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (list | tuple, "array"))
    if value is None:
        return "null"
    return next((name for kind, name in kinds if isinstance(value, kind)), "object")


def finite_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
      ValueError: it is no JSON, or it is too deep.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a call's arguments are the JSON of; None if they are no such JSON, because the model was cut or wrote
    something else. In its strings U+FFFD stands for each half of a surrogate pair, which is no character."""
    try:
        value = finite_json(text)
        if "\\u" in text:
            written = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass")
            value = json.loads(written.decode("utf-16", "replace"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    """A number of JSON; the largest where it is too large for a float."""
    return max(-LARGEST, min(float(text), LARGEST))


def raw_to_json(text: str, types: Types) -> str:
    """The JSON of a value that the model wrote as raw text.

    The types are tried in the order of ``TYPES``. Where there may be no string, Python's literals are read, too. A text that
    is of none of the types is JSON if it can be read as such, and else a string. JSON stays as it is written.
    """
    word = text.strip()
    for kind in TYPES:
        if kind in types and (value := _as(kind, text, word)) is not None:
            return value
    if "string" not in types and (literal := _of_python(word, types & LITERALS)) is not None:
        return literal
    try:
        finite_json(word)
        return word
    except ValueError:
        return json.dumps(text, ensure_ascii=False)


def _of_python(word: str, types: Types) -> str | None:
    """The JSON of a literal of Python of one of these types; None if it is none, or a large one."""
    if not types or len(word) > MOST_LITERAL or not PYTHON.fullmatch(word):
        return None
    try:
        value = ast.literal_eval(TOKEN.sub(_as_python, word))
        return json.dumps(value, allow_nan=False, ensure_ascii="\\u" in word) if type_of(value) in types else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _as_python(token: re.Match) -> str:
    """A word of JSON as Python writes it; a string with escapes for newlines, and without those that Python warns of."""
    text = ESCAPE.sub(lambda found: found[0] if found[1] in ESCAPES else f"\\{found[0]}", token[0])
    return JSON_WORDS.get(text, text.replace("\n", "\\n"))


def _as(kind: str, text: str, word: str) -> str | None:
    if kind == "null":
        return "null" if text.lower() == "null" else None
    if kind == "integer":
        return str(int(word)) if INTEGER.fullmatch(word) else None
    if kind == "number":
        return _number(word)
    if kind == "boolean":
        return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(word.lower())
    if kind == "string":
        return json.dumps(text, ensure_ascii=False)
    try:
        return word if isinstance(finite_json(word), dict if kind == "object" else list) else None
    except ValueError:
        return None


def _number(word: str) -> str | None:
    if JSON_NUMBER.fullmatch(word):
        return word
    if not NUMBER.fullmatch(word) or abs(float(word)) == float("inf"):
        return None
    return str(int(word)) if INTEGER.fullmatch(word) else repr(float(word))
