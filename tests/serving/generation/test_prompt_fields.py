"""What carries a part of the prompt reaches the model, or is refused: references, choices among tools, results of tools."""

import asyncio
import dataclasses
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from openai_server import ask, family, service_of
from tiers import in_tiers

from jspec.sampling.params import SamplingParams
from jspec.sampling.structured import StructuredOutputsParams
from jspec.serving.generation.service import Service
from jspec.serving.http.auth import Keys
from jspec.serving.server.app import make_app
from jspec.serving.server.served_model import sampling_defaults

NAMES = ("delete_all", "read", "look")
SCHEMA = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"], "additionalProperties": False}
FORM = {"type": "object", "properties": {"y": {"enum": [1]}}, "required": ["y"], "additionalProperties": False}
SAY = {"role": "user", "content": "Say."}
IMAGE = "[An image was here, which this model cannot see.]"
PNG = "data:image/png;base64,iVBORw0KGgo="
CHATS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PROMPT = {CHATS: "messages", RESPONSES: "input", MESSAGES: "messages"}
SHORT = {CHATS: {"max_tokens": 60}, RESPONSES: {"max_output_tokens": 60}, MESSAGES: {"max_tokens": 60}}


class Recording(Service):
    """Keeps the last prompt, and writes ``script`` if that is set."""

    script: str | None = None

    def requests(self, prompt, params, *args, **kwargs):
        self.prompt = self.decoded(prompt)
        if self.script is not None:
            form = StructuredOutputsParams(choice=[self.script])
            params = [dataclasses.replace(each, structured_outputs=form) for each in params]
        return super().requests(prompt, params, *args, **kwargs)


@pytest.fixture(scope="module")
def service():
    like = service_of(family(), tool_parser="hermes", keys=Keys(["k", "l"]))
    like.__class__ = Recording
    return like


def asked(service, path, messages, key="k", **fields):
    body = {"model": "family", "seed": 1, PROMPT[path]: messages, **SHORT[path], **fields}
    return ask(service, path, body, {"authorization": f"Bearer {key}"})


def prompt_of(service, path, messages, **fields) -> str:
    response = asked(service, path, messages, **{**{name: 1 for name in SHORT[path]}, **fields})
    assert response.status_code == 200, response.text
    return service.prompt


def tools_of(path, names=NAMES):
    if path == CHATS:
        return [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]
    if path == RESPONSES:
        return [{"type": "function", "name": name, "parameters": SCHEMA} for name in names]
    return [{"name": name, "input_schema": SCHEMA} for name in names]


def allowed(path, mode, names):
    if path == CHATS:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def called(path, response) -> list[str]:
    """The names of the tools that a response calls."""
    assert response.status_code == 200, response.text
    body = response.json()
    if path == CHATS:
        return [call["function"]["name"] for call in body["choices"][0]["message"].get("tool_calls", ())]
    items = body["output"] if path == RESPONSES else body["content"]
    return [item["name"] for item in items if item["type"] in ("function_call", "tool_use")]


# Tools that may be called.


@pytest.mark.parametrize("name", in_tiers(NAMES, test=("read",)))
@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_a_required_call_is_of_an_allowed_tool(service, path, name):
    fields = {"tools": tools_of(path), "tool_choice": allowed(path, "required", [name]), "temperature": 2.0}
    for seed in range(3):
        assert set(called(path, asked(service, path, [SAY], **fields, seed=seed))) == {name}


@pytest.mark.parametrize("names", [["read"], ["read", "look"], []])
@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_a_call_of_another_tool_is_text(service, path, names, monkeypatch):
    """The prompt has all tools, so that it stays a prefix of later ones."""
    monkeypatch.setattr(service, "chat_template", "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}")
    for name in NAMES:
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {{"x": "a"}}}}\n</tool_call>'
        monkeypatch.setattr(service, "script", text)
        response = asked(service, path, [SAY], tools=tools_of(path), tool_choice=allowed(path, "auto", names))
        assert called(path, response) == [name] * (name in names)
        assert (json.dumps(text)[1:-1] in response.text) == (name not in names)
        assert service.prompt == "delete_all;read;look;"


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("path", [CHATS, RESPONSES])
@pytest.mark.parametrize("names", [["absent"], ["read", "absent"], [3], [None], ["read", ""]])
def test_an_allowed_tool_that_is_absent_is_refused(service, path, mode, names):
    response = asked(service, path, [SAY], tools=tools_of(path), tool_choice=allowed(path, mode, names))
    assert (response.status_code, f"tools[{len(names) - 1}]" in response.text) == (400, True), response.text


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_a_required_call_of_no_tool_is_refused(service, path):
    response = asked(service, path, [SAY], tools=tools_of(path), tool_choice=allowed(path, "required", []))
    assert (response.status_code, "tools=[]" in response.text) == (400, True), response.text


