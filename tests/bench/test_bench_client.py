"""The client of ``jspec bench serve`` takes down when text comes, and an answer that is none is a failure with a reason."""

import asyncio

import pytest
from fake_server import CHUNKS, FAILURES, PAUSE, TOKENS, fake_server

from jspec.bench.client import CHAT, PATHS, Endpoint, ask
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


def answer(server, *args, **fields):
    async def run():
        async with session() as client:
            return await ask(client, endpoint(server, *args, **fields), SAMPLE)

    return asyncio.run(run())


def test_a_completion(server):
    found = answer(server, temperature=0.5)
    assert (found.error, found.text) == ("", "".join(CHUNKS))
    assert (found.prompt_tokens, found.output_tokens) == (5, TOKENS)
    assert len(found.told) == len(CHUNKS)
    assert len(found.gaps) == len(CHUNKS) - 1
    assert min(found.ttft, *found.gaps) > 0.8 * PAUSE
    assert found.latency > 2.4 * PAUSE
    assert server.bodies[-1] == {
        "model": "sound",
        "prompt": "a prompt",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }


def test_a_chat(server):
    found = answer(server, "sound", True)
    assert (found.error, found.text, found.output_tokens) == ("", "".join(CHUNKS), TOKENS)
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
    "silent": "the stream ended before the answer did",
    "odd usage": "no numbers of tokens in usage",
}


@pytest.mark.parametrize("how", FAILURES)
def test_an_answer_that_is_none(server, how):
    found = answer(server, how)
    assert REASONS[how] in found.error
    assert found.ended >= found.sent


def test_nobody_listens():
    async def run():
        async with session() as client:
            return await ask(client, Endpoint("http://127.0.0.1:9/v1/completions", "m"), SAMPLE)

    assert "Cannot connect" in asyncio.run(run()).error


def sent(server, count: int, times=None, max_concurrency=None, cancel_after=None) -> tuple[Outcome, int, int]:
    """The outcome, how often an end was told, and how many tasks are left."""
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


def test_requests_are_sent_at_their_times_and_kept_in_order(server):
    times = [0.0, 0.0, 0.1, 0.3]
    outcome, ends, tasks = sent(server, 4, times)
    assert [one.sample.prompt for one in outcome.answers] == ["prompt 0", "the bad one", "prompt 2", "prompt 3"]
    assert [bool(one.error) for one in outcome.answers] == [False, True, False, False]
    offsets = [one.sent - outcome.answers[0].sent for one in outcome.answers]
    assert offsets == pytest.approx(times, abs=0.08)
    assert (ends, tasks, outcome.interrupted) == (4, 0, False)
    assert outcome.seconds >= 0.3 + 3 * PAUSE


def test_no_more_than_so_many_are_under_way(server):
    server.most_under_way = 0
    outcome, *_ = sent(server, 9, max_concurrency=3)
    assert server.most_under_way == 3
    assert len(outcome.answers) == 9
    server.most_under_way = 0
    sent(server, 9)
    assert server.most_under_way >= 6  # the bad one ends at once


def test_a_cancellation_keeps_what_was_measured_and_leaves_no_tasks(server):
    outcome, ends, tasks = sent(server, 4, [0.0, 0.0, 0.0, 60.0], cancel_after=0.6)
    assert outcome.interrupted
    assert (len(outcome.answers), ends, tasks) == (3, 3, 0)
    outcome, ends, tasks = sent(server, 2, [60.0, 60.0], cancel_after=0.1)
    assert (outcome.interrupted, outcome.answers, tasks) == (True, [], 0)
