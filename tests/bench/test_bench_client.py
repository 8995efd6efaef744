"""The client of ``jspec bench serve`` records when chunks come, and every bad response is a failure with a reason."""

import asyncio

import pytest
from fake_server import CHUNKS, FAILURES, PAUSE, TOKENS, fake_server

from jspec.bench.client import CHAT, PATHS, Endpoint, send_request
from jspec.bench.datasets import Sample
from jspec.bench.load import Outcome, send, session

SAMPLE = Sample("a prompt", 9)


@pytest.fixture(scope="module")
def server():
    with fake_server() as fake:
        yield fake


def endpoint(server, model="sound", chat=False, **fields) -> Endpoint:
    path = PATHS[CHAT] if chat else "/v1/completions"
    return Endpoint(server.url + path, model, chat, fields)


def response(server, *args, **fields):
    async def run():
        async with session() as client:
            return await send_request(client, endpoint(server, *args, **fields), SAMPLE)

    return asyncio.run(run())


def test_completion_has_text_usage_and_chunk_times(server):
    completion = response(server, temperature=0.5)
    assert (completion.error, completion.text) == ("", "".join(CHUNKS))
    assert (completion.prompt_tokens, completion.output_tokens) == (5, TOKENS)
    assert len(completion.chunk_times) == len(CHUNKS)
    assert len(completion.gaps) == len(CHUNKS) - 1
    assert min(completion.ttft, *completion.gaps) > 0.8 * PAUSE
    assert completion.latency > 2.4 * PAUSE
    assert server.bodies[-1] == {
        "model": "sound",
        "prompt": "a prompt",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }


def test_chat_sends_the_prompt_as_a_user_message(server):
    chat = response(server, "sound", True)
    assert (chat.error, chat.text, chat.output_tokens) == ("", "".join(CHUNKS), TOKENS)
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "a prompt"}]
    assert server.bodies[-1]["max_completion_tokens"] == 9


REASONS = {
    "500": 'HTTP 500: {"error": {"message": "broken"}}',
    "cut": "payload",
    "garbage": "no chunk of OpenAI's: {not json",
    "array": "no chunk of OpenAI's: [1]",
    "error": "an error in the stream: out of memory",
    "whole": "no stream of events, but application/json",
    "endless line": "Got more than",
    "silent": "the stream ended before the response did",
    "odd usage": "no numbers of tokens in usage",
}


@pytest.mark.parametrize("how", FAILURES)
def test_bad_response_is_an_error_with_its_reason(server, how):
    failed = response(server, how)
    assert REASONS[how] in failed.error
    assert failed.ended >= failed.sent


def test_refused_connection_is_an_error():
    async def run():
        async with session() as client:
            return await send_request(client, Endpoint("http://127.0.0.1:9/v1/completions", "m"), SAMPLE)

    assert "Cannot connect" in asyncio.run(run()).error


def sent(server, count: int, times=None, max_concurrency=None, cancel_after=None) -> tuple[Outcome, int, int]:
    """The outcome, how often ``ended`` was called, and how many tasks are left."""
    ends = []

    async def run():
        async with session() as client:
            samples = [Sample("the bad one" if i == 1 else f"prompt {i}", 9) for i in range(count)]
            sending = asyncio.ensure_future(
                send(client, endpoint(server), samples, times or [0.0] * count, max_concurrency, lambda: ends.append(1))
            )
            if cancel_after is not None:
                await asyncio.sleep(cancel_after)
                sending.cancel()
            outcome = await sending
            return outcome, len(ends), len(asyncio.all_tasks()) - 1

    return asyncio.run(run())


def test_requests_are_sent_at_their_times_and_reported_in_order(server):
    times = [0.0, 0.0, 0.1, 0.3]
    outcome, ends, tasks = sent(server, 4, times)
    prompts = [response.sample.prompt for response in outcome.responses]
    assert prompts == ["prompt 0", "the bad one", "prompt 2", "prompt 3"]
    assert [bool(response.error) for response in outcome.responses] == [False, True, False, False]
    offsets = [response.sent - outcome.responses[0].sent for response in outcome.responses]
    assert offsets == pytest.approx(times, abs=0.08)
    assert (ends, tasks, outcome.interrupted) == (4, 0, False)
    assert outcome.seconds >= 0.3 + 3 * PAUSE


def test_max_concurrency_limits_requests_under_way(server):
    server.most_under_way = 0
    outcome, *_ = sent(server, 9, max_concurrency=3)
    assert server.most_under_way == 3
    assert len(outcome.responses) == 9
    server.most_under_way = 0
    sent(server, 9)
    assert server.most_under_way >= 6  # the bad one ends at once


def test_cancellation_returns_responses_so_far_and_leaves_no_tasks(server):
    outcome, ends, tasks = sent(server, 4, [0.0, 0.0, 0.0, 60.0], cancel_after=0.6)
    assert outcome.interrupted
    assert (len(outcome.responses), ends, tasks) == (3, 3, 0)
    outcome, ends, tasks = sent(server, 2, [60.0, 60.0], cancel_after=0.1)
    assert (outcome.interrupted, outcome.responses, tasks) == (True, [], 0)
