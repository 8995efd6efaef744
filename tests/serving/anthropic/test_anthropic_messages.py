"""``/v1/messages``: Anthropic's requests, messages, events and errors."""

import json
import random

import pytest
from openai_server import CHAT, ask, family, named_events, service_of

from jspec.serving.anthropic.conversation import chat_of
from jspec.serving.anthropic.protocol import CountTokensRequest, MessagesRequest
from jspec.serving.http.auth import Keys
from jspec.serving.http.errors import ApiError

READ = {
    "name": "read_file",
    "description": "Reads.",
    "input_schema": {"type": "object", "properties": {"path": {"enum": ["a.py", "b.py"]}}, "required": ["path"]},
}
SAY = [{"role": "user", "content": "Read a file."}]
ANY = {"type": "any", "disable_parallel_tool_use": True}
PATH = "/v1/messages"


@pytest.fixture(scope="module")
def service():
    return service_of(family())


def message(service, **fields):
    return ask(service, PATH, {"model": "family", "max_tokens": 60, "messages": SAY, "seed": 1, **fields})


def error_of(response, status, kind="invalid_request_error"):
    assert response.status_code == status, response.text
    body = response.json()
    assert (set(body), body["type"], body["error"]["type"]) == ({"type", "error"}, "error", kind)
    return body["error"]["message"]


def test_a_message_has_text(service):
    body = message(service, max_tokens=8, stream=False).json()
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "family")
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    [block] = body["content"]
    assert (block["type"], bool(block["text"])) == ("text", True)
    assert body["usage"]["output_tokens"] == 8
    assert body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] > 4


