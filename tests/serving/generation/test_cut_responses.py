"""What clients get of a text that is cut at any character, and of one that the model ended: a stream tells the same."""

import dataclasses
import json

import pytest
from openai_server import CHAT, ask, events, family, named_events

import jspec
from jspec.outputs import Delta, Result, Stats
from jspec.serving.generation.service import Service

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "object"}}}
WRITE = {"name": "write", "description": "Writes.", "parameters": PARAMETERS}
GIVEN = {"path": "a/b.txt", "n": {"k": [1]}}
JSON = json.dumps(GIVEN)
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "write", "arguments": {JSON}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=write>\n<parameter=path>\na/b.txt\n</parameter>\n<parameter=n>\n{'k': [1]}\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a/b.txt</arg_value>\n<arg_key>n</arg_key>\n"
    '<arg_value>{"k": [1]}</arg_value>\n</tool_call>',
    "llama3_json": f'{{"name": "write", "parameters": {JSON}}}',
    "mistral": f"[TOOL_CALLS]write[ARGS]{JSON}",
    "pythonic": "[write(path='a/b.txt', n={'k': [1]})]",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "gemma4": '<|tool_call>call:write{path:<|"|>a/b.txt<|"|>,n:{k:[1]}}<tool_call|>',
    "json_fence": f'```json\n{{"name": "write", "arguments": {JSON}}}\n```',
    "openai": f"<|channel|>commentary to=functions.write <|constrain|>json<|message|>{JSON}<|call|>",
}
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    "<|channel|>final<|message|>I write.<|end|><|start|>assistant",
)
TOOLS = {
    "/v1/chat/completions": {"type": "function", "function": WRITE},
    "/v1/responses": {"type": "function", **WRITE},
    "/v1/messages": {"name": "write", "input_schema": PARAMETERS},
}


class Scripted(Service):
    """Whatever is asked, the text is ``text``, in pieces, and ends for these reasons."""

    text, why = "", ("stop", None)

    def start(self, requests):
        del requests
        return _Group(self.text, self.why)


@dataclasses.dataclass
class _Group:
    text: str
    why: tuple

    def close(self):
        pass

    async def __aiter__(self):
        pieces = [self.text[start : start + 7] for start in range(0, len(self.text), 7)]
        for piece in pieces:
            yield 0, Delta(id=0, token_ids=[], text=piece, finished=False, result=None, sources=[])
        result = Result(self.text, [], [], *self.why, Stats(0, 0, 0, (), (), ()), [])
        yield 0, Delta(id=0, token_ids=[], text="", finished=True, result=result, sources=[])


@pytest.fixture(scope="module")
def engine():
    return jspec.AsyncEngine(family())


def service_of(engine, tool: str) -> Scripted:
    reasoning = "openai_gptoss" if tool == "openai" else "qwen3"
    return Scripted(engine, names=["m"], chat_template=CHAT, tool_parser=tool, reasoning_parser=reasoning)


def text_of(tool: str) -> str:
    if tool == "openai":
        return "".join((*HARMONY, CALLS[tool]))
    return "Hm.\n</think>\n\n" + ("" if tool == "pythonic" else "I write.\n") + CALLS[tool]


def told(service: Scripted, path: str, stream: bool) -> dict:
    """What a client has at the end: reasoning, content, calls with their arguments' JSON, and why it ended."""
    body = {"model": "m", "max_tokens": 9, "tools": [TOOLS[path]], "stream": stream}
    body |= {"input": "go"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "go"}]}
    response = ask(service, path, body)
    assert response.status_code == 200, response.text
    reader = {"/v1/chat/completions": _chat, "/v1/responses": _response, "/v1/messages": _message}[path]
    events_of = events if path == "/v1/chat/completions" else named_events
    return reader(events_of(response) if stream else response.json(), stream)


def _chat(given, stream: bool) -> dict:
    if not stream:
        [choice] = given["choices"]
        message = choice["message"]
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        assert message.get("tool_calls") != []
        found = {"reasoning": message.get("reasoning", ""), "content": message["content"] or ""}
        return {**found, "calls": calls, "why": choice["finish_reason"]}
    found, calls = {"reasoning": "", "content": ""}, {}
    for choice in (choice for chunk in given for choice in chunk["choices"]):
        for name in found:
            found[name] += choice["delta"].get(name, "")
        for call in choice["delta"].get("tool_calls", ()):
            name, arguments = calls.get(call["index"], ("", ""))
            calls[call["index"]] = (name + call["function"].get("name", ""), arguments + call["function"]["arguments"])
    return {**found, "calls": list(calls.values()), "why": choice["finish_reason"]}


