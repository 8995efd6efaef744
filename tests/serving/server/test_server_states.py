"""Keys and tenants, queues that are full, clients that leave, engines that fail, and what a server counts."""

import asyncio
import dataclasses
import json

import pytest
from async_callers import slow_model, until
from loops import in_a_loop
from openai_server import ask, asked, assert_nothing_is_held, closing_service, error_of, events, family, service_of

from jspec.outputs import Result
from jspec.serving.http.auth import Keys
from jspec.serving.http.limits import Limits
from jspec.serving.server.app import make_app

PROMPT = {"prompt": "def main(", "max_tokens": 2}


@pytest.fixture(scope="module")
def service():
    yield from closing_service()


def test_missing_body_times_out():
    service = service_of(family(), limits=Limits(max_body_seconds=0.05))
    sent = []

    async def receive():
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message)

    asyncio.run(make_app(service)(scope_of(), receive, send))
    assert sent[0]["status"] == 408


def scope_of(path: str = "/v1/completions") -> dict:
    headers = [(b"content-type", b"application/json")]
    plain = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
    return {**plain, "query_string": b"", "root_path": "", "http_version": "1.1", "scheme": "http"}


PRIVATE = ["/v1/models", "/version", "/metrics", "/v1/completions", "/inference/v1/generate", "/tokenize", "/nowhere"]


@pytest.mark.parametrize("path", PRIVATE)
def test_every_path_but_health_needs_a_key(path):
    service = service_of(family(), keys=Keys(["one", "two"]))
    for header in (None, "one", "Bearer", "Bearer three", "Basic one", "Bearer one two", "Bearer \xe9"):
        headers = {} if header is None else {"authorization": header.encode("latin-1")}
        error = error_of(ask(service, path, headers=headers), 401)
        assert error["code"] == "invalid_api_key"
    for key in ("one", "two"):
        assert ask(service, path, headers={"authorization": f"bearer {key}"}).status_code != 401
    assert ask(service, "/health").status_code == 200


def test_keys_that_no_header_can_carry_are_refused():
    for key in ("", " a", "a\n", "ä"):
        with pytest.raises(ValueError, match="api_key='\\(hidden\\)': expected printable ASCII"):
            Keys([key])


def test_prefix_cache_is_separate_for_each_tenant():
    service = service_of(family(), keys=Keys(["one", "two"]))
    prompt = "".join(f"def function_{i}():\n    return {i}\n" for i in range(9))

    def cached(key: str, **fields) -> int:
        body = {**PROMPT, "prompt": prompt, **fields}
        usage = ask(service, "/v1/completions", body, {"authorization": f"Bearer {key}"}).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached("one") == 0
    assert cached("one") >= 64
    assert cached("two") == 0
    assert cached("two", cache_salt="a") == 0
    assert cached("two", cache_salt="b") == 0
    assert cached("two", cache_salt="a") >= 64
    asyncio.run(service.engine.close())


def test_priorities_need_the_priority_policy():
    service = service_of(family(), priorities=True)
    assert ask(service, "/v1/completions", {**PROMPT, "priority": -3}).status_code == 200
    assert error_of(ask(service, "/v1/completions", {**PROMPT, "priority": 2**40}), 400)["param"] == "priority"
    asyncio.run(service.engine.close())