def test_a_stream_tells_the_same(service):
    whole = message(service, max_tokens=24).json()
    events = named_events(message(service, max_tokens=24, stream=True))
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert text == whole["content"][0]["text"]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 24


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "read_file"}]
)
@pytest.mark.parametrize("parser", [None, "hermes"])
def test_a_call_is_a_block(choice, parser):
    own = service_of(family(), tool_parser=parser)
    fields = {"tools": [READ], "tool_choice": choice, "max_tokens": 120}
    body = message(own, **fields).json()
    [block] = body["content"]
    assert (block["type"], block["name"], body["stop_reason"]) == ("tool_use", "read_file", "tool_use")
    assert block["input"]["path"] in ("a.py", "b.py")
    assert block["id"].startswith("toolu_")
    events = named_events(message(own, **fields, stream=True))
    start = next(event for event in events if event["type"] == "content_block_start")
    assert start["content_block"] == {**block, "id": start["content_block"]["id"], "input": {}}
    parts = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == block["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_thinking_is_a_block():
    template = CHAT.removesuffix("{% endif %}") + "<think>{% endif %}"
    own = service_of(family(), reasoning_parser="qwen3", chat_template=template)
    body = message(own, max_tokens=10, thinking={"type": "adaptive"}).json()
    assert [block["type"] for block in body["content"]] == ["thinking"]
    assert body["content"][0]["signature"] == ""
    assert message(own, max_tokens=10, thinking={"type": "disabled"}).json()["content"] == []


def test_an_answer_that_is_begun_is_gone_on_with(service):
    begun = [*SAY, {"role": "assistant", "content": [{"type": "text", "text": "class A"}]}]
    body = message(service, max_tokens=8, messages=begun).json()
    as_chat = [*SAY, {"role": "assistant", "content": "class A"}]
    open_ended = {"continue_final_message": True, "add_generation_prompt": False}
    fields = {"model": "family", "messages": as_chat, "max_tokens": 8, "seed": 1, **open_ended}
    chat = ask(service, "/v1/chat/completions", fields).json()
    assert body["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    prompt = family().chat_prompt(as_chat, chat_template=CHAT, **open_ended)
    counted = ask(service, f"{PATH}/count_tokens", {"model": "family", "messages": begun}).json()
    assert counted == {"input_tokens": len(prompt)}
    called = {"type": "tool_use", "id": "1", "name": "read_file", "input": {}}
    for content in ("", " \n", [*begun[-1]["content"], called]):  # nothing that the model could go on with
        request = CountTokensRequest(messages=[*SAY, {"role": "assistant", "content": content}])
        assert "continue_final_message" not in chat_of(request)[0]


def test_stop_sequences_are_told(service):
    text = message(service, max_tokens=24).json()["content"][0]["text"]
    body = message(service, max_tokens=24, stop_sequences=[text[4:7]]).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", text[4:7])


def test_max_tokens_may_be_more_than_the_context_has(service):
    body = message(service, max_tokens=32_000, temperature=0).json()
    assert body["stop_reason"] in ("model_context_window_exceeded", "end_turn")


def test_tokens_are_counted(service):
    body = ask(service, f"{PATH}/count_tokens", {"model": "family", "messages": SAY, "system": "Be brief."}).json()
    used = message(service, system="Be brief.", max_tokens=1).json()["usage"]
    assert body == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}


def test_unknown_fields_and_tools_of_servers_are_ignored_with_one_line(service, caplog):
    with caplog.at_level("INFO", "jspec.serve"):
        tools = [{"type": "web_search_20250305", "name": "web_search"}]
        fields = {"unheard_of": {"a": 1}, "a\nb": 2, "thinking": {"type": "new"}, "metadata": {"user_id": "{}"}}
        body = message(service, max_tokens=2, tools=tools, **fields)
    assert body.status_code == 200
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "/v1/messages: ignored tools[0].type='web_search_20250305', thinking.type='new', 'a\\nb', unheard_of"


def test_a_key_may_be_in_x_api_key():
    own = service_of(family(), keys=Keys(["secret"]))
    body = {"model": "family", "max_tokens": 1, "messages": SAY}
    assert ask(own, PATH, body, {"x-api-key": "secret"}).status_code == 200
    assert ask(own, PATH, body, {"authorization": "Bearer secret", "x-api-key": "other"}).status_code == 200
    for headers in ({}, {"x-api-key": "other"}, {"authorization": "Bearer other", "x-api-key": "secret"}):
        assert "x-api-key" in error_of(ask(own, PATH, body, headers), 401, "authentication_error")


RESULT = {"type": "tool_result", "tool_use_id": "t1"}
USE = {"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "a.py"}}


def said(*content, role="user"):
    """A message with these blocks, of which a text may stand for its block."""
    return {"role": role, "content": [{"type": "text", "text": b} if isinstance(b, str) else b for b in content]}


def test_a_conversation_is_translated():
    thinking = {"type": "thinking", "thinking": "hm", "signature": ""}
    request = MessagesRequest(
        max_tokens=5,
        system=said("x-anthropic-billing-header: cc=1;", "Be brief.")["content"],
        messages=[
            said({"type": "text", "text": "a", "cache_control": {}}, "b"),
            {"role": "system", "content": "Agents."},
            said(thinking, {"type": "redacted_thinking", "data": "x"}, "I read.", USE, role="assistant"),
            said({**RESULT, "content": said("x = 1")["content"]}, "So?"),
        ],
        tools=[{**READ, "strict": True}],
        tool_choice=ANY,
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        stop_sequences=["."],
    )
    chat, left_out = chat_of(request)
    function = {"name": "read_file", "arguments": '{"path": "a.py"}'}
    calls = [{"id": "t1", "type": "function", "function": function}]
    assert chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "system", "content": "Agents."},
        {"role": "assistant", "content": "I read.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t1", "content": "x = 1"},
        {"role": "user", "content": "So?"},
    ]
    parameters = READ["input_schema"]
    described = {"name": "read_file", "description": "Reads.", "parameters": parameters, "strict": True}
    assert chat["tools"] == [{"type": "function", "function": described}]
    assert (chat["tool_choice"], chat["parallel_tool_calls"], chat["reasoning_effort"]) == ("required", False, "high")
    assert chat["response_format"] == {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert (chat["max_tokens"], chat["stop"], left_out) == (5, ["."], [])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role='tool': expected"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content=7: expected text"),
        ({"messages": [said(7)]}, "messages[0].content[0]=7"),
        ({"messages": [{"role": "user"}]}, "messages[0].content=None: expected text"),
        ({"messages": [said({"type": "image"})]}, "messages[0].content[0].type='image'"),
        ({"messages": [said({"type": "text"})]}, "messages[0].content[0].text=None"),
        ({"messages": [said(RESULT)]}, "messages[0].content[0].tool_use_id='t1': expected the id of a tool_use"),
        (
            {"messages": [said(USE, role="assistant"), said({**RESULT, "content": [{"type": "chart"}]})]},
            "messages[1].content[0].content[0].type='chart'",
        ),
        ({"messages": [said({"type": "tool_use", "id": 1}, role="assistant")]}, "messages[0].content[0]="),
        ({"messages": SAY, "tools": [{"name": ""}]}, "tools[0].name=''"),
        ({"messages": SAY, "tools": [{"name": "f", "input_schema": 7}]}, "tools[0].input_schema=7"),
        ({"messages": SAY, "system": {"a": 1}}, "system={'a': 1}: expected text"),
        ({"messages": SAY, "tools": [READ], "tool_choice": {"type": "some"}}, "tool_choice.type='some'"),
        ({"messages": SAY, "tools": [READ], "tool_choice": {"type": ["tool"]}}, "tool_choice.type=['tool']"),
        ({"messages": SAY, "tools": [READ], "tool_choice": {"type": "tool"}}, "tool_choice.name=None: expected one of"),
        (
            {"messages": SAY, "tools": [READ], "tool_choice": {"type": "auto", "disable_parallel_tool_use": "yes"}},
            "tool_choice.disable_parallel_tool_use='yes': expected true or false",
        ),
        ({"messages": SAY, "tools": [{**READ, "strict": 1}]}, "tools[0].strict=1: expected true or false"),
        ({"messages": SAY, "thinking": {"type": ["disabled"]}}, "thinking.type=['disabled']: expected one of enabled"),
        (
            {"messages": [said({**RESULT, "tool_use_id": ["t1"]})]},
            "messages[0].content[0].tool_use_id=['t1']: expected the id of a tool_use",
        ),
        ({"messages": SAY, "output_config": {"effort": "huge"}}, "output_config.effort='huge'"),
        ({"messages": SAY, "output_config": {"format": {"type": "x"}}}, "output_config.format="),
    ],
)
def test_errors_name_their_path(fields, words):
    with pytest.raises(ApiError) as error:
        chat_of(CountTokensRequest(**fields))
    assert error.value.message.startswith(words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens=0: expected"),
        ({"model": "gpt"}, "the model 'gpt' does not exist"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [said("a b " * 400)]}, "prompt is too long: "),
        ({"stop_sequences": ["x" * 1001]}, "stop_sequences has a text of 1001"),
        (
            {"tools": [READ], "tool_choice": {"type": "tool", "name": "w"}},
            "tool_choice.name='w': expected one of read_",
        ),
    ],
)
def test_errors_have_anthropics_form(service, fields, words):
    status, kind = (404, "not_found_error") if "model" in fields else (400, "invalid_request_error")
    assert words in error_of(message(service, **fields), status, kind)