def _response(given, stream: bool) -> dict:
    state = given[-1]["response"] if stream else given
    found = {"reasoning": "", "content": "", "calls": [], "status": [item["status"] for item in state["output"]]}
    texts = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in state["output"]]
    for item in state["output"]:
        if item["type"] == "function_call":
            found["calls"].append((item["name"], item["arguments"]))
            assert (item["status"] == "completed") == is_whole(item["arguments"])
        else:
            found["reasoning" if item["type"] == "reasoning" else "content"] += item["content"][0]["text"]
    if stream:
        deltas = [event["delta"] for event in given if event["type"].endswith(".delta")]
        assert "".join(deltas) == "".join(texts)
        assert [event["item"] for event in given if event["type"] == "response.output_item.done"] == state["output"]
        done = [event["arguments"] for event in given if event["type"] == "response.function_call_arguments.done"]
        assert done == [text for _, text in found["calls"] if is_whole(text)]
        assert given[-1]["type"] == f"response.{state['status']}"
    return {**found, "why": (state["incomplete_details"] or {"reason": state["status"]})["reason"]}


def _message(given, stream: bool) -> dict:
    found = {"reasoning": "", "content": "", "calls": []}
    if not stream:
        blocks, why = given["content"], given["stop_reason"]
    else:
        blocks = [event["content_block"] for event in given if event["type"] == "content_block_start"]
        for event in (event for event in given if event["type"] == "content_block_delta"):
            block, delta = blocks[event["index"]], event["delta"]
            name = delta["type"].removesuffix("_delta")
            key = "input" if name == "input_json" else name
            block[key] = json.loads(delta["partial_json"]) if key == "input" else block[key] + delta[key]
        why = given[-2]["delta"]["stop_reason"]
    for block in blocks:
        if block["type"] == "tool_use":
            found["calls"].append((block["name"], json.dumps(block["input"])))
        else:
            kind = block["type"]
            found["reasoning" if kind == "thinking" else "content"] += block[kind]
    return {**found, "why": why}


def is_whole(arguments: str) -> bool:
    try:
        return json.loads(arguments) == GIVEN
    except ValueError:
        return False


WHYS = {
    "/v1/chat/completions": {"length": "length", "stop": "stop", "called": "tool_calls"},
    "/v1/responses": {"length": "max_output_tokens", "stop": "stop", "called": "completed"},
    "/v1/messages": {"length": "max_tokens", "stop": "stop_sequence", "called": "tool_use"},
}


def check(service: Scripted, path: str, text: str, ends: range, why: tuple):
    """Check all that is told of a text that is cut at these places, and whether a call was told at all."""
    for end in ends:
        service.text, service.why = text[:end], why
        whole = told(service, path, stream=False)
        assert told(service, path, stream=True) == whole, end
        assert "Hm.\n".startswith(whole["reasoning"]), end
        assert "I write.\n".startswith(whole["content"]), end
        assert all(name == "write" and (is_whole(text) or not _is_json(text)) for name, text in whole["calls"]), end
        broken = [text for _, text in whole["calls"] if not is_whole(text)]
        if why[0] == "length":
            assert whole["why"] == WHYS[path]["length"], end
        elif broken:
            assert whole["why"] == WHYS[path]["stop"], end
        assert path != "/v1/messages" or not broken


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("tool", CALLS)
def test_a_cut_text_is_told_as_cut(engine, tool, path):
    text, service = text_of(tool), service_of(engine, tool)
    check(service, path, text, range(0, len(text), 5), ("length", None))
    check(service, path, text, range(3, len(text), 7), ("stop", "x"))
    service.text, service.why = text, ("stop", None)
    for stream in (False, True):
        whole = told(service, path, stream)
        assert (whole["why"], [is_whole(text) for _, text in whole["calls"]]) == (WHYS[path]["called"], [True])


@pytest.mark.nightly
@pytest.mark.parametrize("why", [("length", None), ("stop", "x"), ("stop", 7), ("stop", None)])
@pytest.mark.parametrize("path", TOOLS)
@pytest.mark.parametrize("tool", CALLS)
def test_a_text_may_be_cut_at_every_character(engine, tool, path, why):
    another = "" if tool == "pythonic" else CALLS[tool] if tool == "openai" else f"\n{CALLS[tool]}"
    text, service = text_of(tool) + another, service_of(engine, tool)
    if why != ("stop", None):
        check(service, path, text, range(0, len(text), 3 if why[1] == 7 else 1), why)
        return
    for end in range(0, len(text), 3):  # whose markers are text where the model itself has ended
        service.text, service.why = text[:end], why
        whole = told(service, path, stream=False)
        assert told(service, path, stream=True) == whole, end
        assert all(is_whole(text) or not _is_json(text) for _, text in whole["calls"]), end
        assert whole["why"] != "tool_calls" or all(is_whole(text) for _, text in whole["calls"])
