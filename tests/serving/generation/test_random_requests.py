"""Whatever a client sends, it gets an answer below 500, and nothing is left behind. ``make long`` sends far more of it."""

import asyncio
import json

import numpy as np
import pytest
from engines import bigram, drafting, shared
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_server import asked, assert_nothing_is_held, service_of

from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.config import EngineConfig, Speculation
from jspec.llm import LLM
from jspec.serving.anthropic.protocol import MessagesRequest
from jspec.serving.generation import protocol
from jspec.serving.http.limits import Limits
from jspec.serving.openai.generate import NAMES, GenerateRequest
from jspec.serving.responses_api.protocol import ResponsesRequest

V = 2048
PATHS = {
    "/v1/completions": protocol.CompletionRequest,
    "/v1/chat/completions": protocol.ChatRequest,
    "/tokenize": protocol.TokenizeChatRequest,
    "/detokenize": protocol.DetokenizeRequest,
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/inference/v1/generate": GenerateRequest,
}
NEEDED = {"/v1/completions": {"prompt"}, "/detokenize": {"tokens"}, "/v1/responses": {"input"}}
NEEDED["/inference/v1/generate"] = {"token_ids", "sampling_params"}
NEEDED["/v1/messages"] = {"messages", "max_tokens"}
LIMITS = Limits(max_body_bytes=20_000, max_n=3, max_choices=6, max_prompts=4)


@shared
def table() -> LLM:
    """A table of the family's vocabulary, with its tokenizer: after each token comes one of a few."""
    likely = np.random.default_rng(0).gumbel(size=(V, V)).astype(np.float32)
    config = EngineConfig(max_batch=4, max_len=64, page_size=16, prefill_chunk=16, rounds=8, max_waiting=8)
    settings = Speculation(num_draft_tokens=0)
    tokenizer = load_tokenizer(FAMILY / "target")
    return LLM(bigram(3 * likely), None, drafting(None, settings, V), None, tokenizer, settings, config)


texts = st.text(max_size=20)
numbers = st.one_of(
    st.integers(-3, 40), st.floats(), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 1e308, 0.5, 1.0])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)
kinds = st.sampled_from(
    ["text", "image_url", "tool_use", "tool_result", "thinking", "function_call", "function_call_output", "reasoning"]
)
names = st.sampled_from(["a", "b"]) | values  # of calls and tools, so that some are those of others
block = {"text": texts, "thinking": texts, "id": names, "tool_use_id": names, "call_id": names, "name": names}
block |= {"input": values, "content": values, "arguments": texts | values, "output": texts | values}
blocks = st.lists(st.fixed_dictionaries({"type": kinds | values}, optional=block), max_size=3)
parts = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["text", "image_url"]), "text": texts}), max_size=2)
calls = st.lists(st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": texts, "arguments": values})}))
message = {"role": st.sampled_from(["system", "user", "assistant", "tool", ""])}
message["content"] = texts | parts | scalars | blocks
others = {"tool_calls": calls, "tool_call_id": names, "name": scalars, "x": values}
messages = st.lists(st.fixed_dictionaries(message, optional=others), max_size=3)
tool = {"type": texts | kinds, "name": names, "function": values, "strict": scalars}
ids = st.lists(st.integers(-1, V), max_size=20)
schemas = st.sampled_from([{"type": "integer"}, {"enum": ["a", 1]}, {"type": "object", "maxProperties": 1}]) | values
forms = {
    "json": schemas | texts,
    "regex": st.sampled_from(["[0-9]+", "a|b", "\\d{2}", "("]) | texts,
    "choice": st.lists(texts, max_size=3),
    "grammar": st.sampled_from(['start: "a"+', "start: b"]) | texts,
    "json_object": st.booleans(),
}
described = st.fixed_dictionaries({}, optional={"name": texts, "schema": schemas, "strict": st.booleans()})
plausible = {
    "prompt": texts | ids | st.lists(texts | ids, max_size=5),
    "messages": messages,
    "input": texts | blocks | messages,
    "system": texts | blocks,
    "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled"]) | values}),
    "tokens": ids,
    "model": st.sampled_from(["family", "none"]),
    "n": st.integers(0, 4),
    "max_tokens": st.integers(-1, 99),
    "stop": texts | st.lists(texts, max_size=5),
    "stop_token_ids": ids,
    "logit_bias": st.dictionaries(st.integers(-1, V).map(str), st.floats(-100, 100), max_size=3),
    "stream_options": st.dictionaries(st.sampled_from(["include_usage", "x"]), st.booleans(), max_size=2),
    "chat_template_kwargs": st.dictionaries(st.sampled_from(["enable_thinking", "tools", "self"]), scalars, max_size=2),
    "response_format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"])})
    | st.fixed_dictionaries({"type": st.just("json_schema")}, optional={"json_schema": described}),
    "structured_outputs": st.one_of([st.fixed_dictionaries({name: form}) for name, form in forms.items()])
    | st.fixed_dictionaries({}, optional=forms),
    "tool_choice": st.sampled_from(["none", "auto", "required"])
    | st.fixed_dictionaries({"type": st.sampled_from(["auto", "any", "tool", "function"]) | values, "name": names}),
    "tools": st.lists(st.fixed_dictionaries({}, optional=tool), max_size=2),
    "token_ids": ids,
}
plausible["sampling_params"] = st.fixed_dictionaries({}, optional={n: plausible.get(n, scalars) for n in (*NAMES, "x")})