PROMPTS = (
    "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}"
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{{ reasoning_effort }}{{ enable_thinking }}"
    "{% if add_generation_prompt %}def {% endif %}"
)
LIST = {"name": "list_files", "input_schema": {"type": "object", "properties": {}}}
FIELDS = {  # those that may change a prompt
    "system": ("Be brief.", said("x-anthropic-billing-header: 1", "Be.")["content"]),
    "tools": ([READ], [READ, LIST]),
    "tool_choice": ({"type": "auto"}, {"type": "none"}, ANY, {"type": "tool", "name": "read_file"}),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 9}),
    "output_config": ({"effort": "low"}, {"effort": "max"}),
    "messages": (
        [*SAY, {"role": "assistant", "content": "I begin"}],
        [*SAY, {"role": "system", "content": "Late."}],
        [*SAY, said(USE, role="assistant"), said({**RESULT, "content": "x"})],
    ),
}


@pytest.mark.parametrize("parser", [None, "hermes"])
def test_a_count_is_what_the_request_uses(parser):
    """Of all pairs of values, in random combinations of the other fields."""
    own = service_of(family(), tool_parser=parser, reasoning_parser="qwen3", chat_template=PROMPTS)
    draw = random.Random(1)
    for name, values in FIELDS.items():
        for value in values:
            others = {other: draw.choice([None, *FIELDS[other]]) for other in FIELDS if other != name}
            fields = {key: given for key, given in {**others, name: value}.items() if given is not None}
            if "tools" not in fields and fields.get("tool_choice", {}).get("type") in ("any", "tool"):
                fields["tools"] = [READ]
            used = message(own, **fields, max_tokens=1).json()["usage"]
            counted = ask(own, f"{PATH}/count_tokens", {"model": "family", "messages": SAY, **fields}).json()
            assert counted == {"input_tokens": used["input_tokens"] + used["cache_read_input_tokens"]}, fields


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_chat_is_tokenized_as_it_is_asked(choice):
    own = service_of(family(), chat_template=PROMPTS)
    tools = [{"type": "function", "function": {"name": "read_file", "parameters": READ["input_schema"]}}]
    chat = {"messages": SAY, "tools": tools, "tool_choice": choice}
    used = ask(own, "/v1/chat/completions", {**chat, "max_tokens": 1}).json()["usage"]
    assert ask(own, "/tokenize", chat).json()["count"] == used["prompt_tokens"]
