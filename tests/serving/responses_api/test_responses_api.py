"""``/v1/responses``: items in, items and events out, and the store."""

import asyncio
import json

import httpx
import pytest
from openai_server import CHAT, ask, error_of, family, named_events, service_of

from jspec.serving.generation.response_store import ResponseStore, Stored
from jspec.serving.http.auth import Keys
from jspec.serving.http.errors import ApiError
from jspec.serving.http.limits import Limits
from jspec.serving.responses_api.conversation import Conversation
from jspec.serving.responses_api.tools import Tools, choice_of, custom_input
from jspec.serving.server.app import make_app
from jspec.text.parsers.blocks import Blocks

READ = {
    "type": "function",
    "name": "read_file",
    "strict": False,
    "parameters": {"type": "object", "properties": {"path": {"enum": ["a.py", "b.py"]}}, "required": ["path"]},
}
CLOSE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "close", "parameters": {}}]}
PATCH = {"type": "custom", "name": "patch", "description": "Any text."}
OUTPUT = {"type": "function_call_output", "output": "x"}
PATH = "/v1/responses"


@pytest.fixture(scope="module")
def service():
    return service_of(family())


def respond(service, **fields):
    return ask(
        service, PATH, {"model": "family", "input": "Read a file.", "max_output_tokens": 60, "seed": 1, **fields}
    )


def test_a_response_has_a_message(service):
    body = respond(service, max_output_tokens=8).json()
    assert (body["object"], body["status"], body["error"]) == ("response", "incomplete", None)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    [part] = item["content"]
    assert (part["type"], part["annotations"], bool(part["text"])) == ("output_text", [], True)
    usage = body["usage"]
    assert usage["output_tokens"] == 8
    assert usage["total_tokens"] == usage["input_tokens"] + 8
    assert set(usage["input_tokens_details"]) == {"cached_tokens"}
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}


def test_a_stream_tells_the_same(service):
    whole = respond(service, max_output_tokens=24).json()
    events = named_events(respond(service, max_output_tokens=24, stream=True))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(event["delta"] for event in events[4:-4])
    [item] = whole["output"]
    assert text == item["content"][0]["text"] == events[-4]["text"]
    last = events[-1]["response"]
    assert set(last) == set(whole)
    assert last["output"] == [{**item, "id": last["output"][0]["id"]}]
    assert last["output"] == [events[-2]["item"]]
    assert last["usage"]["output_tokens"] == 24
    assert events[0]["response"]["status"] == "in_progress"


@pytest.mark.parametrize("parser", [None, "hermes"])
def test_a_call_is_an_item(parser):
    own = service_of(family(), tool_parser=parser)
    choice = {"type": "function", "name": "read_file"}
    fields = {"tools": [READ, CLOSE], "tool_choice": choice, "max_output_tokens": 120}
    body = respond(own, **fields).json()
    [item] = body["output"]
    assert (item["type"], item["name"], body["status"]) == ("function_call", "read_file", "completed")
    assert "namespace" not in item
    assert json.loads(item["arguments"])["path"] in ("a.py", "b.py")
    events = named_events(respond(own, **fields, stream=True))
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    [added] = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    [done] = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert (added["arguments"], added["status"]) == ("", "in_progress")
    assert added["call_id"] == done["call_id"]
    assert "".join(deltas) == done["arguments"] == item["arguments"]


def test_a_namespaced_call_has_its_name_and_namespace(service):
    tools = {"tools": [READ, CLOSE], "max_output_tokens": 120}
    choice = {"type": "function", "name": "close", "namespace": "agents"}
    [item] = respond(service, **tools, tool_choice=choice).json()["output"]
    assert (item["name"], item["namespace"], item["arguments"]) == ("close", "agents", "{}")