def test_tools_of_servers_may_be_allowed_beside_others(service):
    choice = allowed(RESPONSES, "required", ["read"])
    choice["tools"].append({"type": "web_search"})
    tools = [*tools_of(RESPONSES), {"type": "web_search"}]
    assert set(called(RESPONSES, asked(service, RESPONSES, [SAY], tools=tools, tool_choice=choice))) == {"read"}
    response = asked(service, RESPONSES, [SAY], tools=tools[:-1], tool_choice=choice)
    assert (response.status_code, "tool_choice.tools[1]" in response.text) == (400, True)


FORMATS = {
    CHATS: {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": FORM}}},
    RESPONSES: {"text": {"format": {"type": "json_schema", "name": "f", "schema": FORM}}},
    MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": FORM}}},
}
NAMED = {
    CHATS: {"type": "function", "function": {"name": "read"}},
    RESPONSES: {"type": "function", "name": "read"},
    MESSAGES: {"type": "tool", "name": "read"},
}


@pytest.mark.parametrize("forced", ["required", "named"])
@pytest.mark.parametrize("path", PROMPT)
def test_a_forced_call_beside_a_form_is_the_call_alone(service, path, forced):
    required = {"type": "any"} if path == MESSAGES else "required"
    choice = NAMED[path] if forced == "named" else required
    response = asked(service, path, [SAY], tools=tools_of(path, ["read"]), tool_choice=choice, **FORMATS[path])
    assert set(called(path, response)) == {"read"}


@pytest.mark.parametrize("path", PROMPT)
def test_a_bad_form_beside_a_forced_call_is_still_refused(service, path):
    bad = json.loads(json.dumps(FORMATS[path]).replace("json_schema", "json_scheme"))
    required = {"type": "any"} if path == MESSAGES else "required"
    response = asked(service, path, [SAY], tools=tools_of(path, ["read"]), tool_choice=required, **bad)
    assert (response.status_code, "format" in response.text) == (400, True), response.text


# Items of responses before.


def test_a_reference_is_the_item(service):
    first = asked(
        service, RESPONSES, [SAY], tools=tools_of(RESPONSES), tool_choice="required", parallel_tool_calls=False
    ).json()
    [call] = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "7"}
    whole = prompt_of(service, RESPONSES, [SAY, call, result], tools=tools_of(RESPONSES))
    for reference in (
        {"type": "item_reference", "id": call["id"]},
        {"type": None, "id": call["id"]},
        {"id": call["id"]},
    ):
        assert prompt_of(service, RESPONSES, [SAY, reference, result], tools=tools_of(RESPONSES)) == whole
    text = asked(service, RESPONSES, [SAY]).json()["output"][0]
    whole = prompt_of(service, RESPONSES, [SAY, text, SAY])
    assert prompt_of(service, RESPONSES, [SAY, {"type": "item_reference", "id": text["id"]}, SAY]) == whole


@pytest.mark.parametrize("why", ["unknown", "of another key", "not stored", "forgotten"])
def test_a_reference_to_nothing_is_404(service, why):
    first = asked(service, RESPONSES, [SAY], store=why != "not stored").json()
    id, key = first["output"][0]["id"], "l" if why == "of another key" else "k"
    if why == "forgotten":
        service.stored_responses.remove(first["id"])
    reference = {"type": "item_reference", "id": "msg_x" if why == "unknown" else id}
    response = asked(service, RESPONSES, [SAY, reference], key)
    assert (response.status_code, response.json()["error"]["param"]) == (404, "input[1].id")
    assert reference["id"] in response.json()["error"]["message"]


@pytest.mark.parametrize("id", [None, 3, ["x"]])
def test_a_reference_without_an_id_is_refused(service, id):
    response = asked(service, RESPONSES, [SAY, {"type": "item_reference", "id": id}])
    assert (response.status_code, "input[1].id" in response.text) == (400, True)


# Results of tools.

CALLS = {
    CHATS: {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "read", "arguments": "{}"}}]},
    RESPONSES: {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"},
    MESSAGES: {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "read", "input": {}}]},
}


def result_of(path, content, **fields):
    if path == CHATS:
        return [SAY, CALLS[path], {"role": "tool", "tool_call_id": "c", "content": content, **fields}]
    if path == RESPONSES:
        return [SAY, CALLS[path], {"type": "function_call_output", "call_id": "c", "output": content, **fields}]
    block = {"type": "tool_result", "tool_use_id": "c", "content": content, **fields}
    return [SAY, CALLS[path], {"role": "user", "content": [block]}]


