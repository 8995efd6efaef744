"""Forced calls hold the schemas of tools: what may be written is read as arguments that are valid."""

import json

import jsonschema
import pytest
from grammar_walks import Walks, takes, tokenizer
from random_models import Models

from jspec.text.grammar.limits import check_size
from jspec.text.parsers.branches import UnheldError
from jspec.text.parsers.events import CallArguments, CallStart, Content
from jspec.text.parsers.forced import CallForms, JsonCalls
from jspec.text.parsers.lexer import MarkerTokens
from jspec.text.parsers.parser import make_parser
from jspec.text.parsers.registry import TOOL_FORMATS

DISTINCT = list({id(form): name for name, form in TOOL_FORMATS.items()}.values())
RAW = ("qwen3_coder", "glm45", "minimax_m2", "seed_oss", "deepseek_v32")
IDS = MarkerTokens.of(tokenizer(True)).ids
DEFS = {"U": {"enum": ["C", "F"]}, "S": {"type": "string", "enum": ["left", "right"]}, "N": {"type": "null"}}


def tools_of(schema, **more):
    return [{"type": "function", "function": {"name": "f", "parameters": schema, **more}}]


def of_one(schema, **more):
    """The schema of arguments with one argument ``x``."""
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": DEFS, **more}


def check_walks(name, schema, has_tokens, seeds, strict=False, wild=0.05):
    """Walk through the grammar of one call; returns the arguments of all texts."""
    known, read = tokenizer(has_tokens), []
    tools, ids = tools_of(schema, strict=strict), MarkerTokens.of(known).ids
    form = CallForms(tools, TOOL_FORMATS[name], ids, False).calls(named=True)
    params = CallForms(tools, TOOL_FORMATS[name], ids, False).strict() if strict else form.params
    assert params is not None
    walks, valid = Walks(params, has_tokens), jsonschema.validators.validator_for(schema)(schema)
    for seed in seeds:
        tokens = walks.walk(seed, wild, TOOL_FORMATS[name].begins[0] if strict else "")
        parser = make_parser(form.format, None, tools=tools, tokens=MarkerTokens.of(known))
        events = parser.feed(known.decode(tokens), tokens) + parser.finish()
        names = [event.name for event in events if isinstance(event, CallStart)]
        text = "".join(event.text for event in events if isinstance(event, CallArguments))
        if not strict:
            assert names == ["f"], known.decode(tokens)
            assert not "".join(event.text for event in events if isinstance(event, Content)).strip()
        if names == ["f"]:
            read.append(json.loads(text))
            valid.validate(read[-1])
    return read


def random_walks(name, models):
    for seed in models:
        schema = Models(seed).model().model_json_schema()
        for has_tokens in (True, False) if name != "openai" else (True,):
            check_walks(name, schema, has_tokens, range(2))


@pytest.mark.parametrize("name", DISTINCT)
def test_arguments_of_random_models_are_valid(name):
    random_walks(name, range(3))


@pytest.mark.nightly
@pytest.mark.parametrize("name", DISTINCT)
def test_arguments_of_many_random_models_are_valid(name):
    random_walks(name, range(3, 100))


CHOICES = {
    "ref": ({"$ref": "#/$defs/U"}, ["C", "F"]),
    "ref and description": ({"$ref": "#/$defs/S", "description": "which"}, ["left", "right"]),
    "allOf": ({"allOf": [{"$ref": "#/$defs/U"}], "default": "C"}, ["C", "F"]),
    "anyOf ref or null": ({"anyOf": [{"$ref": "#/$defs/S"}, {"type": "null"}]}, ["left", "right", None]),
    "anyOf of refs": ({"anyOf": [{"$ref": "#/$defs/U"}, {"$ref": "#/$defs/N"}]}, ["C", "F", None]),
    "oneOf of consts": ({"oneOf": [{"const": "a"}, {"const": "b", "title": "B"}]}, ["a", "b"]),
    "oneOf of enums": ({"oneOf": [{"enum": ["a"]}, {"enum": ["b", None]}]}, ["a", "b", None]),
    "const": ({"const": "z"}, ["z"]),
    "nullable enum": ({"type": ["string", "null"], "enum": ["a", "null", None]}, ["a", None]),
    "enum of types": ({"enum": ["a", 1, True, None, 2.5]}, ["a", 1, True, None, 2.5]),
    "enum within types": ({"type": "string", "enum": ["a", 1, None]}, ["a"]),
    "text like a number": ({"enum": ["1", 2]}, [2]),
    "text like text": ({"enum": ["1", "true"]}, ["1", "true"]),
    "number or word": ({"anyOf": [{"type": "integer", "minimum": 3, "maximum": 4}, {"const": "auto"}]}, [3, 4, "auto"]),
    "marker": ({"enum": ['a<|"|>b', "c"]}, ['a<|"|>b', "c"]),
    "within lists": ({"type": "array", "items": {"$ref": "#/$defs/U"}, "minItems": 1, "maxItems": 1}, [["C"], ["F"]]),
    "list of none": ({"type": "array", "items": {"type": "boolean"}, "maxItems": 0}, [[]]),
    "pair": (
        {"type": "array", "prefixItems": [{"const": "a"}, {"const": 1}], "minItems": 2, "maxItems": 2},
        [["a", 1]],
    ),
}
TYPED = {"text like a number": ["1", 2], "nullable enum": ["a", "null", None]}  # where formats say what is a string


