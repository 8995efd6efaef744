"""A server that keeps the last prompt, and requests, tools and results of tools in the form of each endpoint for chats."""

import dataclasses

from openai_server import CHAT, ask, family

import jspec
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


class Recording(Service):
    """Keeps the last prompt, and writes ``script`` if that is set."""

    script: str | None = None

    def requests(self, prompt, params, *args, **kwargs):
        self.prompt = self.decoded(prompt)
        if self.script is not None:
            form = StructuredOutputsParams(choice=[self.script])
            params = [dataclasses.replace(each, structured_outputs=form) for each in params]
        return super().requests(prompt, params, *args, **kwargs)


def recording_service() -> Recording:
    settings = {"tool_parser": "hermes", "keys": Keys(["k", "l"]), "chat_template": CHAT}
    return Recording(jspec.AsyncEngine(family()), ["family"], **settings)


def asked(service, path, messages, key="k", **fields):
    """The response; of a few tokens, unless a call or a form has to come to its end."""
    most = (
        60
        if fields.keys() & {"tool_choice", "output_format", *(form for each in FORMATS.values() for form in each)}
        else 8
    )
    body = {"model": "family", "seed": 1, PROMPT[path]: messages, MOST_TOKENS[path]: most, **fields}
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
