"""Forced calls in each format's own syntax: what a grammar lets a model write is read as a call that fits the schema."""

import functools
import json

import numpy as np
import pytest
from grammar_walks import tokenizer

from jspec.sampling.structured import StructuredOutputsParams
from jspec.text.grammar.grammars import Grammars
from jspec.text.parsers.events import CallArguments, CallEnd, CallStart, Content, Reasoning
from jspec.text.parsers.forced import CallForms, JsonCalls, after_reasoning
from jspec.text.parsers.lexer import MarkerTokens
from jspec.text.parsers.parser import make_parser
from jspec.text.parsers.registry import REASONING_FORMATS, TOOL_FORMATS

READ = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["r", "rb+"]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "maxItems": 2},
        "deep": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        "size": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    },
    "required": ["path", "size"],
    "additionalProperties": False,
    "$defs": {"line": {"type": "integer", "minimum": 0, "maximum": 999}},
}
TOOLS = [
    {"type": "function", "function": {"name": "read_file", "parameters": READ}},
    {"type": "function", "function": {"name": "list_files"}},
]
LETTERS = 'abz truefalsn 019_/<>{}[]",:\\\n|=é.'
LONGEST = 600
DISTINCT = {
    name: form
    for name, form in TOOL_FORMATS.items()
    if list(TOOL_FORMATS.values()).index(form) == list(TOOL_FORMATS).index(name)
}
THINKS = {"openai": "openai_gptoss", "gemma4": "gemma4", "mistral": "mistral", "seed_oss": "seed_oss"}


@functools.cache
def grammars(has_tokens):
    known = tokenizer(has_tokens)
    return Grammars(known, len(known), [known.eos_token_id])


def ids_of(known):
    return MarkerTokens.of(known).ids