UNSEEN = {
    CHATS: [{"type": "image_url", "image_url": {"url": PNG}}, {"type": "file", "file": {}}, {"type": "input_audio"}],
    RESPONSES: [{"type": "input_image", "image_url": PNG}, {"type": "input_file", "file_data": "x"}],
    MESSAGES: [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
        {"type": "document", "source": {"type": "url", "url": "http://x"}},
    ],
}
TEXT = {CHATS: "text", RESPONSES: "input_text", MESSAGES: "text"}


@pytest.mark.parametrize(("path", "part"), [(path, part) for path, parts in UNSEEN.items() for part in parts], ids=str)
def test_what_a_tool_gives_and_the_model_cannot_see_is_said(service, path, part, caplog):
    content = [{"type": TEXT[path], "text": "before"}, part, {"type": TEXT[path], "text": "after"}]
    with caplog.at_level(logging.WARNING, "jspec"):
        prompt = prompt_of(service, path, result_of(path, content))
    assert "before\n[A" in prompt
    assert "was here, which this model cannot see.]\nafter" in prompt
    assert (IMAGE in prompt) == ("image" in part["type"])
    assert f"of type {part['type']}" in caplog.text
    user = {"role": "user", "content": content}
    response = asked(service, path, [user])
    assert (response.status_code, "content[1]" in response.text) == (400, True), response.text


@pytest.mark.parametrize("path", PROMPT)
def test_a_part_of_an_unknown_type_is_refused_in_results_too(service, path):
    response = asked(service, path, result_of(path, [{"type": "hologram", "text": "x"}]))
    assert (response.status_code, "hologram" in response.text) == (400, True)


def test_what_a_tool_gives_as_text_is_told(service):
    source = {"type": "content", "content": [{"type": "text", "text": "inner"}]}
    blocks = [
        {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "found"}]},
        {"type": "document", "title": "D", "source": source},
        {"type": "tool_reference", "tool_name": "look"},
    ]
    assert "T\nS\nfound\nD\ninner\nlook" in prompt_of(service, MESSAGES, result_of(MESSAGES, blocks))


@pytest.mark.parametrize("text", ["no such file", "", [{"type": "text", "text": "no such file"}], None])
def test_the_model_is_told_of_an_error(service, text):
    said = prompt_of(service, MESSAGES, result_of(MESSAGES, text, is_error=True))
    assert ("Error: no such file" if text else "Error: ") in said
    for fields in ({"is_error": False}, {"is_error": None}, {}):
        assert "Error" not in prompt_of(service, MESSAGES, result_of(MESSAGES, text, **fields))
    assert prompt_of(service, MESSAGES, result_of(MESSAGES, "error 3", is_error=True)).count("rror") == 1
    response = asked(service, MESSAGES, result_of(MESSAGES, text, is_error="yes"))
    assert (response.status_code, "is_error" in response.text) == (400, True)


@pytest.mark.parametrize("path", PROMPT)
def test_null_is_the_empty_text(service, path):
    for messages in (result_of(path, None), [SAY, {"role": "user", "content": None}]):
        empty = json.loads(json.dumps(messages).replace("null", '""'))
        assert prompt_of(service, path, messages) == prompt_of(service, path, empty)
    silent = {"role": "assistant", "content": None}
    for fields in ({}, {"tool_calls": []}):
        expected = prompt_of(service, path, [SAY, {**silent, "content": ""}, SAY])
        assert prompt_of(service, path, [SAY, {**silent, **fields}, SAY]) == expected


# Anthropic's other fields.


@pytest.mark.parametrize("type", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}, "x", True])
@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_threads_are_refused_as_clients_know_it(service, path, type):
    body = {"model": "family", "max_tokens": 1, "messages": [SAY], "thread": type}
    response = ask(service, path, body, {"authorization": "Bearer k"})
    error = response.json()["error"]
    assert (response.status_code, response.json()["type"], error["type"]) == (400, "error", "invalid_request_error")
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert "thread" in error["message"]
    assert ask(service, path, {**body, "thread": None}, {"authorization": "Bearer k"}).status_code == 200


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_sdks_tool_runner_goes_on_without_a_thread(service):
    anthropic, httpx = pytest.importorskip("anthropic"), pytest.importorskip("httpx2")
    sent = list[set[str]]()

    async def record(request):
        sent.append(set(json.loads(request.content)))

    @anthropic.beta_async_tool
    async def look(x: str) -> str:
        """Looks.

        Args:
          x: what.
        """
        return x

    async def run():
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, event_hooks={"request": [record]}) as http:
            client = anthropic.AsyncAnthropic(base_url="http://test", api_key="k", max_retries=0, http_client=http)
            runner = client.beta.messages.tool_runner(model="family", max_tokens=4, tools=[look], messages=[SAY])
            return await runner.until_done()

    assert asyncio.run(asyncio.wait_for(run(), 120)).usage.output_tokens == 4
    assert ["thread" in body for body in sent] == [True, False]


