"""Answers have the form that ``response_format`` or ``structured_outputs`` asks for; errors name the field."""

import asyncio
import collections
import json
import random
import re

import pytest
from openai_server import ask, assert_nothing_is_held, closing_service, error_of, events, family

import jspec
from jspec.serving.http.limits import Limits
from jspec.text.grammar.process import GrammarBusy

PATHS = {
    "/v1/completions": {"prompt": "config = "},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A configuration."}]},
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["queue", "café"]}, "size": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "config", "schema": SCHEMA, "strict": True}}
MOST_BYTES = 1_000


@pytest.fixture(scope="module")
def service():
    yield from closing_service(limits=Limits(max_grammar_bytes=MOST_BYTES))


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"name", "size"} and found["name"] in ("queue", "café") and found["size"] in range(1, 100)


def is_json_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


def is_one_of(*texts: str):
    return lambda text: text in texts


def matches(regex: str):
    return lambda text: re.fullmatch(regex, text) is not None


GRAMMAR = 'start: "[" item ("," item)* "]"\nitem: "ab" | "cd"'
FORMS = {
    "json_schema": ({"response_format": FORMAT}, fits_schema),
    "json": ({"structured_outputs": {"json": SCHEMA}}, fits_schema),
    "json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}}, fits_schema),
    "regex": ({"structured_outputs": {"regex": "[0-9]{2,4}(ms|s)"}}, matches("[0-9]{2,4}(ms|s)")),
    "choice": ({"structured_outputs": {"choice": ['"yes"', "no\n"], "regex": None}}, is_one_of('"yes"', "no\n")),
    "grammar": ({"structured_outputs": {"grammar": GRAMMAR}}, matches(r"\[(ab|cd)(,(ab|cd))*\]")),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
def test_responses_match_the_grammar(service, form, path):
    fields, fits = FORMS[form]
    body = {**PATHS[path], **fields, "temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 120}
    choices = ask(service, path, body).json()["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 3
    assert all(fits(text_of(choice)) for choice in choices), choices


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stream_matches_the_grammar_and_ends_with_it(service, ignore_eos):
    path = "/v1/chat/completions"
    body = {**PATHS[path], "response_format": FORMAT, "seed": 6, "max_tokens": 120, "ignore_eos": ignore_eos}
    whole = ask(service, path, body).json()["choices"][0]
    chunks = [chunk["choices"][0] for chunk in events(ask(service, path, {**body, "stream": True}))]
    text = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    assert (text, chunks[-1]["finish_reason"]) == (text_of(whole), "stop")
    assert fits_schema(text)


def test_json_object_format_gives_json(service):
    """Nothing bounds it, so a text that is cut off only begins like one; a bias lets it end."""
    path = "/v1/completions"
    closing = {str(token): 20 for token, text in enumerate(vocabulary()) if text in ("}", '"}')}
    body = {**PATHS[path], "temperature": 0, "max_tokens": 60, "logit_bias": closing}
    for fields in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        (choice,) = ask(service, path, {**body, **fields}).json()["choices"]
        assert (choice["finish_reason"], is_json_object(choice["text"])) == ("stop", True)
        (cut,) = ask(service, path, {**body, **fields, "max_tokens": 1}).json()["choices"]
        assert cut["finish_reason"] == "length"
        assert cut["text"].lstrip().startswith("{")


def vocabulary() -> list[str]:
    tokenizer = family().tokenizer
    return [tokenizer.decode([token], skip_special_tokens=False) for token in range(2048)]


def test_text_format_constrains_nothing(service):
    path = "/v1/completions"
    body = {**PATHS[path], "temperature": 0, "max_tokens": 6}
    free = ask(service, path, body).json()["choices"][0]["text"]
    for fields in ({"response_format": {"type": "text"}}, {"structured_outputs": {}}, {"response_format": None}):
        assert ask(service, path, {**body, **fields}).json()["choices"][0]["text"] == free


def test_text_is_that_of_generate(service):
    path = "/v1/completions"
    body = {**PATHS[path], "response_format": FORMAT, "temperature": 0.9, "seed": 7, "max_tokens": 120}
    params = {"temperature": 0.9, "seed": 7, "max_tokens": 120}
    expected = jspec.generate(family(), "config = ", structured_outputs={"json": SCHEMA}, **params)
    assert ask(service, path, body).json()["choices"][0]["text"] == expected.text


REFUSED = [  # (fields, the field that is named, what the message has)
    ({"response_format": {"type": "xml"}}, "response_format", '{"type": "json_object"}'),
    ({"response_format": {"type": "json_schema"}}, "response_format", '{"schema": {..}}'),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 7}}}, "response_format", '{"schema": {..}}'),
    ({"response_format": {"type": "json_object", "x": 1}}, "response_format", "expected"),
    ({"response_format": {}}, "response_format", "expected"),
    ({"response_format": "json"}, "response_format", "valid dictionary"),
    ({"response_format": {**FORMAT, "json_schema": {"schema": {"type": "x"}}}}, "response_format", "Invalid type: x"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": None}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "expected fields among json, regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one string"),
    ({"structured_outputs": {"choice": [[1]]}}, "structured_outputs", "strings that are not empty"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "no usable grammar"),
    ({"structured_outputs": {"grammar": "start: structured_outputs"}}, "structured_outputs", "no usable grammar"),
    ({"structured_outputs": {"json": {"$ref": "http://localhost/x"}}}, "structured_outputs", "does not fetch"),
    ({"structured_outputs": [1]}, "structured_outputs", "valid dictionary"),
    ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "response_format", "nothing beside structured"),
    ({"structured_outputs": {"regex": "a" * MOST_BYTES}}, "structured_outputs", "--max-grammar-bytes"),
    ({"response_format": {"type": "text", "x": "a" * MOST_BYTES}}, "response_format", "--max-grammar-bytes"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "0 beside structured_outputs"),
    ({"guided_json": SCHEMA}, "guided_json", "use structured_outputs"),
    ({"guided_regex": "a"}, "guided_regex", "use structured_outputs"),
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_bad_grammars_are_refused(service, fields, param, message, path):
    before = family().engine.metrics().num_finished
    error = error_of(ask(service, path, {**PATHS[path], "max_tokens": 2, **fields}), 400)
    assert error["param"] == param
    assert message in error["message"]
    assert family().engine.metrics().num_finished == before


