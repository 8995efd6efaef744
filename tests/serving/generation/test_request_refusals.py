"""What a server cannot do, it refuses by name, before anything is started."""

import gzip

import pytest
from openai_server import MAX_LEN, ask, closing_service, error_of, family, service_of

from jspec.serving.http.limits import Limits

PROMPT = {"prompt": "def main(", "max_tokens": 2}
CHATTING = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
FEW = {"max_prompts": 4, "max_n": 3, "max_choices": 6, "max_messages": 3, "max_stop_strings": 2, "max_stop_length": 10}
LIMITS = Limits(max_body_bytes=20_000, max_json_depth=8, max_logprobs=5, max_logit_bias=2, max_cache_salt=4, **FEW)


@pytest.fixture(scope="module")
def service():
    yield from closing_service(limits=LIMITS)


def streamed(options):
    return {"stream": True, "stream_options": options}


def said(content):
    return {"messages": [{"role": "user", "content": content}]}


def function(**fields):
    return {"tools": [{"type": "function", "function": fields}]}


REFUSED = [  # (fields, the field that is named, what the message has)
    ({"prompt": None}, "prompt", "is missing"),
    ({"prompt": ""}, "prompt", "prompt is empty"),
    ({"prompt": []}, "prompt", "text, a list of token ids"),
    ({"prompt": [[]]}, "prompt", "is empty"),
    ({"prompt": 7}, "prompt", "prompt=7"),
    ({"prompt": [True]}, "prompt", "a list of token ids"),
    ({"prompt": [1, "a"]}, "prompt", "a list of token ids"),
    ({"prompt": [99999]}, "prompt", "token id 99999"),
    ({"prompt": ["a", [99999]]}, "prompt", "prompt[1] has token id 99999"),
    ({"prompt": "a " * MAX_LEN}, "prompt", "(prompt is too long: 257 tokens > 255 maximum)"),
    ({"prompt": "a" * 19_000}, "prompt", "length is 256 tokens. However, your prompt resulted in 1024 tokens or"),
    ({"prompt": [7] * 1025}, "prompt", "context length is 256 tokens. However, your prompt resulted in 1025 tokens ("),
    ({"prompt": ["a"] * 5}, "prompt", "at most 4"),
    ({"n": 0}, "n", "n=0: expected an integer in 1..3"),
    ({"n": 4}, "n", "--max-n"),
    ({"n": 3, "prompt": ["a", "b", "c"]}, "n", "9 completions"),
    ({"temperature": -1}, "temperature", "temperature=-1"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "top_p=0"),
    ({"top_k": 0.5}, "top_k", "integer"),
    ({"min_p": 2}, "min_p", "min_p=2"),
    ({"seed": 2**63}, "seed", "seed=9223372036854775808"),
    ({"seed": 1.5}, "seed", "integer"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
    ({"min_tokens": 3}, "min_tokens", "min_tokens=3"),
    ({"ignore_eos": 1}, "ignore_eos", "boolean"),
    ({"stop": ["a", "b", "c"]}, "stop", "3 entries"),
    ({"stop": "a" * 11}, "stop", "11 characters"),
    ({"stop": [""]}, "stop", "non-empty"),
    ({"stop": 7}, "stop", "stop=7: expected a valid string or a valid list"),
    ({"stop": ["a", 7]}, "stop[1]", "stop[1]=7: expected a valid string"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [5000]}, "stop_token_ids", "5000"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "'a'"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "-100..100"),
    ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "3 entries"),
    ({"logprobs": 6}, "logprobs", "0..5"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "-1"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    (streamed({"x": 1}), "stream_options.x", "unknown field 'stream_options.x': leave it out"),
    (streamed({"include_usage": "x"}), "stream_options.include_usage", "='x': expected a valid boo"),
    (streamed(7), "stream_options", "stream_options=7: expected a valid dictionary"),
    ({"logit_bias": {"7": "a"}}, "logit_bias.7", "logit_bias.7='a': expected a valid number"),
    ({"logit_bias": {"7" * 999: "a"}}, f"logit_bias.{'7' * 64}", "expected a valid number"),
    ({"priority": 1}, "priority", "--scheduling-policy"),
    ({"cache_salt": "12345"}, "cache_salt", "--max-cache-salt"),
    ({"cache_salt": ""}, "cache_salt", "1 to 4"),
    ({"best_of": 2}, "best_of", "beam"),
    ({"suffix": "a"}, "suffix", "not supported"),
    ({"chat_template": "x"}, "chat_template", "never from a request"),
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"messages": []}, "messages", "unknown field"),
    ({"model": 7}, "model", "valid string"),
    ({"user": "u" * 30_000}, None, "too large"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED)
