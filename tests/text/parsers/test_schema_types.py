"""Raw text as the type that a tool's schema asks for."""

import json
import sys

import pytest
from transcripts import function

from jspec.text.parsers.schema_types import functions_by_name, json_object, parameter_types, raw_to_json


def types(schema) -> frozenset[str]:
    return parameter_types(function("f", x=schema)["function"])["x"]


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("5", "string", '"5"'),
        ("true", "string", '"true"'),
        ("null", "string", '"null"'),
        ("null", "string null", "null"),
        ("None", "string null", '"None"'),
        (" 5\n", "integer", "5"),
        ("+07", "integer", "7"),
        ("5", "integer string", "5"),
        ("5.5", "integer", "5.5"),
        ("five", "integer", '"five"'),
        ("9" * 5_000, "integer", '"' + "9" * 5_000 + '"'),
        ("1_000", "integer", '"1_000"'),
        ("1e3", "number", "1e3"),
        ("1.", "number", "1.0"),
        (".5", "number", "0.5"),
        ("12345678901234567890.125", "number", "12345678901234567890.125"),
        ("NaN", "number", '"NaN"'),
        ("-Infinity", "number", '"-Infinity"'),
        ("1e999", "number", "1e999"),
        ("[-1e999]", "array", "[-1e999]"),
        (".5e999", "number", '".5e999"'),
        ("True", "boolean", "true"),
        ("0", "boolean", "false"),
        ("1", "integer boolean", "1"),
        ("yes", "boolean", '"yes"'),
        ('{"a": 1.0}', "object", '{"a": 1.0}'),
        ("{'a': 1}", "object", '{"a": 1}'),
        ('{"a": NaN}', "object", '"{\\"a\\": NaN}"'),
        ("[1, 2]", "array", "[1, 2]"),
        ("[1, 2]", "object", "[1, 2]"),
        ("[1, 2]", "array string", "[1, 2]"),
        ("[1, 2", "array string", '"[1, 2"'),
        ("[" * 100_000, "array", '"' + "[" * 100_000 + '"'),
        ("12", "", "12"),
        ('"a"', "", '"a"'),
        ("a", "", '"a"'),
        ("", "", '""'),
        ("", "integer", '""'),
    ],
)
def test_text_becomes_json(text, names, expected):
    value = raw_to_json(text, frozenset(names.split()))
    assert value == expected
    json.loads(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ('{"a": "\\ud83d\\ude00 \\ud83d", "\\udc00": 1}', {"a": "😀 \ufffd", "\ufffd": 1}),
        ('{"a": ', None),
        ('{"a": NaN}', None),
        ('{"a": [1e999, -1e999]}', {"a": [sys.float_info.max, -sys.float_info.max]}),
        ('{"a": ' + "[" * 9999, None),
        ("[1]", None),
    ],
)
def test_arguments_are_an_object_that_a_response_can_hold(text, expected):
    assert json_object(text) == expected


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, "integer"),
        ({"type": ["string", "null"]}, "string null"),
        (
            {"anyOf": [{"type": "integer"}, {"oneOf": [{"type": "null"}, {"enum": ["a", 1.5]}]}]},
            "integer null string number",
        ),
        ({"allOf": [{"$ref": "#/$defs/Count"}]}, "integer"),
        ({"$ref": "#/$defs/Missing"}, ""),
        ({"$ref": "other.json#/x"}, ""),
        ({"$ref": "#/properties/x"}, ""),
        ({"const": True}, "boolean"),
        ({"enum": [None, [], {}]}, "null array object"),
        ({"type": "file"}, ""),
        ({"type": 5, "anyOf": 3, "enum": "a"}, ""),
        (True, ""),
        (None, ""),
    ],
)
def test_a_schema_allows_types(schema, expected):
    assert types({"type": schema} if isinstance(schema, str) else schema or {}) == frozenset(expected.split())


def test_tools_that_are_no_tools_are_left_out():
    tools = [{"name": "flat"}, {"function": None}, "text", {"function": {"parameters": 3}}, function("f", x="string")]
    assert set(functions_by_name(tools)) >= {"flat", "f"}
    for found in functions_by_name(tools).values():
        parameter_types(found)
    assert parameter_types({"parameters": {"properties": {"x": True, "y": None}}}) == {
        "x": frozenset(),
        "y": frozenset(),
    }
