"""Grammars that a stranger might send to do harm, each as fields of ``StructuredOutputsParams``."""

from typing import Any


def _chain(link, length: int) -> dict[str, Any]:
    """A schema whose definitions refer to each other in a row."""
    names = [f"#/$defs/d{i}" for i in range(length + 1)]
    defs = {f"d{i}": link({"$ref": names[i + 1]}) for i in range(length)}
    return {"json": {"$defs": {**defs, f"d{length}": {"type": "string"}}, "$ref": names[0]}}


def _rules(count: int) -> dict[str, Any]:
    links = "".join(f"r{i}: r{i + 1}\n" for i in range(count))
    return {"grammar": f'start: r0\n{links}r{count}: "a"\n'}


def _nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


# Name -> the grammar, and what the refusal says.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "rules in a row": (_rules(3000), "3002 rules: expected at most 1000"),
    "properties in a row": (_chain(lambda r: {"properties": {"a": r}}, 900), "at most 512"),
    "items in a row": (_chain(lambda r: {"items": r}, 1300), "at most 512"),
    "choices in a row": (_chain(lambda r: {"anyOf": [r, {"type": "null"}]}, 1000), "at most 512"),
    "a deep schema": ({"json": _nested(900)}, "levels deep: expected at most 64"),
    "a deep schema in Lark": ({"grammar": f"start: %json {_nested(900)}"}, "levels deep: expected at most 64"),
    "deep brackets": ({"grammar": "start: " + "(" * 900 + '"a"' + ")" * 900}, "levels deep: expected at most 64"),
    "deep groups": ({"regex": "(" * 5000 + "a" + ")" * 5000}, "no usable grammar"),
    "patterns": ({"json": {"allOf": [{"pattern": "a"}] * 300}}, "300 patterns: expected at most 256"),
    "a string that is not closed": ({"grammar": "start: " + '\\"' * 15_000}, "no usable grammar"),
    "a rule that is itself": ({"grammar": "start: start"}, "no text fits it"),
    "a schema that is itself": ({"json": {"$ref": "#"}}, "no text fits it"),
    "optional and not": ({"regex": "(a?){1000}a{1000}"}, "no usable grammar"),
    "3,000 properties": (
        {"json": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}}},
        "no usable grammar",
    ),
    "2,500 texts": ({"choice": [f"text {i}" for i in range(2500)]}, "no usable grammar"),
    "a million times": ({"regex": "(a{1000}){1000}"}, "no usable grammar"),
}


def _patterns(first: int) -> dict[str, Any]:
    """Sixteen patterns at a time, whose states multiply."""
    return {"json": {"allOf": [{"pattern": f"(.*[a-{chr(97 + first + i % 8)}{i}]){{30}}.*"} for i in range(16)]}}


# Four that do not end: they differ, so that none is found to be another.
ENDLESS = [_patterns(first) for first in range(1, 5)]
