"""The alternatives of a JSON schema, each without references: for grammars of values that are no JSON."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec.text.grammar.schema import referred
from jspec.text.parsers.schema_types import TYPES, type_of

Branch = Mapping[str, Any]

MOST_BRANCHES = 1024
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
COUNTED = ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems")
NAMED = ("patternProperties", "propertyNames", "minProperties", "maxProperties", "unevaluatedProperties")
DEPENDENT = ("dependentRequired", "dependentSchemas", "dependencies")
# The keywords that say something of values of a type; each is silent about other types.
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "integer": NUMERIC,
    "number": NUMERIC,
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", *COUNTED),
    "object": ("properties", "required", "additionalProperties", *NAMED, *DEPENDENT),
}
TYPED = {keyword for keywords in KEYWORDS.values() for keyword in keywords}
NEVER = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")


class UnheldError(ValueError):
    """A tool's schema says something that a format of calls cannot hold.

    Args:
      keyword: of the schema, or a name.
      expected: what can be held, or what it is held in.
    """

    def __init__(self, keyword: str, expected: str = "a schema without it in this format of calls"):
        super().__init__(f"{keyword!r} in the schema of a tool: expected {expected}")


def branches(schema: Any, root: Any, within: tuple[str, ...] = ()) -> list[Branch]:
    """Schemas one of which a value has to match: each has one ``type`` and keywords of it, or an ``enum`` alone.

    Args:
      schema: with ``$ref``, ``allOf``, ``anyOf``, ``oneOf``, lists of types, ``const``, or without a type.
      root: where references lead.
      within: the references that led here; one that leads to itself adds nothing.

    Raises:
      UnheldError: the schema says something that cannot be told so.
    """
    if not isinstance(schema, Mapping):
        return [] if schema is False else branches({}, root)
    for keyword in NEVER:
        if keyword in schema:
            raise UnheldError(keyword)
    alternatives = _of_types({**schema, "enum": [schema["const"]]} if "const" in schema else schema)
    if isinstance(reference := schema.get("$ref"), str):
        target = referred(reference, root)
        if target is None:
            raise UnheldError(reference, "references to parts of the schema")
        alternatives = [] if reference in within else _both(alternatives, branches(target, root, (*within, reference)))
    for part in schema.get("allOf", ()):
        alternatives = _both(alternatives, branches(part, root, within))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            parts = [branches(part, root, within) for part in schema[keyword]]
            kinds = [[{"type": one["type"]} if "type" in one else one for one in part] for part in parts]
            if keyword == "oneOf" and any(_both(one, other) for one, other in itertools.combinations(kinds, 2)):
                raise UnheldError(keyword, "'anyOf' where a value may match two schemas")
            alternatives = _both(alternatives, [branch for part in parts for branch in part])
    return alternatives


def _of_types(schema: Branch) -> list[Branch]:
    """The branches of what a schema says by itself."""
    named = schema.get("type", [kind for kind in TYPES if kind != "integer"])
    kinds = [named] if isinstance(named, str) else named
    if isinstance(schema.get("enum"), list | tuple):
        return _listed(schema["enum"], kinds, schema)
    return [{"type": kind, **{key: schema[key] for key in KEYWORDS.get(kind, ()) if key in schema}} for kind in kinds]


def _listed(values: Iterable[Any], kinds: Sequence[str], beside: Branch) -> list[Branch]:
    """The branch of the values that are of these types."""
    if other := next((keyword for keyword in beside if keyword in TYPED), None):
        raise UnheldError(other, "the values of 'enum' alone")
    left = [value for value in values if any(_is_of(value, kind) for kind in kinds)]
    return [{"enum": left}] if left else []


def _is_of(value: Any, kind: str) -> bool:
    is_whole = isinstance(value, float) and value.is_integer()
    return kind == type_of(value) or (kind, type_of(value)) == ("number", "integer") or (kind == "integer" and is_whole)


def _both(ones: list[Branch], others: list[Branch]) -> list[Branch]:
    """The branches of values that match one of each."""
    if len(ones) * len(others) > MOST_BRANCHES:
        raise UnheldError("anyOf", f"at most {MOST_BRANCHES} alternatives at one place")
    return [both for one in ones for other in others for both in _merged(one, other)]


def _merged(one: Branch, other: Branch) -> list[Branch]:
    if "enum" in one and "enum" in other:
        same = [value for value in one["enum"] if any(value == found for found in other["enum"])]
        return _listed(same, TYPES, {})
    if "enum" in one or "enum" in other:
        values, typed = (one, other) if "enum" in one else (other, one)
        return _listed(values["enum"], [typed["type"]], typed)
    kinds = {one["type"], other["type"]}
    if len(kinds) > 1 and kinds != {"integer", "number"}:
        return []
    if len(one) > 1 and len(other) > 1 and one != other:
        raise UnheldError("allOf", "limits in one alone of the schemas that hold together")
    return [{**one, **other, "type": min(kinds)}]  # an integer is a number, too


def objects(parameters: Mapping[str, Any]) -> list[Branch]:
    """The branches of a tool's arguments.

    Raises:
      UnheldError: they are no object.
    """
    alternatives = [branch for branch in branches(parameters, parameters) if branch.get("type") == "object"]
    if not alternatives:
        raise UnheldError("type", "an object")
    return alternatives


def members(branch: Branch) -> tuple[dict[str, Any], Any, Sequence[str]]:
    """The schemas of an object's properties by name, that of others where it names none, or None, and the required names.

    Raises:
      UnheldError: the object has to be counted, or has patterns for names.
    """
    for keyword in branch.keys() - {"type", "properties", "required", "additionalProperties"}:
        raise UnheldError(keyword)
    others, required = branch.get("additionalProperties", True), branch.get("required", ())
    named = branch.get("properties", {})
    properties = {**named, **{name: others for name in required if name not in named}}
    return properties, None if properties or "properties" in branch or others is False else others, required