def test_the_former_name_of_a_form_is_one(service):
    form = FORMATS[MESSAGES]["output_config"]["format"]
    for fields in ({"output_format": form}, {"output_format": form, "output_config": {"format": form}}):
        [block] = asked(service, MESSAGES, [SAY], thinking={"type": "disabled"}, **fields).json()["content"]
        assert json.loads(block["text"]) == {"y": 1}
    other = {"type": "json_schema", "schema": SCHEMA}
    response = asked(service, MESSAGES, [SAY], output_format=other, output_config={"format": form})
    assert (response.status_code, "output_format" in response.text) == (400, True)
    response = asked(service, MESSAGES, [SAY], output_format={"type": "json"})
    assert (response.status_code, "output_format" in response.text) == (400, True)


def test_a_system_message_may_be_meant_for_one_turn(service):
    reminder = {"role": "system", "content": "Remember.", "clear_at": "next_user_message"}
    assert "Remember." in prompt_of(service, MESSAGES, [SAY, reminder])
    assert "Remember." not in prompt_of(service, MESSAGES, [SAY, reminder, SAY])
    assert "Remember." in prompt_of(service, MESSAGES, [SAY, {**reminder, "clear_at": "never"}, SAY])


# Values that ask for nothing.

NEUTRAL = {
    "/v1/completions": {
        "prompt": "Say.",
        "best_of": 1,
        "echo": False,
        "max_tokens": 1,
        "n": 1,
        "suffix": "",
        "top_p": 1,
    },
    CHATS: {
        **{"frequency_penalty": 0, "logprobs": False, "modalities": ["text"], "n": 1, "parallel_tool_calls": True},
        **{"presence_penalty": 0, "response_format": {"type": "text"}, "service_tier": "auto", "store": False},
        **{
            "temperature": 1,
            "top_logprobs": 0,
            "top_p": 1,
            "verbosity": "medium",
            "prompt_cache_options": {"ttl": "30m"},
        },
        **{"reasoning_effort": "medium", "stop": None, "tool_choice": None, "web_search_options": None, "tools": []},
    },
    RESPONSES: {
        **{
            "background": False,
            "include": [],
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium"},
            "top_p": 1,
        },
        **{
            "service_tier": "auto",
            "store": True,
            "temperature": 1,
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
        },
        **{"tool_choice": "auto", "tools": [], "top_logprobs": 0, "truncation": "disabled", "metadata": {}},
        **{"prompt_cache_options": {"mode": "implicit", "prewarm": False}, "conversation": None, "prompt": None},
    },
    MESSAGES: {
        **{
            "service_tier": "auto",
            "speed": "standard",
            "stop_sequences": [],
            "temperature": 1,
            "tools": [],
            "top_p": 1,
        },
        **{"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}, "container": None, "mcp_servers": []},
        **{"output_config": {}, "output_format": None, "thread": None, "fallbacks": None, "context_management": None},
    },
}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in NEUTRAL for field in [*NEUTRAL[path], "all"]])
def test_a_value_that_asks_for_nothing_is_accepted(service, path, field):
    fields = NEUTRAL[path] if field == "all" else {field: NEUTRAL[path][field]}
    body = {"model": "family", "max_output_tokens" if path == RESPONSES else "max_tokens": 1, **fields}
    body[PROMPT.get(path, "prompt")] = [SAY] if path in PROMPT else "Say."
    assert ask(service, path, body, {"authorization": "Bearer k"}).status_code == 200


def test_what_would_generate_nothing_is_refused(service):
    response = asked(service, RESPONSES, [SAY], prompt_cache_options={"prewarm": True})
    assert (response.status_code, "prompt_cache_options.prewarm" in response.text) == (400, True)


# What the server says, and its example.


def test_defaults_of_sampling_are_named_with_their_values():
    said = sampling_defaults(SamplingParams(temperature=0.7, top_k=20, repetition_penalty=1.1))
    assert "temperature=0.7, top_k=20, repetition_penalty=1.1, so that temperature 0 is not the argmax" in said
    assert "argmax" not in sampling_defaults(SamplingParams(temperature=0.7))
    assert "jspec's default" in sampling_defaults(SamplingParams())


def test_the_examples_folder_of_clients_may_be_relative(tmp_path):
    """A stand-in for a client shows where it was looked for, and from where."""
    program = tmp_path / "clients" / "node_modules" / ".bin" / "qwen"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nsed -i 's/41/42/' a.py\necho 42\n")
    program.chmod(0o755)
    script = Path(__file__).parents[3] / "examples" / "agents" / "run.py"
    command = [sys.executable, str(script), "--clients", "clients", "--address", "http://127.0.0.1:9", "qwen-code"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, "qwen-code: '42'" in ended.stdout) == (0, True), ended.stderr