def written(form: StructuredOutputsParams, has_tokens: bool, seed: int) -> list[int]:
    """Tokens of a random text of this form. Letters of ``LETTERS`` and markers are likelier than others."""
    known, random = tokenizer(has_tokens), np.random.default_rng(seed)
    every = np.arange(len(known))
    blank = np.isin(every, known.encode(" \n\t\r"))
    usual = np.isin(every, [*known.encode(LETTERS), *set(ids_of(known).values()) - {known.eos_token_id}])
    ending = (every >= 256) | (every == 1)  # 1 is a quote
    ending[known.eos_token_id] = True
    constraint = grammars(has_tokens).constraint(form, [known.eos_token_id])
    grammar, spelled = form.grammar or "", list[int]()
    markers = sorted(
        {marker for calls in TOOL_FORMATS.values() for marker in calls.markers if json.dumps(marker)[1:-1] in grammar}
    ) or ["a"]
    tokens, flags = list[int](), np.zeros((1, (len(known) + 31) // 32), np.uint32)
    while True:
        forced = constraint.jump_forward(8)
        flags[:] = 0xFFFFFFFF
        constraint.allow([], flags)
        may = np.unpackbits(flags.view(np.uint8), bitorder="little")[: len(known)]
        allowed = np.flatnonzero(may)
        assert allowed.size
        assert not forced or (may[forced[0]] and allowed.size == 1)
        often, ends = allowed[usual[allowed]] if usual[allowed].any() else allowed, allowed[ending[allowed]]
        if ends.size and (random.random() < 0.3 or len(tokens) > LONGEST):
            often = ends
        if random.random() < 0.95 and not blank[often].all():
            often = often[~blank[often]]
        if not spelled and random.random() < 0.2:
            spelled = known.encode(str(random.choice(markers)))
        token = int(random.choice(often))
        if spelled:
            token, *spelled = spelled if may[spelled[0]] else [token]
        if token == known.eos_token_id:
            return tokens
        tokens.append(token)
        if constraint.add([token]) is not None:
            return tokens
        assert len(tokens) < 4 * LONGEST


def calls_of(events):
    """Names and arguments of all calls; content is blank, and reasoning comes before the first call."""
    calls, open_, thoughts = [], False, ""
    for event in events:
        if isinstance(event, CallStart):
            calls.append([event.name, ""])
            open_ = True
        elif isinstance(event, CallArguments):
            assert open_
            calls[-1][1] += event.text
        elif isinstance(event, CallEnd):
            open_ = False
        elif isinstance(event, Reasoning):
            assert not calls
            thoughts += event.text
        else:
            assert isinstance(event, Content)
            assert not event.text.strip()
    assert not open_
    return [(name, json.loads(text)) for name, text in calls], thoughts


def events_of(name, tokens, tools, thinks=None, form=None, has_tokens=True, **how):
    """What is read of a text in a format's syntax, or in JSON where ``form`` says that the format cannot hold the calls."""
    known = tokenizer(has_tokens)
    tool = name if form is None else form.format
    parser = make_parser(tool, thinks, tools=tools, tokens=MarkerTokens.of(known), **how)
    return parser.feed(known.decode(tokens), tokens) + parser.finish(ended=True)


def check(calls, several):
    assert calls
    assert several or len(calls) == 1
    for name, arguments in calls:
        if name == "list_files":
            assert arguments == {}
            continue
        assert name == "read_file"
        assert {"path", "size"} <= set(arguments) <= set(READ["properties"])
        assert isinstance(arguments["path"], str)
        assert arguments["size"] is None or arguments["size"] in range(100)
        assert arguments.get("mode", "r") in ("r", "rb+")
        assert all(line in range(1000) for line in arguments.get("lines", []))
        assert isinstance(arguments.get("deep", {"a": True})["a"], bool)


@pytest.mark.parametrize("several", [True, False], ids=["several", "one"])
@pytest.mark.parametrize(
    ("name", "has_tokens"), [(name, has) for name in DISTINCT for has in (True, False) if has or name != "openai"]
)
def test_forced_calls_are_read_as_calls(name, several, has_tokens):
    known = tokenizer(has_tokens)
    form = CallForms(TOOLS, DISTINCT[name], ids_of(known), several).calls(named=False)
    assert form.format is DISTINCT[name]
    for seed in range(4):
        tokens = written(form.params, has_tokens, seed)
        calls, _ = calls_of(events_of(name, tokens, TOOLS, form=form, has_tokens=has_tokens))
        check(calls, several)


@pytest.mark.parametrize("prompt", ["open", "closed", "silent"])
@pytest.mark.parametrize("name", DISTINCT)
def test_reasoning_may_come_before_forced_calls(name, prompt):
    known, thinks = tokenizer(True), THINKS.get(name, "qwen3")
    reasoning = REASONING_FORMATS[thinks]
    end = {"open": f"x{reasoning.start}", "closed": f"x{reasoning.start}\n\n{reasoning.end}\n\n", "silent": "x"}[prompt]
    if name == "openai":
        end = "<|start|>assistant" + (reasoning.start if prompt == "open" else "")
    form = CallForms(TOOLS, DISTINCT[name], ids_of(known), False).calls(named=False)
    params = after_reasoning(form.params, reasoning, ids_of(known), end, False)
    thought = 0
    for seed in range(4):
        tokens = written(params, True, seed)
        calls, thoughts = calls_of(
            events_of(name, tokens, TOOLS, form=form, thinks=thinks, prompt=end, begins_open=False)
        )
        check(calls, False)
        thought += bool(thoughts)
        assert not (thoughts and prompt == "closed" and name != "openai")
    assert thought or prompt != "open"


@pytest.mark.parametrize("thinks", ["qwen3", "openai_gptoss"])
def test_an_answer_has_its_form_behind_the_reasoning(thinks):
    known, reasoning = tokenizer(True), REASONING_FORMATS[thinks]
    asked = StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    )
    params = after_reasoning(asked, reasoning, ids_of(known), "<|start|>assistant", True)
    for seed in range(4):
        tokens = written(params, True, seed)
        events = events_of(None, tokens, None, thinks=thinks, prompt="<|start|>assistant", begins_open=False)
        answer = "".join(event.text for event in events if isinstance(event, Content))
        assert set(json.loads(answer)) == {"a"}


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
TOKENS = ids_of(tokenizer(True))
WITH_TOKENS = [name for name, form in DISTINCT.items() if form.begins and form.begins[0] in TOKENS]


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_strict_tools_get_arguments_that_fit_wherever_they_are_called(name):
    known, form, called = tokenizer(True), DISTINCT[name], 0
    params = CallForms(STRICT, form, ids_of(known), True).strict()
    if params is None:
        assert name == "llama3_json"  # whose calls begin with plain text
        return
    begin = ids_of(known)[form.begins[0]]
    for seed in range(6):
        tokens = written(params, True, seed)
        events = events_of(name, tokens, STRICT)
        calls, _ = calls_of([event for event in events if not isinstance(event, Content)])
        read = [(name, arguments) for name, arguments in calls if name == "read_file"]
        check(read or [("list_files", {})], True)
        assert bool(calls) == (begin in tokens)
        called += len(calls)
    assert called


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_an_answer_of_some_form_may_be_calls_instead(name):
    known, form = tokenizer(True), DISTINCT[name]
    params = CallForms(STRICT, form, ids_of(known), False).beside(StructuredOutputsParams(choice=["yes", "no"]))
    answers, called = set(), 0
    for seed in range(12):
        tokens = written(params, True, seed)
        events = events_of(name, tokens, STRICT)
        calls, _ = calls_of([event for event in events if not isinstance(event, Content)])
        called += len(calls)
        if not calls:
            answers.add("".join(event.text for event in events if isinstance(event, Content)))
    assert answers <= {"yes", "no"}
    assert (called > 0) == (params.alternative is not None)


def test_without_a_token_that_begins_calls_there_is_no_strict_form():
    assert CallForms(STRICT, TOOL_FORMATS["hermes"], {}, True).strict() is None
    assert CallForms(STRICT, None, ids_of(tokenizer(True)), True).strict() is None


def test_names_that_python_has_not_are_forced_as_json():
    parameters = {"type": "object", "properties": {"a-b": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    known, pythonic = tokenizer(True), TOOL_FORMATS["pythonic"]
    assert CallForms(tools, pythonic, ids_of(known), True).calls(named=False).format == JsonCalls(None)