@st.composite
def shaped(draw) -> tuple[str, bytes]:
    """A path, and an object with fields that it has: most values are plausible, some are anything."""
    path = draw(st.sampled_from(list(PATHS)))
    needed = NEEDED.get(path, {"messages"})
    others = [*PATHS[path].model_fields, *protocol._UNSUPPORTED, "user", "junk"]
    names = needed | draw(st.sets(st.sampled_from(others), max_size=5))
    body = {}
    for name in sorted(names):
        usual = plausible.get(name, scalars)
        body[name] = draw(values if draw(st.integers(0, 9)) == 0 else usual)
    return path, json.dumps(body).encode()


@st.composite
def damaged(draw) -> tuple[str, bytes]:
    """The same with bytes that were replaced, lost or put in."""
    path, body = draw(shaped())
    for _ in range(draw(st.integers(1, 3))):
        at, length = draw(st.integers(0, len(body))), draw(st.integers(0, 3))
        body = body[:at] + draw(st.binary(max_size=3)) + body[at + length :]
    return path, body


raw = st.tuples(st.sampled_from(list(PATHS)), st.binary(max_size=200) | values.map(lambda v: json.dumps(v).encode()))
REQUESTS = {"shaped": shaped(), "damaged": damaged(), "raw": raw}


def check(requests, examples: int) -> set[int]:
    """Send so many; returns which statuses there were."""
    service, seen = service_of(table(), limits=LIMITS), set()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(requests)
    def send(request):
        path, body = request
        response = asyncio.run(asyncio.wait_for(asked(service, path, content=body), 60))
        assert response.status_code in (200, 400, 404, 413), (path, body, response.text)
        if response.status_code != 200:
            told = {"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"}
            assert set(response.json()["error"]) == told
        elif response.headers["content-type"].startswith("text/event-stream"):
            *_, before, last, rest = response.text.split("\n\n")
            if path in ("/v1/messages", "/v1/responses"):
                before, last = last, last.partition("\n")[0]
            ends = {"/v1/messages": ("event: message_stop",)}
            ends["/v1/responses"] = ("event: response.completed", "event: response.incomplete")
            assert last in ends.get(path, ("data: [DONE]",)), (path, body, response.text)
            assert ('{"error"' in before, rest) == (False, ""), (path, body, response.text)
        assert_nothing_is_held(table())
        assert service.in_flight == 0
        seen.add(response.status_code)

    send()
    asyncio.run(service.engine.close())
    return seen


@pytest.mark.parametrize("kind", REQUESTS)
def test_malformed_requests_get_a_client_error(kind):
    seen = check(REQUESTS[kind], 200 if kind == "shaped" else 70)
    assert 400 in seen
    assert 200 in seen or kind != "shaped"


@pytest.mark.long
@pytest.mark.parametrize("kind", REQUESTS)
def test_many_malformed_requests_get_a_client_error(kind):
    assert 400 in check(REQUESTS[kind], 10_000)
