"""Completions, chat answers and tokens over HTTP are those of ``jspec.generate``, in OpenAI's formats."""

import asyncio

import openai.types
import openai.types.chat
import pytest
from openai_server import CHAT, MAX_LEN, ask, asked, closing_service, error_of, events, family, service_of

import jspec
from jspec.serving.generation import respond
from jspec.serving.http.limits import Limits

PROMPT = "import os\nimport sys\n\n\ndef main(argv=None):"
MESSAGES = [{"role": "system", "content": "Write Python."}, {"role": "user", "content": "A queue."}]
GREEDY = {"model": "family", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
SEEDED = {"prompt": PROMPT, "temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": 12}


@pytest.fixture(scope="module")
def service():
    yield from closing_service()


def generated(prompt=PROMPT, **params) -> jspec.Result:
    found = jspec.generate(family(), prompt, jspec.SamplingParams(**params))
    assert isinstance(found, jspec.Result)
    return found


def test_greedy_and_seeded_completions_equal_generate(service):
    response = ask(service, "/v1/completions", GREEDY)
    completion = openai.types.Completion.model_validate(response.json())
    expected = generated(temperature=0, max_tokens=12)
    (choice,) = completion.choices
    assert (choice.text, choice.finish_reason, choice.index) == (expected.text, "length", 0)
    assert (completion.object, completion.model) == ("text_completion", "family")
    usage = completion.usage
    assert usage is not None
    assert usage.prompt_tokens == len(expected.prompt_token_ids)
    assert (usage.completion_tokens, usage.total_tokens) == (12, 12 + usage.prompt_tokens)
    seeded = ask(service, "/v1/completions", SEEDED).json()
    assert seeded["choices"][0]["text"] == generated(temperature=0.9, top_p=0.9, top_k=50, seed=7, max_tokens=12).text


def test_stream_joins_to_the_complete_response(service):
    whole = ask(service, "/v1/completions", SEEDED).json()
    chunks = events(ask(service, "/v1/completions", {**SEEDED, "stream": True}))
    assert len(chunks) > 1
    for chunk in chunks:
        openai.types.Completion.model_validate({**chunk, "choices": []})
        assert "usage" not in chunk
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


def test_stream_has_usage_where_asked_for(service):
    body = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(ask(service, "/v1/completions", body))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None for chunk in chunks)
    body["stream_options"]["continuous_usage_stats"] = True
    *chunks, last = events(ask(service, "/v1/completions", body))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_prompts_times_completions_are_numbered_in_order(service):
    ids = family().tokenizer.encode(PROMPT)
    body = {**SEEDED, "prompt": ["class Queue:", ids], "n": 2, "model": "other"}
    answer = ask(service, "/v1/completions", {**body, "return_token_ids": True}).json()
    params = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "max_tokens": 12}
    expected = [generated(prompt, seed=7 + i, **params) for prompt in ("class Queue:", PROMPT) for i in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == [result.text for result in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in answer["choices"]] == [result.token_ids for result in expected]
    assert [choice["prompt_token_ids"] for choice in answer["choices"][2:]] == [ids, ids]
    prompts = len(expected[0].prompt_token_ids) + len(ids)
    assert (answer["model"], answer["usage"]["prompt_tokens"]) == ("other", prompts)
    texts, tokens = [""] * 4, [[] for _ in range(4)]
    for chunk in events(ask(service, "/v1/completions", {**body, "stream": True, "return_token_ids": True})):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["token_ids"]
    assert (texts, tokens) == ([r.text for r in expected], [r.token_ids for r in expected])


def test_a_client_names_its_request(service):
    named = {"x-request-id": "abc-1.2_3"}
    assert ask(service, "/v1/completions", GREEDY, headers=named).json()["id"] == "cmpl-abc-1.2_3"
    for invalid in ("a" * 129, "a b", "é".encode(), ""):
        answer = ask(service, "/v1/completions", GREEDY, headers={"x-request-id": invalid}).json()
        assert len(answer["id"]) == len("cmpl-") + 32


def test_large_responses_are_rendered_beside_the_event_loop(service, monkeypatch):
    whole = ask(service, "/v1/completions", {**SEEDED, "logprobs": 2}).json()
    prepared = []
    prepare = service.engine.prepare
    monkeypatch.setattr(service.engine, "prepare", lambda work: prepared.append(work) or prepare(work))
    monkeypatch.setattr(respond, "SMALL", 10)
    large = ask(service, "/v1/completions", {**SEEDED, "logprobs": 2}).json()
    assert len(prepared) == 2, "the prompt and the response"
    assert large["choices"] == whole["choices"]


def test_a_response_has_so_many_log_probabilities(service):
    small = service_of(family(), limits=Limits(max_logprob_entries=100))
    try:
        body = {**GREEDY, "logprobs": 2}  # 12 tokens, with the chosen one 36 entries
        assert ask(small, "/v1/completions", {**body, "n": 2, "temperature": 1}).status_code == 200
        error = error_of(ask(small, "/v1/completions", {**body, "n": 3, "temperature": 1}), 400)
        assert error["message"].startswith("the response may have 108 log-probabilities: expected at most 100")
        assert error["param"] == "logprobs"
        assert events(ask(small, "/v1/completions", {**body, "n": 3, "temperature": 1, "stream": True}))
        error_of(ask(small, "/v1/completions", {**GREEDY, "prompt": "a b c d " * 20, "prompt_logprobs": 2}), 400)
    finally:
        asyncio.run(small.engine.close())


def test_finish_reasons_name_the_stop(service):
    text = generated(temperature=0, max_tokens=12).text
    stop = text[len(text) // 2 :][:3]
    choice = ask(service, "/v1/completions", {**GREEDY, "stop": stop}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert choice["stop_reason"] == stop
    token = generated(temperature=0, max_tokens=12).token_ids[5]
    choice = ask(service, "/v1/completions", {**GREEDY, "stop_token_ids": [token]}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    usage = ask(service, "/v1/completions", {**GREEDY, "max_tokens": None, "ignore_eos": True}).json()["usage"]
    assert usage["total_tokens"] == MAX_LEN


def joined(chunks) -> dict:
    """The text and the log-probabilities of a stream."""
    whole = {"text": "", "text_offset": [], "tokens": [], "token_logprobs": [], "top_logprobs": []}
    for chunk in chunks:
        whole["text"] += chunk["choices"][0]["text"]
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            whole[name] += values
    return whole


@pytest.mark.parametrize("prompt", [PROMPT, "# déjà vu 🙂 日本\ndef", [1, 5, 9, 12]])
def test_echoed_log_probabilities_have_places_in_the_text(service, prompt):
    body = {**GREEDY, "prompt": prompt, "echo": True, "logprobs": 1}
    choice = ask(service, "/v1/completions", body).json()["choices"][0]
    found, text = choice["logprobs"], choice["text"]
    ids = family().tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    assert {len(values) for values in found.values()} == {len(ids) + 12}
    assert found["text_offset"] == sorted(found["text_offset"])
    assert (found["text_offset"][0], found["token_logprobs"][0], found["top_logprobs"][0]) == (0, None, None)
    ends = [*found["text_offset"][1:], len(text)]
    for start, end, token in zip(found["text_offset"], ends, found["tokens"], strict=True):
        assert text[start:end] in (token, "") or "\ufffd" in token
    streamed = joined(events(ask(service, "/v1/completions", {**body, "stream": True})))
    assert streamed == {"text": text, **found}


def test_echo_without_new_tokens_is_the_prompt(service):
    body = {**GREEDY, "echo": True, "max_tokens": 0}
    answer = ask(service, "/v1/completions", {**body, "logprobs": 1, "return_token_ids": True}).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT, "length", [])
    assert answer["usage"]["completion_tokens"] == 0
    longer = ask(service, "/v1/completions", {**GREEDY, "echo": True, "logprobs": 1}).json()["choices"][0]["logprobs"]
    count = len(choice["logprobs"]["tokens"])
    assert count == answer["usage"]["prompt_tokens"]
    assert choice["logprobs"] == {name: values[:count] for name, values in longer.items()}
    chunks = events(ask(service, "/v1/completions", {**body, "stream": True, "logprobs": 1}))
    assert joined(chunks) == {"text": PROMPT, **choice["logprobs"]}
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert ask(service, "/v1/completions", {**body, "echo": False}).status_code == 400


def test_echo_repeats_the_prompt(service):
    answer = ask(service, "/v1/completions", {**GREEDY, "echo": True}).json()
    assert answer["choices"][0]["text"] == PROMPT + generated(temperature=0, max_tokens=12).text
    chunks = events(ask(service, "/v1/completions", {**GREEDY, "echo": True, "stream": True}))
    assert chunks[0]["choices"][0]["text"] == PROMPT
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answer["choices"][0]["text"]
    cut = {**GREEDY, "echo": True, "logprobs": 0, "truncate_prompt_tokens": 1}
    (choice,) = ask(service, "/v1/completions", cut).json()["choices"]
    assert (choice["logprobs"]["tokens"][0], choice["logprobs"]["text_offset"][:2]) == ("):", [0, 2])
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])


def test_chat_equals_generate_of_its_prompt(service):
    body = {"model": "family", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 10}
    prompt = family().chat_prompt(MESSAGES, chat_template=CHAT)
    expected = generated(prompt, temperature=0, max_tokens=10)
    answer = openai.types.chat.ChatCompletion.model_validate(ask(service, "/v1/chat/completions", body).json())
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert (choice.finish_reason, answer.object) == ("length", "chat.completion")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    chunks = events(ask(service, "/v1/chat/completions", {**body, "stream": True}))
    for chunk in chunks:
        openai.types.chat.ChatCompletionChunk.model_validate(chunk)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_chat_takes_tools_parts_and_an_open_end(service):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "1"},
        {"role": "assistant", "content": "class "},
    ]
    body = {"messages": messages, "tools": tools, "max_tokens": 3, "return_token_ids": True, "seed": 1}
    body |= {"add_generation_prompt": False, "continue_final_message": True, "tool_choice": "auto"}
    answer = ask(service, "/v1/chat/completions", body).json()
    expected = family().chat_prompt(
        messages, tools=tools, add_generation_prompt=False, continue_final_message=True, chat_template=CHAT
    )
    assert answer["prompt_token_ids"] == expected
    assert len(answer["choices"][0]["token_ids"]) == 3


