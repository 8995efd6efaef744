"""Objects of a JSON schema with properties and no opinion about others have no others, as llguidance reads it."""

import copy
import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.grammar.schema import closed
from jspec.text.grammar.source import grammar_text

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
OPEN = {"additionalProperties": True}


@pytest.fixture(scope="module")
def tokenizer():
    return LLTokenizer("byte")


def takes(tokenizer, schema, text: str, **options) -> bool:
    """Whether a text is complete under the grammar of a schema."""
    matcher = LLMatcher(tokenizer, grammar_text(StructuredOutputsParams(json=schema, **options)))
    assert not matcher.get_error(), matcher.get_error()
    return matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (A, '{"a":1}', '{"a":1,"b":2}'),
        ({"type": "array", "items": A}, '[{"a":1}]', '[{"a":1,"b":2}]'),
        ({"type": "object", "properties": {"x": A}}, '{"x":{"a":1}}', '{"x":{"a":1,"b":2}}'),
        ({"type": "object", "additionalProperties": A}, '{"x":{"a":1}}', '{"x":{"a":1,"b":2}}'),
        ({"anyOf": [A, B]}, '{"b":1}', '{"b":1,"a":2}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, '{"a":1}', '{"a":1,"b":2}'),
        ({"$defs": {"a/b~": A}, "type": "array", "items": {"$ref": "#/$defs/a~1b~0"}}, '[{"a":1}]', '[{"a":1,"b":2}]'),
        ({"allOf": [{"$ref": "#/$defs/A"}], "description": "x", "$defs": {"A": A}}, '{"a":1}', '{"a":1,"b":2}'),
        ({"type": "object", "properties": {"properties": A}}, '{"properties":{"a":1}}', '{"properties":{"a":1,"b":2}}'),
        (A, '{"a":1}', '{"a":1,"a":2}'),
    ],
)
def test_objects_with_properties_are_closed(tokenizer, schema, right, wrong):
    before = copy.deepcopy(schema)
    assert takes(tokenizer, schema, right)
    assert not takes(tokenizer, schema, wrong)
    assert schema == before


NAMES = [
    (True, ["r", "b", "c"]),
    ({"type": "string", "description": "which"}, ["r", "b", "c"]),
    ({"$ref": "#/$defs/C"}, ["r", "b"]),
    ({"type": "string", "enum": ["r"]}, ["r"]),
    ({"const": "c"}, ["c"]),
    ({"pattern": "^[a-b]$"}, ["b"]),
]


@pytest.mark.parametrize(("names", "right"), NAMES)
def test_names_of_properties_are_those_that_the_schema_allows(tokenizer, names, right):
    record = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    schema = {"type": "object", "properties": {"x": record}, "$defs": {"C": {"enum": ["r", "b", 1]}}}
    for name in ("r", "b", "c"):
        assert takes(tokenizer, schema, f'{{"x": {{"{name}": 1}}}}') == (name in right)
        assert not takes(tokenizer, schema, f'{{"x": {{"{name}": "a"}}}}')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object"}, '{"x":1}'),
        (A | OPEN, '{"a":1,"b":2}'),
        (A | {"additionalProperties": {"type": "integer"}}, '{"a":1,"b":2}'),
        ({"allOf": [A, B]}, '{"a":1,"b":2}'),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, '{"a":1,"b":2}'),
        ({"allOf": [{"$ref": "#/$defs/C"}, B], "$defs": {"A": A, "C": {"$ref": "#/$defs/A"}}}, '{"a":1,"b":2}'),
        (A | {"anyOf": [B]}, '{"a":1,"b":2}'),
        ({"type": "object", "properties": {"x": {"enum": [{"properties": {}}]}}}, '{"x":{"properties":{}}}'),
    ],
)
def test_objects_that_others_describe_as_well_stay_open(tokenizer, schema, text):
    assert takes(tokenizer, schema, text)


def test_an_option_opens_them(tokenizer):
    assert takes(tokenizer, A, '{"a":1,"b":2}', disable_additional_properties=False)


def test_values_that_look_like_schemas_are_left_alone():
    value = {"properties": {"a": {}}}
    for keyword in ("const", "default"):
        assert closed({keyword: value}) == {keyword: value}
    for keyword in ("enum", "examples"):
        assert closed({keyword: [value]}) == {keyword: [value]}


def test_a_schema_that_is_none_is_left_to_the_compiler():
    for schema in (
        True,
        {"properties": 3},
        {"allOf": 3},
        {"$ref": "#/a/b", "properties": []},
        {"$defs": [A]},
        {"items": [3]},
        {"propertyNames": {"enum": 3}},
        {"propertyNames": {"const": {}, "pattern": []}},
    ):
        closed(json.loads(json.dumps(schema)))


def test_references_in_a_circle_end():
    defs = {"A": {"allOf": [{"$ref": "#/$defs/B"}, B]}, "B": {"allOf": [{"$ref": "#/$defs/A"}, A]}}
    assert closed({"$ref": "#/$defs/A", "$defs": defs}) == {"$ref": "#/$defs/A", "$defs": defs}
    itself = {"propertyNames": {"$ref": "#/$defs/A"}, "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert closed(itself) == itself