def test_missing_llguidance_is_reported(service, monkeypatch):
    monkeypatch.setattr("jspec.text.grammar.grammars.available", lambda: False)
    body = {**PATHS["/v1/completions"], "response_format": {"type": "json_object"}}
    error = error_of(ask(service, "/v1/completions", body), 400)
    assert error["param"] == "response_format"
    assert "pip install 'jspec[structured]'" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_grammar_compiler_under_load_is_503(service, monkeypatch, path, stream):
    """It is not refused for good: the client is told to come again."""

    async def busy(_):
        raise GrammarBusy("try again later")

    monkeypatch.setattr(service.engine, "grammar", busy)
    body = {**PATHS[path], "response_format": {"type": "json_object"}, "stream": stream}
    answer = ask(service, path, body)
    assert error_of(answer, 503)["message"] == "try again later"
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("by_name", [False, True])
def test_async_engine_takes_grammars(service, by_name):
    """``AsyncEngine.generate`` takes a form in its parameters or by name, and compiles it outside of its worker threads."""
    fields = {"structured_outputs": {"choice": ["a queue", "a stack"]}, "seed": 5, "max_tokens": 20}
    given = fields if by_name else {"params": jspec.SamplingParams(**fields)}

    async def text() -> str:
        return "".join([delta.text or "" async for delta in service.engine.generate("config = ", **given)])

    expected = jspec.generate(family(), "config = ", **given)
    assert isinstance(expected, jspec.Result)
    assert asyncio.run(text()) == expected.text
    assert expected.text in ("a queue", "a stack")


def test_async_engine_refuses_bad_grammars(service):
    async def first():
        async for delta in service.engine.generate("config = ", structured_outputs={"regex": "("}):
            return delta

    with pytest.raises(ValueError, match="structured_outputs has no usable grammar"):
        asyncio.run(first())


OPTIONS = ("allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids", "logit_bias", "ignore_eos")


def nightly(*values):
    return pytest.param(*values, marks=pytest.mark.nightly)


def some_options(rng: random.Random) -> dict:
    """A few options that take tokens out, or change which of them are likely."""
    tokens = sorted(rng.sample(range(64, 128), rng.choice((1, 2, 40))))
    values = {
        "allowed_token_ids": rng.choice((tokens, [0], [0, *tokens])),
        "bad_words": [text.strip() for text in map(vocabulary().__getitem__, tokens) if text.strip()] or ["a"],
        "min_tokens": rng.choice((1, 3)),
        "stop_token_ids": tokens,
        "logit_bias": {str(token): rng.choice((-100, 100)) for token in tokens},
        "ignore_eos": True,
    }
    return {name: values[name] for name in rng.sample(OPTIONS, rng.choice((1, 2, 2, 3)))}


@pytest.mark.parametrize(
    ("path", "count"), [*zip(PATHS, (20, 20), strict=True), *(nightly(path, 150) for path in PATHS)]
)
def test_contradictory_options_are_refused_by_name(service, path, count):
    """Sets of options, beside a form or alone, are served or refused, and nothing of those that are refused is held."""
    rng, statuses = random.Random(path), collections.Counter()
    for _ in range(count):
        form, options = rng.choice([{}, *(fields for fields, _ in FORMS.values())]), some_options(rng)
        response = ask(service, path, {**PATHS[path], **form, **options, "max_tokens": 6, "temperature": 0})
        statuses[response.status_code] += 1
        if response.status_code == 200:
            continue
        error = error_of(response, 400)
        field, message = error["param"], error["message"]
        assert field in options, (form, options, message)
        assert message.startswith(f"{field}="), message
        assert ": expected " in message
        if "no token" in message:  # without the field that it names, nothing is wrong, or something else is
            assert "; " in message
            others = {name: value for name, value in options.items() if name != field}
            again = ask(service, path, {**PATHS[path], **form, **others, "max_tokens": 6, "temperature": 0})
            assert again.status_code == 200 or error_of(again, 400)["param"] != field
    assert statuses[200] >= count // 10
    assert statuses[400] >= count // 10
    assert_nothing_is_held(family())


def test_a_stream_names_what_leaves_no_token_behind_its_first_ones(service):
    """In the middle of a text, where the status has been sent."""
    first, *_ = family().tokenizer.encode("queue", add_special_tokens=False)
    options = {"structured_outputs": {"choice": ["queue"]}, "allowed_token_ids": [first]}
    body = {"prompt": "config = ", "max_tokens": 9, **options}
    error = error_of(ask(service, "/v1/completions", body), 400)
    assert error["param"] == "allowed_token_ids"
    assert "at place 1 of the completion, where structured_outputs and allowed_token_ids together" in error["message"]
    assert events(ask(service, "/v1/completions", {**body, "stream": True}))[-1] == {"error": error}