def test_a_custom_tool_has_any_text_as_input(service):
    fields = {"tools": [PATCH], "tool_choice": {"type": "custom", "name": "patch"}, "max_output_tokens": 150}
    [item] = respond(service, **fields, temperature=0).json()["output"]
    assert (item["type"], item["name"]) == ("custom_tool_call", "patch")
    assert isinstance(item["input"], str)
    events = named_events(respond(service, **fields, temperature=0, stream=True))
    [done] = [event for event in events if event["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == item["input"]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [('{"input": "x\\ud83d"}', "x\ufffd"), ('{"input": NaN}', '{"input": NaN}'), ('{"input": "x', '{"input": "x')],
)
def test_an_input_that_is_no_text_does_not_end_the_response(arguments, given):
    assert custom_input(arguments) == given


def test_reasoning_is_an_item():
    template = CHAT.removesuffix("{% endif %}") + "<think>{% endif %}"
    own = service_of(family(), reasoning_parser="qwen3", chat_template=template)
    body = respond(own, max_output_tokens=10, reasoning={"effort": "high", "summary": "auto"}).json()
    [item] = body["output"]
    assert (item["type"], item["summary"], item["content"][0]["type"]) == ("reasoning", [], "reasoning_text")
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": 10}
    assert body["reasoning"] == {"effort": "high", "summary": "auto"}
    events = named_events(respond(own, max_output_tokens=10, stream=True))
    assert "response.reasoning_text.delta" in [event["type"] for event in events]


def test_text_has_a_format(service):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    body = respond(service, text=text, max_output_tokens=150, bad_words=None).json()
    if body["status"] == "completed":
        assert set(json.loads(body["output"][0]["content"][0]["text"])) == {"a"}
    assert body["text"] == text


def test_a_response_goes_on_from_another(service):
    first = respond(service, max_output_tokens=4, temperature=0, instructions="Be brief.").json()
    text = first["output"][0]["content"][0]["text"]
    again = {"input": "Go on.", "max_output_tokens": 4, "temperature": 0}
    second = respond(service, **again, previous_response_id=first["id"]).json()
    messages = [("user", "Read a file."), ("assistant", text), ("user", "Go on.")]
    items = [{"role": role, "content": content} for role, content in messages]
    whole = respond(service, **{**again, "input": items}).json()
    assert second["output"][0]["content"] == whole["output"][0]["content"]
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]
    assert ask(service, f"{PATH}/{first['id']}").json() == first


def test_requests_of_one_name_have_responses_of_their_own(service):
    asked = {"model": "family", "input": "Read a file.", "max_output_tokens": 1}
    ids = [ask(service, PATH, asked, {"x-request-id": "trace"}).json()["id"] for _ in range(2)]
    assert [ask(service, f"{PATH}/{id}").json()["id"] for id in ids] == ids
    assert len(set(ids)) == 2


def test_echoed_tools_count_for_the_store():
    own = service_of(family(), limits=Limits(max_stored_bytes=2**16))
    large = {**READ, "description": "x" * 2**16}
    for tools, status in (([READ], 200), ([large], 404)):
        first = respond(own, max_output_tokens=1, tools=tools).json()
        assert ask(own, f"{PATH}/{first['id']}").status_code == status


def test_a_response_that_was_not_stored_is_404(service):
    first = respond(service, max_output_tokens=2, store=False).json()
    error = error_of(respond(service, previous_response_id=first["id"]), 404)
    assert (error["param"], error["code"]) == ("previous_response_id", "response_not_found")
    assert ask(service, f"{PATH}/{first['id']}").status_code == 404


def test_a_stored_response_is_404_for_other_keys():
    own = service_of(family(), keys=Keys(["one", "two"]))
    body = {"input": "x", "max_output_tokens": 1}
    first = ask(own, PATH, body, {"authorization": "Bearer one"}).json()
    path = f"{PATH}/{first['id']}"
    assert ask(own, path, headers={"authorization": "Bearer two"}).status_code == 404
    assert ask(own, path, headers={"authorization": "Bearer one"}).json() == first


def test_the_store_keeps_the_newest_within_its_bytes():
    store = ResponseStore(3, 100)
    for i in range(5):
        store.add(f"r{i}", Stored(b"", b"[]", b"12345678"))
    assert [store.get(f"r{i}", b"") is not None for i in range(5)] == [False, False, True, True, True]
    store.add("large", Stored(b"", b"x" * 40, b"y" * 45))
    assert [store.get(name, b"") is not None for name in ("r3", "r4", "large")] == [False, True, True]
    store.add("huge", Stored(b"", b"", b"y" * 101))
    assert store.get("huge", b"") is None
    store.remove("nobody")
    assert Limits().max_stored_responses >= 100


def test_unknown_fields_and_tools_of_servers_are_ignored_with_one_line(service, caplog):
    tools = [{"type": "web_search", "external_web_access": True}]
    with caplog.at_level("INFO", "jspec.serve"):
        fields = {"include": ["reasoning.encrypted_content"], "client_metadata": {"a": "b"}, "prompt_cache_key": "k"}
        fields |= {"tool_choice": "auto", "unheard_of": 1, "a\nb": 2}
        answer = respond(service, max_output_tokens=2, tools=tools, **fields)
    assert answer.status_code == 200
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "/v1/responses: ignored tools[0].type='web_search', 'a\\nb', unheard_of"


def text(value, kind="input_text"):
    return {"type": kind, "text": value}


def test_a_conversation_is_translated():
    tools, thought = Tools([READ, CLOSE, PATCH]), {"type": "reasoning", "id": "r", "summary": []}
    conversation = Conversation([], tools, {}.__getitem__)
    conversation.add(
        [
            {"type": "message", "role": "developer", "content": [text("a"), text("b")]},
            {"role": "user", "content": "c"},
            {**thought, "content": [text("hm", "reasoning_text")], "encrypted_content": None},
            {"type": "message", "role": "assistant", "content": [{**text("d", "output_text"), "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "read_file", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "close", "namespace": "agents", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "e"},
            {"type": "function_call_output", "call_id": "c2", "output": [text("f")]},
            {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "g"},
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "h"},
        ]
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "agents__close", "arguments": "{}"}},
    ]
    patch = {"id": "c3", "type": "function", "function": {"name": "patch", "arguments": '{"input": "g"}'}}
    assert conversation.messages == [
        {"role": "developer", "content": "a\nb"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "e"},
        {"role": "tool", "tool_call_id": "c2", "content": "f"},
        {"role": "assistant", "content": "", "tool_calls": [patch]},
        {"role": "tool", "tool_call_id": "c3", "content": "h"},
    ]
    assert [function["function"]["name"] for function in tools.functions] == ["read_file", "agents__close", "patch"]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"role": "bot", "content": "x"}, "input[0].role='bot': expected one of user"),
        ({"role": "user"}, "input[0].content=None: expected text"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].type='input_image'"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0]="),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input[0]="),
        ({"type": ["message"]}, "input[0].type=['message']: expected"),
        ({"type": "web_search_call", "id": "w"}, "input[0].type='web_search_call': expected one of message, reasoning"),
        ({"type": "reasoning", "summary": [{"text": 7}]}, "input[0].summary[0]="),
        ({**OUTPUT, "call_id": ["c"]}, "input[0].call_id=['c']: expected the call_id of a call"),
        ({**OUTPUT, "call_id": "c"}, "input[0].call_id='c': expected the call_id of a call"),
    ],
)
def test_errors_of_items_name_their_path(item, words):
    with pytest.raises(ApiError) as error:
        Conversation([], Tools([]), {}.__getitem__).add([item])
    assert error.value.message.startswith(words)


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([{"type": "function"}], "tools[0].name=None"),
        ([{"type": "function", "name": "f", "parameters": 7}], "tools[0].parameters=7"),
        ([{"type": "function", "name": "f", "strict": "yes"}], "tools[0].strict='yes': expected true or false"),
        ([{"type": "namespace", "name": "n"}], "tools[0]="),
        ([{"type": "namespace", "name": "n", "tools": [7]}], "tools[0].tools[0]=7"),
        ([{"type": "namespace", "name": "n", "tools": [{"name": ""}]}], "tools[0].tools[0].name=''"),
    ],
)
def test_errors_of_tools_name_their_path(tools, words):
    with pytest.raises(ApiError) as error:
        Tools(tools)
    assert error.value.message.startswith(words)


