"""Blanks between two parts of JSON are bounded, unless a request says which there may be."""

import json
import re

import numpy as np
import pydantic
import pytest
from llguidance import LLMatcher, LLTokenizer

from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.grammar.source import grammar_text
from jspec.text.parsers.forced import CallForms
from jspec.text.parsers.registry import TOOL_FORMATS

DEPTH = 8
ANY = r"[ \t\r\n]*"
BETWEEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|(?P<blanks>[ \t\r\n]+)')
BOUND = re.compile(r"\n[ \t]{0,40}| {1,2}")
BYTES = LLTokenizer("byte")


class Node(pydantic.BaseModel):
    name: str = "a  \n\n  b"
    numbers: list[float] = [1, -2.5]
    flags: dict[str, bool | None] = {"x": True, "y": None}
    empty: list[int] = []
    inner: "Node | None" = None


def nested(depth: int) -> Node:
    return Node(inner=nested(depth - 1)) if depth else Node()


FORMS = {
    "a schema": {"json": Node},
    "a list": {"json": {"type": "array", "items": Node.model_json_schema() | {"$defs": {}}}},
    "anything": {"json": True},
    "an object": {"json_object": True},
    "an object behind a preamble": {"json_object": True, "preamble": 'start: "x"'},
}
FORMS["a list"]["json"] = {
    "type": "array",
    "items": {"$ref": "#/$defs/Node"},
    **Node.model_json_schema(),
    "minItems": 1,
}
FORMS["a list"]["json"].pop("$ref")


def matcher_of(**fields) -> LLMatcher:
    matcher = LLMatcher(BYTES, grammar_text(StructuredOutputsParams(**fields)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(text: str, **fields) -> bool:
    matcher = matcher_of(**fields)
    return matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting()


def blank_text(matcher: LLMatcher, seed: int) -> str:
    """A random text of 400 bytes at most that has blanks wherever there may be some."""
    random, written = np.random.default_rng(seed), bytearray()
    while not matcher.is_stopped() and len(written) < 400:
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        allowed = allowed[allowed < 256]
        if not allowed.size:
            break
        blanks = [token for token in allowed if token in b" \n\t\r" and random.random() < 0.9]
        marks = [token for token in allowed if token in b'"{,:' and random.random() < 0.7]
        in_string = {ord("a"), ord(" ")} <= set(allowed)
        token = int(random.choice((marks if in_string else blanks) or blanks or marks or allowed))
        matcher.consume_token(token)
        written.append(token)
    return written.decode(errors="replace")


def longest_blanks(text: str) -> list[str]:
    return [found["blanks"] for found in BETWEEN.finditer(text) if found["blanks"]]


@pytest.mark.parametrize("form", FORMS)
def test_no_more_blanks_than_an_indentation_may_come(form):
    seen = [blanks for seed in range(12) for blanks in longest_blanks(blank_text(matcher_of(**FORMS[form]), seed))]
    assert len(seen) > 20
    assert any("\n" in blanks for blanks in seen)
    assert all(BOUND.fullmatch(blanks) for blanks in seen)


@pytest.mark.parametrize("form", ["a schema", "an object"])
def test_a_pattern_of_any_blanks_frees_them(form):
    seen = longest_blanks(blank_text(matcher_of(**FORMS[form], whitespace_pattern=ANY), 0))
    assert max(map(len, seen)) > 100
    assert takes('{\n\n\t   "name"   :"a"\r\n}', **FORMS[form], whitespace_pattern=ANY)
    assert not takes('{\n\n\t   "name"   :"a"\r\n}', **FORMS[form])


@pytest.mark.parametrize("form", ["a schema", "an object", "anything"])
@pytest.mark.parametrize("depth", [0, 3, DEPTH])
def test_json_as_programs_write_it_is_taken(form, depth):
    node = nested(depth)
    value = node.model_dump()
    texts = [json.dumps(value, indent=indent) for indent in (None, 1, 2, 4, "\t")]
    texts += [json.dumps(value, separators=(",", ":")), node.model_dump_json(), node.model_dump_json(indent=2)]
    for text in texts:
        assert takes(text, **FORMS[form]), text


def test_whitespace_that_a_schema_asks_for_itself_counts():
    own = {"type": "object", "x-guidance": {"whitespace_pattern": " {4}"}}
    assert takes('{    "a"    :    1    }', json=own)
    assert not takes('{ "a": 1}', json=own)


def test_forced_calls_have_one_space_at_most():
    tools = [{"type": "function", "function": {"name": "f", "parameters": Node.model_json_schema()}}]
    form = CallForms(tools, TOOL_FORMATS["hermes"], {}, False).calls(named=True)
    texts = [blank_text(LLMatcher(BYTES, grammar_text(form.params), log_level=0), seed) for seed in range(8)]
    assert all(set(longest_blanks(text[text.index("arguments") : text.rfind("\n")])) <= {" "} for text in texts)


def test_compiled_grammars_are_cached_by_their_pattern():
    given = [StructuredOutputsParams(json_object=True, whitespace_pattern=pattern) for pattern in (None, ANY, " ?")]
    assert len(set(given)) == len({grammar_text(one) for one in given}) == 3
