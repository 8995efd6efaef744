"""Without ``reproducible`` there are programs of several sizes, and completions are kept as well."""

import dataclasses

import pytest
from disturbances import calls_of_any_length, preempting, serve
from engines import GREEDY, MAX_LEN, draft, drafting, paused, plain_greedy, requests_of, target
from requests_and_engines import CONFIG, PROMPTS, K, P, alone, engine_of, passing

from jspec.config import Speculation
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest, Request

FAST = dataclasses.replace(CONFIG, reproducible=False, max_batch=6)


@pytest.fixture(
    scope="module",
    params=[("draft_model", 128), ("eagle", 60), pytest.param(("p-eagle", 240), marks=pytest.mark.long)],
    ids=lambda param: param[0],
)
def fast(request) -> Engine:
    """Engines with one, two and three programs that read prompts, and three that decode."""
    kind, tokens = request.param
    return engine_of(kind, dataclasses.replace(FAST, prefill_tokens=tokens))


def greedy_requests(prompts, max_tokens: int = MAX_LEN) -> list[Request]:
    return requests_of(prompts, dataclasses.replace(GREEDY, max_tokens=max_tokens))


def check_greedy(actives: list[ActiveRequest], prompts, max_tokens: int = MAX_LEN, most: int = K):
    assert [active.tokens for active in actives] == [tokens[:max_tokens] for tokens in plain_greedy(target(), prompts)]
    for active in actives:
        length = len(active.request.prompt)
        for drafted, accepted in zip(active.drafted, active.accepted, strict=True):
            assert drafted in (0, min(most, MAX_LEN - 1 - length))
            assert 0 <= accepted <= drafted
            length += accepted + 1
        assert 0 <= length - len(active.request.prompt) - len(active.tokens) <= most


def test_greedy_texts_in_every_bucket(fast):
    """One, three and six requests at once, so that every program decodes some of them, and requests in between."""
    fast.scheduler.pages.forget_prefixes()
    for count in (1, 3, 6):
        check_greedy(serve(fast, greedy_requests(PROMPTS[-count:])), PROMPTS[-count:])
    assert fast.config.batch_buckets == (1, 4, 6)
    assert all(program.compiled for program in fast.runner.batch.programs.decode.values())
    with preempting(fast), calls_of_any_length(fast):
        actives = serve(fast, greedy_requests(PROMPTS), at_a_time=5, neighbour=passing)
    check_greedy(actives, PROMPTS)
    drafted, accepted = (sum(sum(getattr(one, name)) for one in actives) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted


def drafts_of(actives) -> list[tuple]:
    return [(active.tokens, active.drafted, active.accepted) for active in actives]


@pytest.mark.parametrize("steps", [None, 3, 4, 6])
def test_a_second_turn_finds_the_first_ones_completion(fast, steps):
    """Even if the first was aborted after a few steps, while a call was under way."""
    pages, opening = fast.scheduler.pages, PROMPTS[1:5]
    pages.forget_prefixes()
    with paused(fast) as loop:
        first = [loop.submit(request) for request in greedy_requests(opening, 16)]
        for _ in range(MAX_LEN if steps is None else steps):
            if loop.scheduler.unfinished:
                loop.step()
        loop.abort(first)
    turns = [[*prompt, *one.tokens, 3, 1, 4] for prompt, one in zip(opening, first, strict=True)]
    second = serve(fast, greedy_requests(turns, 12), at_a_time=1)
    for one, now in zip(first, second, strict=True):
        prompt, final = len(one.request.prompt), one.length - (K + 1) - 2  # slots that no round will write again
        assert now.num_cached_tokens == (final if final > prompt else prompt - 2) // P * P
    if steps is None:
        assert all(now.num_cached_tokens > len(one.request.prompt) for one, now in zip(first, second, strict=True))
    check_greedy(second, turns, 12)

    pages.forget_prefixes()
    anew = []
    for request in greedy_requests(turns, 12):
        anew += serve(fast, [request])
        pages.forget_prefixes()
    assert not any(active.num_cached_tokens for active in anew)
    assert drafts_of(second) == drafts_of(anew)


class Choice:
    """Stands in for a controller: K is what ``K`` says."""

    trying = False

    def __init__(self, K: int):
        self.K = K

    def choose(self, *_) -> int:
        return self.K

    def observe(self, *_):
        pass


def test_a_second_turn_after_rounds_without_drafts():
    """A drafter has not read the tokens of rounds without drafts in which a request has ended."""
    most, lengths = 2, (0, 2)
    config = dataclasses.replace(FAST, max_batch=1, rounds=8, num_pages=80, prefill_tokens=60)
    make = drafting("draft_model", Speculation("auto", max_draft_tokens=most, draft_sampling="sample"))
    costs = {1: dict.fromkeys(lengths, 1.0)}
    engine = Engine(target(), draft(), Decoding(make, "rejection", draft_lengths=lengths), config, costs=costs)
    engine.loop.controller = Choice(0)  # pyright: ignore[reportAttributeAccessIssue]
    first = serve(engine, greedy_requests(PROMPTS[1:5], 17), at_a_time=1)
    assert not any(sum(one.drafted) for one in first)
    engine.loop.controller.K = most
    turns = greedy_requests([[*one.request.prompt, *one.tokens, 3] for one in first], 12)
    second = serve(engine, turns, at_a_time=1)
    check_greedy(second, [turn.prompt for turn in turns], 12, most)
    assert sum(now.num_cached_tokens for now in second) > sum(len(one.request.prompt) for one in first)
    assert [(now.tokens, now.drafted, now.accepted) for now in second] == [
        (tokens, drafted, accepted) for tokens, _, _, drafted, accepted in alone(engine, turns)
    ]
