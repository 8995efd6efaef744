"""The alternatives of a JSON schema, each without references: what has to be known where values are no JSON."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jspec.text.parsers.schema_types import TYPES, referred, type_of

Branch = Mapping[str, Any]

MOST_BRANCHES = 256
NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# The keywords that say something of values of a type; each is silent about other types.
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "null": (),
    "boolean": (),
    "integer": NUMERIC,
    "number": NUMERIC,
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains")
    + ("minContains", "maxContains", "unevaluatedItems"),
    "object": ("properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties")
    + ("maxProperties", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
}
TYPED = {keyword for keywords in KEYWORDS.values() for keyword in keywords}
NEVER = ("not", "if", "then", "else", "$dynamicRef", "$recursiveRef")
LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")  # of two holds the larger one
SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


class UnheldError(ValueError):
    """A schema says something that a format of calls cannot hold."""


def branches(schema: Any, root: Any, within: tuple[str, ...] = ()) -> list[Branch]:
    """Schemas one of which a value has to match. Each has one ``type`` or an ``enum``, and keywords of that type.

    Args:
      schema: with ``$ref``, ``allOf``, ``anyOf``, ``oneOf``, lists of types, ``const``, or without a type.
      root: where references lead.
      within: the references that led here; one that leads to itself adds nothing.

    Raises:
      UnheldError: the schema says something that cannot be told so.
    """
    if not isinstance(schema, Mapping):
        return [] if schema is False else [{"type": kind} for kind in TYPES if kind != "integer"]
    for keyword in NEVER:
        if keyword in schema:
            raise UnheldError(f"{keyword!r} in the schema of a tool: this format of calls cannot hold it")
    found = _of_types({**schema, "enum": [schema["const"]]} if "const" in schema else schema)
    if isinstance(reference := schema.get("$ref"), str):
        if reference in within:
            return []
        if (target := referred(reference, root)) is None:
            raise UnheldError(f"$ref={reference!r} in the schema of a tool: expected a part of the schema")
        found = _both(found, branches(target, root, (*within, reference)))
    for part in schema.get("allOf", ()):
        found = _both(found, branches(part, root, within))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            parts = [branches(part, root, within) for part in schema[keyword]]
            if keyword == "oneOf":
                _require_apart(parts, root)
            found = _both(found, [branch for part in parts for branch in part])
    return found


def _of_types(schema: Branch) -> list[Branch]:
    """The branches of what the schema says itself, one for each type; values of an ``enum`` are together."""
    named = schema.get("type", [kind for kind in TYPES if kind != "integer"])
    kinds = [named] if isinstance(named, str) else named
    if isinstance(schema.get("enum"), list | tuple):
        choices = [value for value in schema["enum"] if any(_is_of(value, kind) for kind in kinds)]
        _require_alone(schema)
        return [{"enum": choices}] if choices else []
    return [{"type": kind, **{key: schema[key] for key in KEYWORDS.get(kind, ()) if key in schema}} for kind in kinds]


def _is_of(value: Any, kind: str) -> bool:
    is_whole = isinstance(value, float) and value.is_integer()
    return (
        type_of(value) == kind or (kind == "number" and type_of(value) == "integer") or (kind == "integer" and is_whole)
    )


def _require_alone(schema: Branch):
    """Check that nothing else limits the values of an ``enum``."""
    if limits := [keyword for keyword in schema if keyword in TYPED]:
        raise UnheldError(f"{limits[0]!r} beside 'enum' in the schema of a tool: expected the values alone")


def _require_apart(parts: Iterable[list[Branch]], root: Any):
    """Check that no value matches two schemas of ``oneOf``: types, values, or those of a required property tell them apart."""
    seen: list[Branch] = []
    for part in parts:
        for branch in part:
            if any(merged(branch, other) and not _are_told_apart(branch, other, root) for other in seen):
                raise UnheldError(
                    "'oneOf' in the schema of a tool: expected 'anyOf' where a value may match two schemas"
                )
        seen += part


def _are_told_apart(one: Branch, other: Branch, root: Any) -> bool:
    names = set(one.get("required", ())) & set(other.get("required", ()))
    pairs = [[branch.get("properties", {}).get(name, True) for branch in (one, other)] for name in names]
    return any(not branches({"allOf": pair}, root) for pair in pairs)


def _both(ones: list[Branch], others: list[Branch]) -> list[Branch]:
    if len(ones) * len(others) > MOST_BRANCHES * len(TYPES):
        raise UnheldError(f"the schema of a tool has more than {MOST_BRANCHES} alternatives at one place")
    return [both for one in ones for other in others if (both := merged(one, other)) is not None]


def merged(one: Branch, other: Branch) -> Branch | None:
    """A branch for values that match both; None if there are none.

    Raises:
      UnheldError: both say something of the same kind that does not go together in one schema.
    """
    for first, second in ((one, other), (other, one)):
        if "enum" in first:
            kinds = [second["type"]] if "type" in second else None
            among = second.get("enum", first["enum"])
            left = [v for v in first["enum"] if _is_in(v, among) and (not kinds or _is_of(v, kinds[0]))]
            _require_alone(second)
            return {"enum": left} if left else None
    kinds = {one["type"], other["type"]}
    if len(kinds) > 1 and kinds != {"integer", "number"}:
        return None
    result = {**one, **other, "type": min(kinds)}  # an integer is a number, too
    for key in one.keys() & other.keys() - {"type"}:
        result[key] = _merged_value(key, one[key], other[key])
    if "properties" in one and "properties" in other and not (_is_open(one) and _is_open(other)):
        raise UnheldError(
            "'allOf' in the schema of a tool: expected no 'additionalProperties' where objects come together"
        )
    return result


def _merged_value(key: str, one: Any, other: Any) -> Any:
    if one == other:
        return one
    if key in LARGER or key in SMALLER:
        return (max if key in LARGER else min)(one, other)
    if key == "required":
        return [*one, *(name for name in other if name not in one)]
    if key == "properties":
        return {**one, **{name: {"allOf": [one[name], part]} if name in one else part for name, part in other.items()}}
    if key in ("items", "additionalProperties"):
        return {"allOf": [one, other]}
    raise UnheldError(f"{key!r} in the schema of a tool has two values that hold together: {one!r} and {other!r}")


def _is_open(branch: Branch) -> bool:
    return branch.get("additionalProperties", True) is not False and "patternProperties" not in branch


def _is_in(value: Any, choices: Iterable[Any]) -> bool:
    return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in choices)


def objects(parameters: Mapping[str, Any]) -> list[Branch]:
    """The branches of a tool's arguments.

    Raises:
      UnheldError: they are no object.
    """
    found = [branch for branch in branches(parameters, parameters) if branch.get("type") == "object"]
    if not found:
        raise UnheldError("the parameters of a tool have to be an object")
    return found


def members(branch: Branch) -> tuple[dict[str, Any], Any, Sequence[str]]:
    """The schemas of an object's properties by name, that of others where it names none, or None, and the required names.

    Raises:
      UnheldError: the object has to be counted, or has patterns for names.
    """
    known = {"type", "properties", "required", "additionalProperties"}
    if other := next((keyword for keyword in branch if keyword not in known), None):
        raise UnheldError(f"{other!r} in the schema of a tool: this format of calls cannot hold it")
    others, required = branch.get("additionalProperties", True), branch.get("required", ())
    properties = {**dict.fromkeys(required, others), **branch.get("properties", {})}
    properties = {name: properties[name] for name in [*branch.get("properties", {}), *properties]}
    return properties, None if properties or "properties" in branch or others is False else others, required
