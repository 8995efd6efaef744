"""Closes the objects of a JSON schema that name their properties and do not say whether there may be others."""

from collections.abc import Iterator, Mapping
from typing import Any

# Keywords with schemas for parts of a value: one schema, a list of them, or an object of them.
_PARTS = (
    *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "$defs", "definitions"),
)
# Objects of schemas by name.
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_ALTERNATIVES = ("anyOf", "oneOf")  # of which a value has to match one
# Keywords beside ``properties`` whose schemas hold for the same object, and may name more properties.
_BESIDE = (*_ALTERNATIVES, "allOf", "$ref", "$dynamicRef", "if", "then", "else", "dependentSchemas", "not")
# The formats that JSON Schema defines. Any other one, such as ``binary`` and ``path``, is an annotation.
FORMATS = ("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6")
FORMATS += ("uri", "uri-reference", "uri-template", "iri", "iri-reference", "uuid", "regex")
FORMATS += ("json-pointer", "relative-json-pointer")
MOST_REFERENCES = 16  # that lead to each other
# Keywords that limit texts.
LIMITS = ("enum", "const", "pattern", "minLength", "maxLength", "format", *_BESIDE)
_OPINIONS = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def closed(schema: Any) -> Any:
    """A schema whose objects have no other properties than it names, where it does not say anything about others.

    Formats that JSON Schema does not define are left out, and what ``propertyNames`` says is told by ``properties`` and
    ``patternProperties`` where these can, since grammars have no other names.

    So OpenAI's strict mode asks for it. Without it a model may invent names until the text is as long as it may be.

    An object stays open if it has no ``properties``, if the schema says so by ``additionalProperties``, and where several
    schemas hold for it together (``allOf``, or ``anyOf`` and ``$ref`` beside ``properties``), since each names a part.

    Args:
      schema: JSON schema; it is not changed.
    """
    shared, new = set[str](), set(_shared_references(schema, False))
    while new:  # what a shared schema refers to is shared, too
        shared |= new
        new = {other for place in new for other in _shared_references(referred(place, schema), True)} - shared
    return _Closing(shared, schema).schema(schema, "#", False)


class _Closing:
    """One pass over a schema.

    Args:
      shared: references to schemas that hold together with others.
      root: where references lead.
    """

    def __init__(self, shared: set[str], root: Any):
        self._shared, self._root = shared, root

    def schema(self, schema: Any, place: str, joint: bool) -> Any:
        """A schema with closed objects.

        Args:
          place: its JSON pointer, as references have it.
          joint: whether another schema holds for the same value.
        """
        if not isinstance(schema, Mapping):
            return schema
        joint = joint or place in self._shared
        result = {key: value for key, value in schema.items() if key != "format" or value in FORMATS}
        for keyword, value in schema.items():
            inner = f"{place}/{keyword}"
            if keyword in _PARTS:
                result[keyword] = self._each(value, inner, keyword, False)
            elif keyword in _BESIDE:
                result[keyword] = self._each(value, inner, keyword, joint or _is_joint(schema, keyword))
        if "propertyNames" in schema:
            result |= self._named(result, result.pop("propertyNames"))
        names = isinstance(schema.get("properties"), Mapping)
        if names and not joint and not any(keyword in schema for keyword in (*_OPINIONS, *_BESIDE)):
            result["additionalProperties"] = False
        return result

    def _named(self, schema: Mapping[str, Any], names: Any) -> dict[str, Any]:
        """The keywords that say which names an object may have, as ``names`` does."""
        told, others, read = names, schema.get("additionalProperties", True), 0
        while isinstance(told, Mapping) and isinstance(told.get("$ref"), str) and read < MOST_REFERENCES:
            told, read = referred(told["$ref"], self._root), read + 1
        told = {} if told is True else told
        if not isinstance(told, Mapping) or told.get("type", "string") != "string":
            return {"propertyNames": names}
        limits, listed = told.keys() & LIMITS, told.get("enum", [told.get("const")])
        if not limits:
            return {}
        if not schema.keys() & {"properties", "patternProperties"}:
            if limits == {"pattern"}:
                return {"patternProperties": {str(told["pattern"]): others}, "additionalProperties": False}
            if limits in ({"enum"}, {"const"}) and isinstance(listed, list):
                texts = [name for name in listed if isinstance(name, str)]
                return {"properties": dict.fromkeys(texts, others), "additionalProperties": False}
        return {"propertyNames": names}

    def _each(self, value: Any, place: str, keyword: str, joint: bool) -> Any:
        if isinstance(value, list):
            return [self.schema(item, f"{place}/{i}", joint) for i, item in enumerate(value)]
        if isinstance(value, Mapping) and keyword in _OF_NAMES:
            return {name: self.schema(item, f"{place}/{escaped(name)}", joint) for name, item in value.items()}
        return self.schema(value, place, joint)


def _is_joint(schema: Mapping[str, Any], keyword: str) -> bool:
    """Whether the schemas of this keyword hold for a value together with others: with those of the schema around them, or
    with each other. The usual ``{"allOf": [{"$ref": ..}], "description": ..}`` is a single one."""
    others = any(other in schema for other in ("properties", *_BESIDE) if other != keyword)
    several = keyword == "allOf" and isinstance(schema[keyword], list) and len(schema[keyword]) > 1
    return others or several or keyword not in (*_ALTERNATIVES, "allOf", "$ref")


def _shared_references(schema: Any, joint: bool) -> Iterator[str]:
    """The references to schemas that hold together with others, in any part of a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _shared_references(item, joint)
    if not isinstance(schema, Mapping):
        return
    for keyword, value in schema.items():
        together = keyword in _BESIDE and (joint or _is_joint(schema, keyword))
        if keyword == "$ref" and together and isinstance(value, str):
            yield value
        elif keyword in (*_PARTS, *_BESIDE):
            values = list(value.values()) if isinstance(value, Mapping) and keyword in _OF_NAMES else value
            yield from _shared_references(values, together)


def referred(reference: str, root: Any) -> Any:
    """The schema of ``#/$defs/name``; None for another document's or a missing one."""
    if not reference.startswith("#"):
        return None
    schema = root
    for part in filter(None, reference[1:].split("/")):
        schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema


def escaped(name: str) -> str:
    """A name in a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