def test_bad_completion_requests_are_refused(service, fields, param, message):
    before = family().engine.metrics().num_finished
    response = ask(service, "/v1/completions", {**PROMPT, **fields})
    error = error_of(response, 413 if param is None else 400)
    assert error["param"] == param
    assert message in error["message"]
    assert error["type"] == "invalid_request_error"
    assert family().engine.metrics().num_finished == before


REFUSED_CHATS = [
    ({"messages": None}, "messages", "is missing"),
    ({"messages": []}, "messages", "is empty"),
    ({"messages": ["a"]}, "messages[0]", "messages[0]='a': expected a valid dictionary"),
    ({"messages": [{"content": "a"}]}, "messages[0].role", "expected text"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    (said([{"type": "image_url"}]), "messages[0].content[0].type", "image"),
    ({"messages": [{"role": "user", "content": "a"}] * 4}, "messages", "--max-messages"),
    (said("a " * MAX_LEN), "messages", "However, your messages resulted in "),
    (said("a" * 19_000), "messages", "resulted in 1024 tokens or more"),
    ({"tool_choice": "required"}, "tool_choice", "'required'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", 'expected "none", "auto", "required"'),
    ({"tools": [1]}, "tools[0]", "tools[0]=1: expected a valid dictionary"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "expected 'function'"),
    (function(), "tools[0].function.name", "expected the name"),
    (function(name="f", strict=1), "tools[0].function.strict", "strict=1: exp"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "beside it"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "--template-kwargs"),
    (
        {"chat_template_kwargs": {"enable_thinking": [1]}},
        "chat_template_kwargs.enable_thinking",
        "[1]: expected true, ",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"logprobs": 2}, "logprobs", "boolean"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"add_special_tokens": True}, "add_special_tokens", "the chat template"),
    ({"echo": True}, "echo", "only /v1/completions"),
    ({"modalities": ["audio"]}, "modalities", "jspec writes text"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED_CHATS)
def test_bad_chat_requests_are_refused(service, fields, param, message):
    error = error_of(ask(service, "/v1/chat/completions", {**CHATTING, **fields}), 400)
    assert error["param"] == param
    assert message in error["message"]


def test_chats_need_a_template():
    own = service_of(family(), chat_template=None)
    error = error_of(ask(own, "/v1/chat/completions", CHATTING), 400)
    assert error["message"].endswith("ask /v1/completions, or have the server started with --chat-template")


BODIES = [
    (b"", "no JSON"),
    (b"[]", "expected a JSON object"),
    (b"{", "no JSON"),
    (b"\xff{}", "UTF-8"),
    (b'{"prompt": NaN}', "NaN"),
    (b'{"temperature": 1e999}', "1e999"),
    (b'{"prompt": "a", "prompt": "b"}', "given twice"),
    (b'{"prompt": "\\ud800"}', "surrogate"),
    (b'{"\\ud800": 1}', "surrogate"),
    (b'{"prompt": ' + b"[" * 20 + b"]" * 20 + b"}", "nested too deeply"),
    (b'{"prompt": ' + b"[" * 9000 + b"]" * 9000 + b"}", "nested too deeply"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "no JSON"),
    (b'{"seed": ' + b"9" * 25 + b"}", "64 bits"),
]


@pytest.mark.parametrize(("body", "message"), BODIES)
def test_bodies_that_are_no_json_objects_are_refused(service, body, message):
    error = error_of(ask(service, "/v1/completions", content=body), 400)
    assert message in error["message"]


def test_other_content_types_are_refused(service):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        error_of(ask(service, "/v1/completions", PROMPT, {"content-type": kind}), 415)
    headers = {"content-encoding": "gzip"}
    error = error_of(ask(service, "/v1/completions", headers=headers, content=gzip.compress(b"{}")), 415)
    assert error["message"] == "Content-Encoding is 'gzip': expected a body that is not compressed"
    headers = {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "identity"}
    assert ask(service, "/v1/completions", PROMPT, headers).status_code == 200