def test_logprobs_are_those_of_generate(service):
    """Those of ``jspec.generate``, whole and in a stream."""
    chat = {"messages": MESSAGES, "temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    params: dict = {"temperature": 0, "max_tokens": 6, "logprobs": 2}
    result = generated(family().chat_prompt(MESSAGES, chat_template=CHAT), **params)
    answer = openai.types.chat.ChatCompletion.model_validate(ask(service, "/v1/chat/completions", chat).json())
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    places = zip(result.token_ids, result.logprobs, strict=True)
    assert [entry.logprob for entry in content] == pytest.approx([place[token].logprob for token, place in places])
    assert [len(entry.top_logprobs) for entry in content] == [2] * 6
    chunks = events(ask(service, "/v1/chat/completions", {**chat, "stream": True}))
    streamed = [entry for chunk in chunks for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == [entry.model_dump() for entry in content]
    whole = ask(service, "/v1/completions", {**GREEDY, "logprobs": 2}).json()["choices"][0]["logprobs"]
    assert "".join(whole["tokens"]) == generated(temperature=0, max_tokens=12).text
    chunks = events(ask(service, "/v1/completions", {**GREEDY, "logprobs": 2, "stream": True}))
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {name: [x for piece in pieces for x in piece[name]] for name in whole} == whole


def test_echo_has_logprobs_of_the_prompt(service):
    body = {**GREEDY, "logprobs": 1, "echo": True, "max_tokens": 2, "return_token_ids": True}
    response = ask(service, "/v1/completions", body)
    choice = response.json()["choices"][0]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    assert len(told["tokens"]) == len(choice["prompt_token_ids"]) + 2
    assert told["token_logprobs"][0] is None
    assert all(value < 0 for value in told["token_logprobs"][1:])


def test_tokenize_and_detokenize_are_inverse(service):
    tokens = family().tokenizer.encode(PROMPT)
    answer = ask(service, "/tokenize", {"model": "family", "prompt": PROMPT, "return_token_strs": True}).json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (tokens, len(tokens), MAX_LEN)
    assert "".join(answer["token_strs"]) == PROMPT
    assert ask(service, "/detokenize", {"tokens": tokens}).json() == {"prompt": PROMPT}
    chat = ask(service, "/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert chat == family().chat_prompt(MESSAGES, chat_template=CHAT)
    assert error_of(ask(service, "/detokenize", {"tokens": [10**9]}), 400)["param"] == "tokens"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_sources_mark_accepted_drafts(service, path):
    """In a whole answer, and in a stream, where the text comes in pieces besides."""
    body = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": MESSAGES}
    body |= {"temperature": 0, "max_tokens": 30, "return_token_sources": True, "ignore_eos": True}
    prompt = PROMPT if "prompt" in body else family().chat_prompt(MESSAGES, chat_template=CHAT)
    expected = generated(prompt, temperature=0, max_tokens=30, ignore_eos=True)
    assert {"draft", "correction", "bonus"} == set(expected.sources)
    (choice,) = ask(service, path, body).json()["choices"]
    assert choice["token_sources"] == expected.sources
    assert "text_sources" not in choice
    chunks = events(ask(service, path, {**body, "stream": True}))
    pieces = [one for chunk in chunks for choice in chunk["choices"] for one in choice.get("text_sources", [])]
    assert [s for chunk in chunks for c in chunk["choices"] for s in c.get("token_sources", [])] == expected.sources
    assert "".join(text for text, _ in pieces) == expected.text
    assert set(source for _, source in pieces) == set(expected.sources)
    without = ask(service, path, {**body, "max_drafts": 0}).json()["choices"][0]
    assert set(without["token_sources"]) == {"target"}
    plain = ask(service, path, {**body, "return_token_sources": None}).json()["choices"][0]
    assert "token_sources" not in plain


def test_drafts_of_a_round_can_be_capped(service):
    before = family().engine.metrics()
    asked = {**SEEDED, "max_tokens": 20, "max_drafts": 1}
    text = ask(service, "/v1/completions", asked).json()["choices"][0]["text"]
    params = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "seed": 7, "max_tokens": 20, "max_drafts": 1}
    result = generated(**params)
    assert text == result.text
    after = family().engine.metrics()
    assert after.num_draft_tokens - before.num_draft_tokens == 2 * result.stats.num_draft_tokens
    assert result.stats.drafted_per_position[1:] == (0, 0)
    error = error_of(ask(service, "/v1/completions", {**asked, "max_drafts": -1}), 400)
    assert (error["param"], "max_drafts=-1: expected None or an integer" in error["message"]) == ("max_drafts", True)


def test_models_version_and_unknown_paths(service):
    cards = ask(service, "/v1/models").json()
    assert [openai.types.Model.model_validate(card).id for card in cards["data"]] == ["family", "other"]
    assert cards["data"][0]["speculation"] == {
        **{"method": "draft_model", "num_speculative_tokens": 3, "most_draft_tokens": 3, "draft_lengths": [3]},
        **{"verify": "rejection", "draft_sampling": "auto", "tree": None},
    }
    assert (cards["data"][0]["chat"], cards["data"][0]["reproducible"]) == (True, True)
    assert ask(service, "/v1/models/other").json()["max_model_len"] == MAX_LEN
    assert error_of(ask(service, "/v1/models/none"), 404)["code"] == "model_not_found"
    assert ask(service, "/version").json() == {"version": jspec.__version__}
    assert ask(service, "/ping").status_code == 200
    assert ask(service, "/load").json() == {"server_load": 0}
    assert "/nowhere" in error_of(ask(service, "/nowhere"), 404)["message"]
    error_of(ask(service, "/v1/completions"), 405)
    assert error_of(ask(service, "/v1/completions", {**GREEDY, "model": "x"}), 404)["param"] == "model"


def test_concurrent_clients_get_the_texts_of_generate(service):
    async def everybody():
        bodies = [{**SEEDED, "seed": seed, "stream": bool(seed % 2)} for seed in range(12)]
        return await asyncio.gather(*(asked(service, "/v1/completions", body) for body in bodies))

    for seed, response in enumerate(asyncio.run(asyncio.wait_for(everybody(), 120))):
        expected = generated(temperature=0.9, top_p=0.9, top_k=50, seed=seed, max_tokens=12).text
        chunks = events(response) if seed % 2 else [response.json()]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_logprobs_have_the_stop_token_that_the_text_does_not_show(service, path):
    """As vLLM's, one entry for each token of ``usage``."""
    chat = path != "/v1/completions"
    asked = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "def "}
    asked |= {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    asked |= {"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}
    token = ask(service, path, asked).json()["choices"][0]["token_ids"][3]
    body = ask(service, path, {**asked, "stop_token_ids": [token]}).json()
    [choice] = body["choices"]
    assert choice["token_ids"][-1] == token
    entries = [entry["token"] for entry in choice["logprobs"]["content"]] if chat else choice["logprobs"]["tokens"]
    assert len(entries) == len(choice["token_ids"]) == body["usage"]["completion_tokens"]
    assert (choice["finish_reason"], entries[-1]) == ("stop", family().tokenizer.decode([token]))
    text = choice["message"]["content"] if chat else choice["text"]
    assert text == family().tokenizer.decode(choice["token_ids"][:-1])
