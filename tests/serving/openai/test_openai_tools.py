"""Tool calls and reasoning of ``/v1/chat/completions``, with a model whose text is given."""

import json

import pytest
from openai_server import CHAT, ask, error_of, events, family, service_of
from tiers import in_tiers

from jspec.serving.generation.protocol import ChatRequest
from jspec.serving.generation.tool_choice import ToolChoice, choice_of
from jspec.serving.http.errors import ApiError
from jspec.text.parsers.call_grammar import Function
from jspec.text.parsers.forced import list_schema

MESSAGES = [{"role": "user", "content": "Read a file."}]
READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "parameters": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"path": {"enum": ["a.py", "b.py"]}, "line": {"$ref": "#/$defs/line"}},
            "required": ["path", "line"],
            "$defs": {"line": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
LIST = {"type": "function", "function": {"name": "list_files", "description": "Files."}}
TOOLS = [READ, LIST]


@pytest.fixture(scope="module")
def service():
    return service_of(family())


def named(name):
    return {"type": "function", "function": {"name": name}}


def strange(parameters):
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}]


def chat(service, **fields):
    return ask(service, "/v1/chat/completions", {"messages": MESSAGES, "seed": 3, "max_tokens": 160, **fields})


def checked(call):
    assert call["type"] == "function"
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "read_file":
        assert set(arguments) == {"path", "line"}
        assert (arguments["path"] in ("a.py", "b.py"), 0 <= arguments["line"] <= 9) == (True, True)
    else:
        assert (call["function"]["name"], arguments) == ("list_files", {})
    return call["function"]["name"]


@pytest.mark.parametrize("seed", range(3))
def test_required_calls_are_made(service, seed):
    answer = chat(service, tools=TOOLS, tool_choice="required", seed=seed, parallel_tool_calls=False)
    [choice] = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert checked(call) in ("read_file", "list_files")
    assert choice["message"]["content"] is None


@pytest.mark.parametrize("name", ["read_file", "list_files"])
def test_a_named_tool_is_called(service, name):
    [choice] = chat(service, tools=TOOLS, tool_choice=named(name)).json()["choices"]
    assert (choice["finish_reason"], [checked(call) for call in choice["message"]["tool_calls"]]) == ("stop", [name])


def test_a_stream_has_the_same_calls(service):
    fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 1, "n": 2}
    whole = chat(service, **fields).json()["choices"]
    chunks = events(chat(service, **fields, stream=True))
    for choice in whole:
        deltas = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        calls = [call for c in deltas for call in c["delta"].get("tool_calls", ())]
        assert [call["index"] for call in calls] == [0] * len(calls)
        first, *others = calls
        assert (first["type"], first["id"].startswith("chatcmpl-tool-")) == ("function", True)
        assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in others)
        [call] = choice["message"]["tool_calls"]
        assert first["function"]["name"] == call["function"]["name"]
        assert "".join(c["function"]["arguments"] for c in calls) == call["function"]["arguments"]
        assert deltas[-1]["finish_reason"] == "tool_calls"
        assert not any(c["delta"].get("content") for c in deltas)


def test_a_cut_call_is_given_as_far_as_it_came(service):
    [choice] = chat(service, tools=TOOLS, tool_choice=named("read_file"), max_tokens=3).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    with pytest.raises(ValueError, match=r"Expecting|Unterminated|delimiter"):
        json.loads(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "expected tools beside it"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", '"none", "auto", "required", {'),
        ({"tool_choice": named("write"), "tools": TOOLS}, "tool_choice", "'write': expected one of read_file, list_fi"),
        ({"tool_choice": named("write")}, "tool_choice", "expected tools beside it"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice", '"none", "auto"'),
        (
            {"tool_choice": "required", "tools": TOOLS, "structured_outputs": {"json_object": True}},
            "structured_outputs",
            "nothing beside a tool_choice that forces calls",
        ),
        ({"tool_choice": named("f"), "tools": strange({"$ref": "#"})}, "tools", "circular references"),
        (
            {"tool_choice": "required", "tools": strange({"enum": ["a" * 70_000]})},
            "tools",
            "expected at most 65536 (--max-grammar-bytes)",
        ),
    ],
)
def test_choices_that_cannot_be_are_refused(service, fields, param, words):
    error = error_of(chat(service, **fields), 400)
    assert (error["param"], words in error["message"]) == (param, True), error


