"""Other fields of a prompt: items of responses before, Anthropic's own fields, and values that ask for nothing."""

import asyncio
import json

import pytest
from openai_server import ask
from recorded_prompts import (
    CHATS,
    FORMATS,
    MESSAGES,
    MOST_TOKENS,
    PROMPT,
    RESPONSES,
    SAY,
    SCHEMA,
    asked,
    assert_refused,
    prompt_of,
    recording_service,
    tools_of,
)

from jspec.serving.server.app import make_app


@pytest.fixture(scope="module")
def service():
    return recording_service()


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
    assert_refused(asked(service, RESPONSES, [SAY, {"type": "item_reference", "id": id}]), "input[1].id")


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
    assert_refused(response, "output_format")
    assert_refused(asked(service, MESSAGES, [SAY], output_format={"type": "json"}), "output_format")


def test_a_system_message_may_be_meant_for_one_turn(service):
    reminder = {"role": "system", "content": "Remember.", "clear_at": "next_user_message"}
    assert "Remember." in prompt_of(service, MESSAGES, [SAY, reminder])
    assert "Remember." not in prompt_of(service, MESSAGES, [SAY, reminder, SAY])
    assert "Remember." in prompt_of(service, MESSAGES, [SAY, {**reminder, "clear_at": "never"}, SAY])


NEUTRAL = {
    "/v1/completions": dict(
        prompt="Say.", best_of=1, echo=False, max_tokens=1, n=1, suffix="", top_p=1, guided_json=None
    ),
    CHATS: dict(frequency_penalty=0, logprobs=False, modalities=["text"], n=1, parallel_tool_calls=True, temperature=1),
    RESPONSES: dict(background=False, include=[], parallel_tool_calls=True, reasoning={"effort": "medium"}, top_p=1),
    MESSAGES: dict(service_tier="auto", speed="standard", stop_sequences=[], temperature=1, tools=[], top_p=1),
}
NEUTRAL["/v1/completions"] |= dict(user="me", use_beam_search=False, length_penalty=1.0, logit_bias={}, priority=0)
NEUTRAL["/v1/completions"] |= dict(frequency_penalty=0.0, repetition_penalty=1, presence_penalty=0)
NEUTRAL["/v1/completions"] |= dict(response_format={"type": "text"}, skip_special_tokens=True)
NEUTRAL[CHATS] |= dict(
    presence_penalty=0, response_format={"type": "text"}, service_tier="auto", store=False, stop=None
)
NEUTRAL[CHATS] |= dict(top_logprobs=0, top_p=1, verbosity="medium", prompt_cache_options={"ttl": "30m"}, tools=[])
NEUTRAL[CHATS] |= dict(reasoning_effort="medium", tool_choice="none", web_search_options=None)
NEUTRAL[CHATS] |= dict(chat_template_kwargs={"enable_thinking": False})
NEUTRAL[RESPONSES] |= dict(service_tier="auto", store=True, temperature=1, tool_choice="auto", tools=[], top_logprobs=0)
NEUTRAL[RESPONSES] |= dict(text={"format": {"type": "text"}, "verbosity": "medium"}, truncation="disabled", metadata={})
NEUTRAL[RESPONSES] |= dict(prompt_cache_options={"mode": "implicit", "prewarm": False}, conversation=None, prompt=None)
NEUTRAL[MESSAGES] |= dict(thinking={"type": "disabled"}, tool_choice={"type": "auto"}, container=None, mcp_servers=[])
NEUTRAL[MESSAGES] |= dict(output_config={}, output_format=None, thread=None, fallbacks=None, context_management=None)


@pytest.mark.parametrize(("path", "field"), [(path, field) for path in NEUTRAL for field in [*NEUTRAL[path], "all"]])
def test_a_value_that_asks_for_nothing_is_accepted(service, path, field):
    fields = NEUTRAL[path] if field == "all" else {field: NEUTRAL[path][field]}
    body = {"model": "family", MOST_TOKENS.get(path, "max_tokens"): 1, **fields}
    body[PROMPT.get(path, "prompt")] = [SAY] if path in PROMPT else "Say."
    assert ask(service, path, body, {"authorization": "Bearer k"}).status_code == 200


def test_prewarming_is_refused(service):
    response = asked(service, RESPONSES, [SAY], prompt_cache_options={"prewarm": True})
    assert_refused(response, "prompt_cache_options.prewarm")