async def connected(service, body: dict, leave: asyncio.Event):
    """Ask as a client that leaves when it is told to; returns what it was sent."""
    app, sent, incoming = make_app(service), [], [json.dumps(body).encode()]

    async def receive():
        if incoming:
            return {"type": "http.request", "body": incoming.pop(), "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope_of(), receive, send)
    return sent


@pytest.mark.parametrize("stream", [True, False])
@in_a_loop
async def test_disconnected_client_frees_its_rows(stream):
    """Within two calls to the device, though its texts are far from their ends."""
    llm = slow_model()
    service = service_of(llm)

    leave, metrics = asyncio.Event(), llm.engine.metrics
    body = {"prompt": "abc", "max_tokens": 400, "stream": stream, "n": 3}
    asking = asyncio.ensure_future(connected(service, body, leave))
    await until(lambda: metrics().num_running == 3 and metrics().num_generation_tokens)
    leave.set()
    calls = metrics().num_calls
    await until(lambda: metrics().num_running == 0)
    assert metrics().num_calls - calls <= 2
    sent = await asking
    assert stream == (sent[0]["status"] == 200)
    assert service.in_flight == 0
    await service.engine.close()
    assert_nothing_is_held(llm)


@in_a_loop
async def test_full_queue_is_503(monkeypatch):
    llm = slow_model()
    limited = dataclasses.replace(llm.engine.config, max_waiting=2)
    monkeypatch.setattr(llm.engine, "config", limited)
    monkeypatch.setattr(llm.engine.scheduler, "_config", limited)
    service = service_of(llm)

    leave = asyncio.Event()
    body = {"prompt": "abc", "max_tokens": 400}
    asking = [asyncio.ensure_future(connected(service, {**body, "n": n}, leave)) for n in (3, 2)]
    await until(lambda: (llm.engine.metrics().num_running, llm.engine.metrics().num_waiting) == (3, 2))
    for stream in (False, True):
        response = await asked(service, "/v1/completions", {**body, "stream": stream})
        assert "max_waiting=2" in error_of(response, 429)["message"]
        assert response.headers["retry-after"] == "1"
    too_many = {**body, "n": 6}  # for an empty queue, too
    assert error_of(await asked(service, "/v1/completions", too_many), 400)["param"] == "n"
    leave.set()
    await asyncio.gather(*asking)
    await service.engine.close()
    assert_nothing_is_held(llm)


@in_a_loop
async def test_ending_server_refuses_and_cancels_requests():
    llm = slow_model()
    service = service_of(llm)

    body = {"prompt": "abc", "max_tokens": 400}
    asking = [asyncio.ensure_future(asked(service, "/v1/completions", {**body, "stream": s})) for s in (True, False)]
    await until(lambda: llm.engine.metrics().num_running == 2)
    assert (await asked(service, "/health")).status_code == 200
    service.draining = True
    for path, content in (("/health", None), ("/v1/completions", body), ("/v1/models", None)):
        error_of(await asked(service, path, content), 503)
    assert (await asked(service, "/metrics")).status_code == 200
    await service.engine.close()
    stream, whole = await asyncio.gather(*asking)
    assert events(stream)[-1]["error"]["type"] == "server_error"
    error_of(whole, 503)
    assert_nothing_is_held(llm)


def test_engine_failure_is_500_and_later_requests_succeed(monkeypatch):
    llm = slow_model()
    service = service_of(llm)
    body = {"prompt": "abc", "max_tokens": 2}
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.loop, "step", lambda *_: 1 / 0)
        error = error_of(ask(service, "/v1/completions", body), 500)
        assert "ZeroDivisionError" not in error["message"]
        error_of(ask(service, "/health"), 503)
        assert "error" in events(ask(service, "/v1/completions", {**body, "stream": True}))[0]
    assert ask(service, "/v1/completions", body).status_code == 200
    assert ask(service, "/health").status_code == 200
    asyncio.run(service.engine.close())
    error_of(ask(service, "/health"), 503)


def test_failed_request_is_500(monkeypatch):
    """Logits that are not finite, for example."""
    service = service_of(family())
    result = family().engine.frontend.result

    def broken(*args) -> Result:
        return dataclasses.replace(result(*args), finish_reason="error", stop_reason="secret")

    monkeypatch.setattr(family().engine.frontend, "result", broken)
    for stream in (False, True):
        response = ask(service, "/v1/completions", {**PROMPT, "stream": stream})
        assert "secret" not in response.text
        error = events(response)[-1]["error"] if stream else error_of(response, 500)
        assert error["code"] == "engine_error"
    asyncio.run(service.engine.close())


def test_metrics_count_requests_and_tokens(service):
    before, engine = family().engine.metrics(), family().engine
    ask(service, "/v1/completions", {"prompt": "import os\n", "max_tokens": 8, "temperature": 0, "n": 2})
    text = ask(service, "/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    after, labels = engine.metrics(), '{engine="0",model_name="family"}'
    numbers = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prompt_tokens_total": after.num_prompt_tokens,
        "vllm:generation_tokens_total": before.num_generation_tokens + 16,
        "vllm:prefix_cache_hits_total": after.num_cached_tokens,
        "vllm:spec_decode_num_drafts_total": after.num_drafting_rounds,
        "vllm:spec_decode_num_draft_tokens_total": after.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens_total": after.num_accepted_tokens,
        "vllm:time_to_first_token_seconds_count": before.first_token_seconds.count + 2,
        "vllm:e2e_request_latency_seconds_count": before.last_token_seconds.count + 2,
        "vllm:inter_token_latency_seconds_count": after.between_tokens_seconds.count,
        "jspec:num_rounds_total": after.num_rounds,
    }
    assert {name: float(values[name + labels]) for name in numbers} == numbers
    tail = 'engine="0",finished_reason="length",model_name="family"}'
    assert float(values["vllm:request_success_total{" + tail]) == before.num_finished_by_reason["length"] + 2
    per_position = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="family",position="%d"}'
    assert [float(values[per_position % i]) for i in range(3)] == list(after.num_accepted_tokens_per_position)
    assert after.num_prompt_tokens > before.num_prompt_tokens
    assert 0 < after.num_drafting_rounds <= after.num_rounds


def test_server_exceptions_are_reported_without_their_text(service, monkeypatch):
    monkeypatch.setattr("jspec.serving.server.app._card", lambda *_: {}["secret"])
    error = error_of(ask(service, "/v1/models"), 500)
    assert "secret" not in error["message"]
    assert error["type"] == "server_error"
