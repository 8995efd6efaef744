"""``reproducible=True`` with trees of drafts: a request has the same bits beside any others, in every run."""

import dataclasses
import functools

from disturbances import attribute, calls_of_any_length, outcome_of, preempting, serve
from engines import MAX_LEN
from tree_engines import (
    CONFIG,
    PENALTIES,
    REQUESTS,
    llm_of,
    with_options,
    with_params,
)

import jspec
from jspec.engine.request import Request
from jspec.llm import LLM
from jspec.sampling.params import SamplingParams


@functools.cache
def pinned() -> LLM:
    """A model whose texts are the same to the last bit."""
    return llm_of("plain", "eagle3", dataclasses.replace(CONFIG, reproducible=True, max_batch=4))


def bits(llm: LLM, some: list[Request], **how) -> list[tuple]:
    """What clients learn of requests, and every bit of their log-probabilities."""
    actives = serve(llm.engine, some, **how)
    return [(*outcome_of(active), *map(bytes, active.logprobs)) for active in actives]


def asked_for_anything() -> list[Request]:
    """Some of the requests, of all kinds."""
    kinds = [{"logprobs": 3}, {}, PENALTIES | {"logprobs": 0}, {"logprobs": 1, "logprobs_mode": "processed_logprobs"}]
    some = [with_params([one], **kinds[i % len(kinds)])[0] for i, one in enumerate(REQUESTS)]
    return [*some, *with_options(REQUESTS[2:4], "grammar and penalties")]


def second_turns(answers: list[tuple]) -> list[Request]:
    first = asked_for_anything()
    prompts = [[*one.prompt, *answer[0], 1][: MAX_LEN - 6] for one, answer in zip(first, answers, strict=True)]
    return [
        dataclasses.replace(one, prompt=prompt)
        for one, prompt in zip(asked_for_anything(), prompts, strict=True)
        if one.constraint is None
    ]


def test_a_seed_means_the_same_bits_beside_any_others():
    """Text, log-probabilities, and how many drafts of each round were accepted."""
    llm = pinned()
    assert llm.reproducible
    alone = bits(llm, asked_for_anything(), at_a_time=1)
    assert bits(llm, asked_for_anything()) == alone
    llm.engine.scheduler.pages.forget_prefixes()
    with preempting(llm.engine):
        assert bits(llm, asked_for_anything()) == alone
    with calls_of_any_length(llm.engine):
        assert bits(llm, asked_for_anything()[::-1], at_a_time=3) == alone[::-1]
    llm.engine.scheduler.pages.forget_prefixes()
    turns = bits(llm, second_turns(alone), at_a_time=1)
    llm.engine.scheduler.pages.forget_prefixes()
    bits(llm, asked_for_anything())
    assert bits(llm, second_turns(alone)) == turns
    result = jspec.generate(llm, [REQUESTS[4].prompt], SamplingParams(temperature=1.0, max_tokens=20, seed=5))[0]
    assert result.reproducible


def test_pages_that_trees_have_written_are_detected():
    """Sums over keys in the order in which a tree had them have other bits than those of a prompt."""
    llm = pinned()
    llm.engine.scheduler.pages.forget_prefixes()
    alone = bits(llm, asked_for_anything(), at_a_time=1)
    turns = bits(llm, second_turns(alone), at_a_time=1)
    llm.engine.scheduler.pages.forget_prefixes()
    with attribute(llm.engine.scheduler, "_caches_answers", True):
        bits(llm, asked_for_anything())
        assert bits(llm, second_turns(alone)) != turns
    llm.engine.scheduler.pages.forget_prefixes()