def test_choices_are_translated():
    tools = Tools([{"type": "function", "name": "read"}])
    assert choice_of("auto", tools) == "auto"
    named = [{"type": "function", "name": "read"}]
    function = {"type": "function", "function": {"name": "read"}}
    chosen = choice_of({"type": "allowed_tools", "mode": "required", "tools": named}, tools)
    assert chosen == {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function]}}
    with pytest.raises(ApiError, match=r"tool_choice={'type': 'file_search'}"):
        choice_of({"type": "file_search"}, tools)
    with pytest.raises(ApiError, match=r"tool_choice\.name='write': expected one of read"):
        choice_of({"type": "function", "name": "write"}, tools)


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"background": True}, 400, "background", "background=True: expected false"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens", "max_output_tokens=0"),
        ({"input": "a b " * 400}, 400, None, "maximum context length is 256 tokens"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format", "text.format="),
        ({"reasoning": {"effort": "huge"}}, 400, "reasoning.effort", "reasoning.effort='huge'"),
        ({"tool_choice": "required"}, 400, "tool_choice", "expected tools beside it"),
        ({"input": []}, 400, "input", "input is empty"),
    ],
)
def test_errors_have_this_endpoints_names(service, fields, status, param, words):
    error = error_of(respond(service, **fields), status)
    assert words in error["message"]
    assert param in (None, error["param"])


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
def test_a_failure_in_the_middle_is_an_event(path, monkeypatch):
    own, say = service_of(family()), [{"role": "user", "content": "x"}]

    def fail(*_, **__):
        raise RuntimeError("made up")

    monkeypatch.setattr(Blocks, "add", fail)
    body = {"model": "family", "input": "x", "messages": say, "max_tokens": 4, "stream": True}
    events, message = named_events(ask(own, path, body)), "the server failed; its log says why"
    if path == PATH:
        assert events[-1]["type"] == "response.failed"
        error = {"code": "server_error", "message": message}
        assert (events[-1]["response"]["status"], events[-1]["response"]["error"]) == ("failed", error)
    else:
        assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": message}}


def test_a_response_can_be_forgotten(service):
    first = respond(service, max_output_tokens=1).json()

    async def forget():
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.delete(f"{PATH}/{first['id']}")

    assert asyncio.run(forget()).json() == {"id": first["id"], "object": "response", "deleted": True}
    assert ask(service, f"{PATH}/{first['id']}").status_code == 404