def test_choices_are_read():
    def of(**fields):
        return choice_of(ChatRequest(messages=MESSAGES, **fields))

    assert of() == of(tools=[]) == of(tools=TOOLS, tool_choice="none") == ToolChoice("none")
    assert of(tools=TOOLS) == of(tools=TOOLS, tool_choice="auto") == ToolChoice("auto")
    assert of(tools=TOOLS, parallel_tool_calls=False) == ToolChoice("auto", several=False)
    assert of(tools=TOOLS, tool_choice=named("list_files")) == ToolChoice("named", "list_files", False)
    with pytest.raises(ApiError):
        of(tools=TOOLS, tool_choice=7)


def test_references_of_each_tool_stay_its_own():
    other = {"name": "b/c", "parameters": {"$defs": {"line": {"type": "string"}}, "items": {"$ref": "#/$defs/line"}}}
    schema = list_schema([Function.of(READ), Function.of(other)], several=True)
    assert schema["$defs"]["read_file"]["properties"]["line"] == {"$ref": "#/$defs/read_file/$defs/line"}
    assert schema["$defs"]["b/c"]["items"] == {"$ref": "#/$defs/b~1c/$defs/line"}
    assert schema["items"]["anyOf"][1]["properties"]["parameters"] == {"$ref": "#/$defs/b~1c"}
    assert "maxItems" not in schema
    assert READ["function"]["parameters"]["properties"]["line"] == {"$ref": "#/$defs/line"}


def test_the_chat_template_gets_effort_and_defaults(service):
    template = CHAT + "{{ reasoning_effort }}|{{ enable_thinking }}|{{ thinking }}"
    with_defaults = service_of(family(), chat_template=template, default_template_kwargs={"thinking": "yes"})

    def text(**fields):
        answer = chat(with_defaults, max_tokens=1, return_token_ids=True, **fields)
        return family().tokenizer.decode(answer.json()["prompt_token_ids"])

    assert text(reasoning_effort="low").endswith("low|True|yes")
    assert text(reasoning_effort="none").endswith("none|False|yes")
    given = {"enable_thinking": True, "thinking": "no"}
    assert text(reasoning_effort="none", chat_template_kwargs=given).endswith("none|True|no")
    assert error_of(chat(service, reasoning_effort="huge"), 400)["param"] == "reasoning_effort"


@pytest.mark.parametrize("tool", ["hermes", "qwen3_coder", "glm45", "llama3_json", "mistral", "pythonic"])
@pytest.mark.parametrize("choice", ["required", named("read_file")], ids=["required", "named"])
def test_forced_calls_have_the_models_own_syntax(tool, choice):
    own = service_of(family(), tool_parser=tool)
    answer = chat(own, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, return_token_ids=True, seed=5)
    [choice] = answer.json()["choices"]
    text = family().tokenizer.decode(choice["token_ids"])
    [call] = choice["message"]["tool_calls"]
    checked(call)
    assert (len(call["id"]) == 9 and call["id"].isalnum()) == (tool == "mistral")
    begins = {"hermes": "<tool_call>\n{", "qwen3_coder": "<tool_call>", "glm45": "<tool_call>", "llama3_json": '{"name'}
    assert text.startswith(begins.get(tool, "[TOOL_CALLS]" if tool == "mistral" else ("[", "{")))


@pytest.mark.parametrize("thinking", ["<think>", "<think></think>"])
def test_reasoning_comes_before_what_is_forced(thinking):
    template = CHAT.removesuffix("{% endif %}") + thinking + "{% endif %}"
    own = service_of(family(), tool_parser="hermes", reasoning_parser="qwen3", chat_template=template)
    biased = {"bad_words": ["</think>"]}  # so that the model never ends its reasoning by itself
    [choice] = chat(own, tools=TOOLS, tool_choice=named("list_files"), max_tokens=60, **biased).json()["choices"]
    message = choice["message"]
    if thinking == "<think>":
        assert (choice["finish_reason"], message["content"], "tool_calls" in message) == ("length", "", False)
        assert message["reasoning"] == message["reasoning_content"] != ""
        biased |= {"max_tokens": 40, "include_reasoning": False}
        hidden = chat(own, tools=TOOLS, tool_choice=named("list_files"), **biased)
        assert "reasoning" not in hidden.json()["choices"][0]["message"]
        assert hidden.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 40}
    else:
        assert [checked(call) for call in message["tool_calls"]] == ["list_files"]


