"""A server that keeps the last prompt, and requests, tools and results of tools in the form of each endpoint for chats."""

import dataclasses
from collections.abc import Iterator

import pytest
from openai_server import ask, family, service_of

from jspec.sampling.structured import StructuredOutputsParams
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import Keys

NAMES = ("delete_all", "read", "look")
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"], "additionalProperties": False}
FORM = {"type": "object", "properties": {"y": {"enum": [1]}}, "required": ["y"], "additionalProperties": False}
SAY = {"role": "user", "content": "Say."}
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PROMPT = {CHATS: "messages", RESPONSES: "input", MESSAGES: "messages"}
MOST_TOKENS = {CHATS: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}
FORMATS = {
    CHATS: {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "f", "schema": FORM}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": FORM}}},
}


def recording_service() -> Iterator[Service]:
    """A service with the last ``prompt``; its model writes ``script`` if that is set."""
    service = service_of(family(), tool_parser="hermes", keys=Keys(["k", "l"]))
    service.script = None
    make = service.llm.engine.request

    def request(prompt, params, **about):
        service.prompt = service.decoded(prompt)
        if service.script is not None:
            params = dataclasses.replace(params, structured_outputs=StructuredOutputsParams(choice=[service.script]))
        return make(prompt, params, **about)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service.llm.engine, "request", request)
        yield service


def asked(service, path, messages, key="k", **fields):
    body = {"model": "family", "seed": 1, PROMPT[path]: messages, MOST_TOKENS[path]: 60, **fields}
    return ask(service, path, body, {"authorization": f"Bearer {key}"})


def prompt_of(service, path, messages, **fields) -> str:
    response = asked(service, path, messages, **{MOST_TOKENS[path]: 1, **fields})
    assert response.status_code == 200, response.text
    return service.prompt


def assert_refused(response, words: str):
    assert (response.status_code, words in response.text) == (400, True), response.text


def tools_of(path, names=NAMES):
    if path == CHATS:
        return [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]
    if path == RESPONSES:
        return [{"type": "function", "name": name, "parameters": SCHEMA} for name in names]
    return [{"name": name, "input_schema": SCHEMA} for name in names]
