"""Which tools a model may and must call, beside forms of its text too, and what it is told of their results."""

import json
import logging

import pytest
from recorded_prompts import (
    CHATS,
    FORMATS,
    MESSAGES,
    NAMES,
    PROMPT,
    RESPONSES,
    SAY,
    asked,
    assert_refused,
    prompt_of,
    recording_service,
    tools_of,
)
from tiers import in_tiers

IMAGE = "[An image was here, which this model cannot see.]"
PNG = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(scope="module")
def service():
    return recording_service()


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
    assert_refused(response, f"tools[{len(names) - 1}]")


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_a_required_call_of_no_tool_is_refused(service, path):
    response = asked(service, path, [SAY], tools=tools_of(path), tool_choice=allowed(path, "required", []))
    assert_refused(response, "tools=[]")


def test_tools_of_servers_may_be_allowed_beside_others(service):
    choice = allowed(RESPONSES, "required", ["read"])
    choice["tools"].append({"type": "web_search"})
    tools = [*tools_of(RESPONSES), {"type": "web_search"}]
    assert set(called(RESPONSES, asked(service, RESPONSES, [SAY], tools=tools, tool_choice=choice))) == {"read"}
    assert_refused(asked(service, RESPONSES, [SAY], tools=tools[:-1], tool_choice=choice), "tool_choice.tools[1]")


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
    assert_refused(response, "format")


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
def test_images_and_files_of_tools_are_replaced_by_a_sentence(service, path, part, caplog):
    content = [{"type": TEXT[path], "text": "before"}, part, {"type": TEXT[path], "text": "after"}]
    with caplog.at_level(logging.WARNING, "jspec"):
        prompt = prompt_of(service, path, result_of(path, content))
    assert "before\n[A" in prompt
    assert "was here, which this model cannot see.]\nafter" in prompt
    assert (IMAGE in prompt) == ("image" in part["type"])
    assert f"of type {part['type']}" in caplog.text
    user = {"role": "user", "content": content}
    assert_refused(asked(service, path, [user]), "content[1]")


@pytest.mark.parametrize("path", PROMPT)
def test_a_part_of_an_unknown_type_is_refused_in_results_too(service, path):
    assert_refused(asked(service, path, result_of(path, [{"type": "hologram", "text": "x"}])), "hologram")


def test_texts_of_tool_results_are_in_the_prompt(service):
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
    assert_refused(asked(service, MESSAGES, result_of(MESSAGES, text, is_error="yes")), "is_error")


@pytest.mark.parametrize("path", PROMPT)
def test_null_is_the_empty_text(service, path):
    for messages in (result_of(path, None), [SAY, {"role": "user", "content": None}]):
        empty = json.loads(json.dumps(messages).replace("null", '""'))
        assert prompt_of(service, path, messages) == prompt_of(service, path, empty)
    silent = {"role": "assistant", "content": None}
    for fields in ({}, {"tool_calls": []}):
        expected = prompt_of(service, path, [SAY, {**silent, "content": ""}, SAY])
        assert prompt_of(service, path, [SAY, {**silent, **fields}, SAY]) == expected
