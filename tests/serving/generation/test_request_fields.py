"""Every field of the clients' own request types is honoured, harmless or refused, as ``request_fields.toml`` says."""

import dataclasses
import importlib
import os
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import ask
from request_types import MAX_PLACES, Chain, Examples, Place, fields_of, members, name_of, objects_in

import jspec
from jspec.commands.demo import FAMILY
from jspec.serving.generation.service import Service
from jspec.serving.http.errors import ApiError

pytest.importorskip("openai")
pytest.importorskip("anthropic")

TABLE = tomllib.loads((Path(__file__).parent / "request_fields.toml").read_text())
VERDICTS = ("told", "honoured", "harmless", "refused")
MARK = "zebra"  # in texts that the model has to be told
TEMPLATE = "{{ messages | tojson }}{{ tools | tojson if tools else '' }}"
TYPES = {
    "/v1/completions": ["openai.types.completion_create_params:CompletionCreateParamsNonStreaming"],
    "/v1/chat/completions": ["openai.types.chat.completion_create_params:CompletionCreateParamsNonStreaming"],
    "/v1/responses": ["openai.types.responses.response_create_params:ResponseCreateParamsNonStreaming"],
    "/v1/messages": [
        "anthropic.types.message_create_params:MessageCreateParamsNonStreaming",
        "anthropic.types.beta.message_create_params:MessageCreateParamsNonStreaming",
    ],
    "/v1/messages/count_tokens": [
        "anthropic.types.message_count_tokens_params:MessageCountTokensParams",
        "anthropic.types.beta.message_count_tokens_params:MessageCountTokensParams",
    ],
}
LOOK = {"name": "look", "description": "Looks."}
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["a"]}}, "required": ["x"], "additionalProperties": False}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
SAY = {"role": "user", "content": "Say."}
# Requests that every other one is added to.
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Say."},
    "/v1/chat/completions": {
        "messages": [SAY, {"role": "assistant", "tool_calls": [CALL]}],
        "tools": [{"type": "function", "function": {**LOOK, "parameters": SCHEMA}}],
    },
    "/v1/responses": {
        "input": [SAY, {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}],
        "tools": [{"type": "function", **LOOK, "parameters": SCHEMA}],
        "store": False,
    },
    "/v1/messages": {
        "messages": [
            SAY,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]},
        ],
        "tools": [{**LOOK, "input_schema": SCHEMA}],
    },
}
BASES["/v1/messages/count_tokens"] = BASES["/v1/messages"]
LISTS = ("messages", "input", "tools")  # of which the base's entries stay in front
# Values that refer to others of a request, or have a form that their type does not tell.
VALUES = dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "seed"), 1)
VALUES |= dict.fromkeys(("call_id", "tool_use_id", "tool_call_id"), "c")
VALUES |= dict.fromkeys(("parameters", "input_schema", "schema"), SCHEMA)
VALUES |= {"model": "family", "stop": "x", "name": "look", "arguments": "{}", "logit_bias": {"1": 1}, "prompt": "Say."}
VALUES |= {
    "best_of": 2,
    "web_search_options": {"search_context_size": "low"},
    "RequestDocumentBlock.source": {"type": "text", "media_type": "text/plain", "data": "x"},
    "ToolChoiceAllowed.tools": [{"type": "function", "name": "look"}],
    "ChatCompletionAllowedTools.tools": [{"type": "function", "function": {"name": "look"}}],
}
VALUES["DocumentBlock.source"] = VALUES["RequestDocumentBlock.source"]
EXAMPLES = Examples(
    VALUES, frozenset({"call_id", "schema", "ChatCompletionAssistantMessage.content", "SystemMessage.content"})
)
# Fields that have a meaning only beside others.
BESIDE: dict[str, dict[str, Any]] = {"top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}}


class Row:
    """What the table says of a type in the requests to an endpoint.

    Attributes:
      verdict: of all objects of the type; None if its fields have their own.
      fields: the verdicts of fields by their names.
      values: of a field, those alone that are accepted.
    """

    def __init__(self, given: Any):
        self.verdict = given if isinstance(given, str) else None
        told = {} if isinstance(given, str) else given
        self.fields = {field: verdict for verdict in VERDICTS for field in told.get(verdict, "").split()}
        self.values = told.get("values", {})


def rows_of(path: str) -> dict[str, Row]:
    """The rows of an endpoint by the names of types; that of the request itself is called ``request``."""
    own = TABLE.get(path.removesuffix("/count_tokens"), {})
    return {name: Row(given) for name, given in own.items()}


def roots(path: str) -> list[type]:
    found = []
    for where in TYPES[path]:
        module, _, name = where.partition(":")
        found.append(getattr(importlib.import_module(module), name))
    return found


def walk(path: str) -> tuple[dict[str, list[tuple[type, Chain]]], list[str]]:
    """Where objects of each row stand, and what the table does not say.

    What stands in fields that are harmless or refused needs no rows.
    """
    rows, places, missing = rows_of(path), defaultdict[str, list[tuple[type, Chain]]](list), []
    queue: list[tuple[str, type, Chain]] = [("request", root, ()) for root in roots(path)]
    while queue:
        name, kind, chain = queue.pop(0)
        if len(places[name]) >= MAX_PLACES or any(place.parent is kind for place in chain):
            continue
        places[name].append((kind, chain))
        row = rows.get(name)
        if row is None:
            missing.append(name)
            continue
        for field, hint in fields_of(kind).items() if row.verdict is None else ():
            if field not in row.fields:
                missing.append(f"{name}.{field}")
            if row.fields.get(field) not in ("told", "honoured"):
                continue
            for inner, wrap in objects_in(hint):
                here = f"{name}.{name_of(inner)}"
                own = here if here in rows else name_of(inner)
                queue.append((own, inner, (*chain, Place(kind, field, wrap))))
    return places, sorted(set(missing))


@pytest.mark.parametrize("path", TYPES)
def test_every_field_has_a_row(path):
    _, missing = walk(path)
    assert not missing


def test_every_row_has_a_field():
    stale = list[str]()
    for path in TABLE:
        others = [path, f"{path}/count_tokens"] if f"{path}/count_tokens" in TYPES else [path]
        seen = defaultdict[str, set[str]](set)
        for other in others:
            for name, found in walk(other)[0].items():
                seen[name] |= {field for kind, _ in found for field in fields_of(kind)}
        for name, row in rows_of(path).items():
            stale += (
                [name] if name not in seen else [f"{name}.{field}" for field in row.fields if field not in seen[name]]
            )
    assert not stale


class Taking(Service):
    """Answers 200 with the prompt as soon as the engine would take a request."""

    def requests(self, prompt, *args, **kwargs):
        super().requests(prompt, *args, **kwargs)
        raise ApiError(200, f"taken: {self.decoded(prompt)}")


@pytest.mark.nightly
def test_the_newest_packages_have_no_other_fields(tmp_path):
    """A field that a release brings needs a row, and then the release is the one that pyproject.toml names."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(tmp_path)]
    got = subprocess.run([*command, "openai", "anthropic"], capture_output=True, text=True, timeout=300)
    if got.returncode:
        pytest.skip(f"pip cannot fetch the packages: {got.stderr.strip().splitlines()[-1]}")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider", __file__]
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:]


@pytest.fixture(scope="module")
def service():
    llm = jspec.load(FAMILY / "target", max_len=1024, max_batch=2, page_size=32, dtype="float32")
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    return Taking(jspec.AsyncEngine(llm), names=["family"], chat_template=TEMPLATE, **parsers)


def requests_with(path: str, chain: Chain, value: Any) -> Iterator[dict[str, Any]]:
    for given in EXAMPLES.placed(chain, value) if chain else [value]:
        most = "max_output_tokens" if "responses" in path else "max_tokens"
        body = {"model": "family", most: 1, **BASES[path], **given}
        for name in LISTS:
            if chain and chain[0].field == name and name in BASES[path]:
                body[name] = [*BASES[path][name], *body[name], *([] if name == "tools" else [SAY])]
        for name, others in BESIDE.items():
            body |= others if name in given else {}
        yield body


@dataclasses.dataclass
class Trial:
    """What a server says of a value in all its places in a request."""

    service: Service
    path: str
    places: list[tuple[type, Chain]]

    def of(self, make: Callable[[type], Any]) -> list[tuple[int, str]]:
        bodies = [body for kind, chain in self.places for body in requests_with(self.path, chain, make(kind))]
        answers = [ask(self.service, self.path, body) for body in bodies]
        return [(answer.status_code, answer.text) for answer in answers]

    def assert_taken(self, make: Callable[[type], Any], looked_up: bool = False, told: bool = False):
        """Check that it is accepted in one of its places, with its mark in the prompt, or that nothing has its name."""
        seen = self.of(make)
        told = told and not self.path.endswith("count_tokens")  # whose answer has no prompt
        taken = [text for status, text in seen if status == 200 or (status == 404 and looked_up)]
        assert any(MARK in text or not told for text in taken), seen

    def assert_refused(self, make: Callable[[type], Any], names: Collection[str]):
        """Check that it is refused in all of them, by a name."""
        seen = self.of(make)
        assert all(status == 400 and any(name in text for name in names) for status, text in seen), seen


CASES = [(path, name) for path in TYPES for name in rows_of(path)]


@pytest.mark.parametrize(("path", "name"), CASES, ids=lambda value: value.replace("/v1/", ""))
def test_the_server_does_what_the_table_says(service, path, name):
    row, found = rows_of(path)[name], walk(path)[0].get(name, [])
    trial = Trial(service, path, found)
    if row.verdict == "refused":
        trial.assert_refused(EXAMPLES.least, {"type", *(chain[-1].field for _, chain in found)})
    elif row.verdict is not None and found:
        trial.assert_taken(EXAMPLES.least)
    for field, verdict in row.fields.items():
        trial = Trial(service, path, [(kind, chain) for kind, chain in found if field in fields_of(kind)])
        looked_up = field == "previous_response_id" or name == "ItemReference"
        values = {str(value): value for kind, _ in trial.places for value in _values(kind, field, verdict)}
        for value in values.values():

            def make(kind: type, field: str = field, value: Any = value) -> dict[str, Any]:
                return {**EXAMPLES.least(kind), field: value}

            if verdict == "refused" or value not in row.values.get(field, [value]):
                trial.assert_refused(make, [field])
            else:
                trial.assert_taken(make, looked_up, verdict == "told")


def _values(kind: type, field: str, verdict: str) -> list[Any]:
    """Values of a field that are tried; none of those whose objects have rows of their own."""
    hint = fields_of(kind)[field]
    if verdict == "told":
        return [MARK]
    if verdict == "honoured" and any(True for _ in objects_in(hint)) and str not in members(hint):
        return []
    return EXAMPLES.of(hint, field, kind)