def test_an_answer_has_its_form_behind_reasoning():
    template = CHAT.removesuffix("{% endif %}") + "<think>\nx\n</think>\n{% endif %}"
    own = service_of(family(), reasoning_parser="qwen3", chat_template=template)
    [choice] = chat(own, structured_outputs={"choice": ["yes", "no"]}).json()["choices"]
    assert choice["message"]["content"] in ("yes", "no")
    assert "reasoning" not in choice["message"]


@pytest.mark.parametrize("forced", [False, True])
def test_thinking_ends_where_its_budget_is_spent(forced):
    template = CHAT.removesuffix("{% endif %}") + "<think>{% endif %}"
    own = service_of(family(), reasoning_parser="qwen3", tool_parser="hermes", chat_template=template)
    fields = {"thinking_token_budget": 7, "return_token_ids": True, "logprobs": True}
    if forced:
        fields |= {"tools": TOOLS, "tool_choice": named("list_files")}
    [choice] = chat(own, **fields, max_tokens=60).json()["choices"]
    tokens = family().tokenizer.encode("</think>")
    assert choice["token_ids"][7 : 7 + len(tokens)] == tokens
    message = choice["message"]
    assert message["reasoning"] == family().tokenizer.decode(choice["token_ids"][:7]).strip("\n")
    if forced:
        assert [checked(call) for call in message["tool_calls"]] == ["list_files"]
    error = error_of(chat(service_of(family()), thinking_token_budget=7), 400)
    assert (error["param"], "--reasoning-parser" in error["message"]) == ("thinking_token_budget", True)
    assert error_of(chat(own, thinking_token_budget=-1), 400)["param"] == "thinking_token_budget"


def test_results_of_tools_need_a_call(service):
    messages = [*MESSAGES, {"role": "tool", "tool_call_id": "c1", "content": "x"}]
    error = error_of(chat(service, messages=messages), 400)
    assert error["param"] == "messages[1].tool_call_id"
    call = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages.insert(1, {"role": "assistant", "content": "", "tool_calls": [call]})
    error = error_of(chat(service, messages=messages), 400)
    assert error["param"] == "messages[2].tool_call_id"
    messages[2]["tool_call_id"] = ["c2"]
    error = error_of(chat(service, messages=messages), 400)
    assert error["message"].startswith("messages[2].tool_call_id=['c2']: expected the id")
    messages[2]["tool_call_id"] = "c2"
    assert chat(service, messages=messages, max_tokens=1).status_code == 200


ITSELF = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 10}}, "required": ["a"]}
MANY = {f"p{i}": {"$ref": "#/$defs/a"} for i in range(1500)}
STRANGE = {
    "list of properties": {"type": "object", "properties": []},
    "number as property": {"type": "object", "properties": {"a": 7}},
    "text as property": {"type": "object", "properties": {"a": "b"}},
    "required is a number": {"type": "object", "properties": {"a": {}}, "required": 7},
    "required is an object": {"type": "object", "properties": {"a": {}}, "required": {"a": 1}},
    "enum is text": {"type": "object", "properties": {"a": {"enum": "b"}}},
    "anyOf is an object": {"type": "object", "properties": {"a": {"anyOf": {}}}},
    "type is a number": {"type": "object", "properties": {"a": {"type": [7]}}},
    "reference is a number": {"type": "object", "properties": {"a": {"$ref": 7}}},
    "reference to nothing": {"type": "object", "properties": {"a": {"$ref": "#/b"}}},
    "reference to itself": ITSELF,
    "many references": {"type": "object", "properties": MANY, "$defs": {"a": {"type": "integer"}}},
    "no object": {"type": "array"},
}


@pytest.mark.parametrize(
    "tool",
    in_tiers(("hermes", "pythonic", "qwen3_coder", "glm45", "mistral", "gemma4", None), test=("hermes", "pythonic")),
)
@pytest.mark.parametrize("parameters", STRANGE.values(), ids=STRANGE)
def test_no_schema_is_an_error_of_the_server(tool, parameters):
    own = service_of(family(), tool_parser=tool)
    for choice in ("required", "auto"):
        for form in ({}, {"response_format": {"type": "json_object"}}) if choice == "auto" else ({},):
            answer = chat(own, tools=strange(parameters), tool_choice=choice, max_tokens=2, **form)
            assert answer.status_code == 200 or error_of(answer, 400)["param"] in ("tools", "response_format", None)


def test_huge_budgets_are_refused():
    own = service_of(family(), reasoning_parser="qwen3")
    assert error_of(chat(own, thinking_token_budget=2**40), 400)["param"] == "thinking_token_budget"