@pytest.mark.parametrize("case", CHOICES)
@pytest.mark.parametrize("name", [*RAW, "gemma4", "pythonic", "hermes"])
def test_values_are_those_of_the_schema_behind_references(name, case):
    schema, values = CHOICES[case]
    values = values if name in ("qwen3_coder", "glm45", "minimax_m2", "seed_oss") else TYPED.get(case, values)
    read = check_walks(name, of_one(schema), True, range(40), wild=0.8)
    assert {json.dumps(one["x"]) for one in read} == {json.dumps(value) for value in values}
    again = check_walks(name, {"$ref": "#/$defs/R", "$defs": {**DEFS, "R": of_one(schema)}}, True, range(3))
    assert all(one["x"] in values for one in again)


@pytest.mark.parametrize("name", [*RAW, "gemma4", "hermes"])
def test_strict_tools_hold_references_too(name):
    read = check_walks(name, of_one({"$ref": "#/$defs/U"}), True, range(12), strict=True)
    assert {one["x"] for one in read} <= {"C", "F"}
    assert read


INT = {"type": "integer"}
TEXTS = {  # texts of a value that are taken, and that are not
    "words": ({"type": "string", "pattern": r"^\w\W\d\D$"}, ["a-1x"], ["é-1x", "a-\u0663x", "ab1x"]),
    "pattern": ({"type": "string", "pattern": "[0-9]{3}"}, ["a123b", "a\n123", "100/x"], ["12", "a12b"]),
    "anchored": ({"type": "string", "pattern": r"^[a-z]/\d$"}, ["a/1"], ["xa/1", "a/1x", ""]),
    "alternatives": ({"type": "string", "pattern": "^a|b$|c(d|e)"}, ["ax", "xb", "1ce2"], ["xa", "bx", "c"]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 4}, ["ab", "a\nb", "a\nbc"], ["a", "abcde", "\na"]),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-13-01", "today"]),
    "annotation": ({"type": "string", "format": "path"}, ["a b"], []),
    "limits and type": ({"allOf": [{"type": "string"}, {"pattern": "^a"}]}, ["ab"], ["ba"]),
    "text or list": (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        ["a", "[1,2]"],
        ['["a"]', "[x"],
    ),
    "limited text": ({"anyOf": [{"type": "string", "minLength": 3}, {"type": "null"}]}, ["abc", "null"], ["ab", ""]),
    "number or text": ({"type": ["integer", "string"]}, ["5", "abc", "5 apples", "\n"], []),
    "optional text": ({"type": ["string", "null"]}, ["null", "nullx", "\nx\n"], []),
    "anything": ({}, ["a", "5", "[1", '"'], []),
    "flag or text": ({"anyOf": [{"const": True}, {"type": "string"}]}, ["true", "yes"], ["false", "False", "0"]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_may_be_a_value(case):
    schema, right, wrong = TEXTS[case]
    tools = tools_of(of_one(schema))
    for has_tokens in (True, False):
        ids = MarkerTokens.of(tokenizer(has_tokens)).ids
        form = CallForms(tools, TOOL_FORMATS["qwen3_coder"], ids, False).calls(named=True)
        around = "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>"
        for text in (*right, *wrong):
            assert takes(form.params, has_tokens, around.format(text)) == (text in right), text


UNHELD = {
    "not": {"not": {"const": "a"}},
    "oneOf": {"oneOf": [{"type": "string", "minLength": 2}, {"type": "string", "pattern": "a"}]},
    "allOf": {"allOf": [{"type": "string", "minLength": 2}, {"pattern": "b"}]},
    "hostname": {"type": "string", "format": "idn-hostname"},
    "type": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 5}]},
    "minLength": {"type": "string", "enum": ["a", "b"], "minLength": 1},
    "#/$defs/X": {"$ref": "#/$defs/X"},
}


@pytest.mark.parametrize("keyword", UNHELD)
def test_schemas_that_a_format_cannot_hold_are_forced_as_json_and_refused_where_strict(keyword):
    tools = tools_of(of_one(UNHELD[keyword]), strict=True)
    assert CallForms(tools, TOOL_FORMATS["glm45"], IDS, False).calls(named=True).format == JsonCalls("f")
    with pytest.raises(UnheldError, match=f"{keyword}' in the schema of a tool: expected ".replace("$", r"\$")):
        CallForms(tools, TOOL_FORMATS["glm45"], IDS, False).strict()


@pytest.mark.parametrize("name", DISTINCT)
def test_sixty_tools_make_a_grammar(name):
    properties = {"path": {"type": "string"}, "n": {"type": "integer"}, "m": {"enum": ["a", "b"]}}
    properties |= {key: {"type": "array", "items": {"type": "string"}} for key in ("a", "b", "c")}
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(60)]
    check_size(CallForms(tools, TOOL_FORMATS[name], IDS, True).calls(named=False).params)
