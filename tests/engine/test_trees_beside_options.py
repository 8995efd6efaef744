"""Requests of all kinds beside trees of drafts: what one of them asks for changes nothing for another, not a bit where that
is promised."""

import dataclasses
import functools

import numpy as np
import pytest
from disturbances import attribute, calls_of_any_length, outcome_of, preempting, serve
from engines import MAX_LEN, assert_nothing_is_held
from requests_and_engines import passing
from tiers import in_tiers
from tree_engines import (
    CONFIG,
    KINDS,
    OPTIONS,
    PENALTIES,
    REQUESTS,
    SHAPE,
    alone,
    expected,
    llm_of,
    numbers,
    outcomes,
    texts,
    with_options,
    with_params,
)

import jspec
from jspec.engine.engine import Engine
from jspec.engine.request import Request
from jspec.llm import LLM
from jspec.sampling.params import SamplingParams


@pytest.fixture(scope="module", params=in_tiers(KINDS, ["plain"]))
def kind(request) -> str:
    return request.param


@pytest.fixture
def engine(kind) -> Engine:
    engine = llm_of(kind).engine
    engine.scheduler.pages.forget_prefixes()
    return engine


@pytest.mark.parametrize("options", in_tiers(OPTIONS, ["logprobs", "everything", "grammar and penalties"]))
def test_trees_beside_requests_with_options(engine, kind, options):
    """A request drafts and accepts what it does alone beside one whose own tokens decide which may follow, whose drafts are
    those of chains, with the same head; text and log-probabilities of that one are the target's, too."""
    engine.scheduler.pages.forget_prefixes()
    own, asked = outcomes(serve(engine, REQUESTS[3:6])), lambda: with_options(REQUESTS[:3], options)
    pairs = zip(REQUESTS[3:6], asked(), strict=True)
    *actives, one = serve(engine, [*(one for pair in pairs for one in pair), REQUESTS[6]])
    assert outcomes(actives[::2]) == own
    plain, beside = serve(llm_of(kind, None).engine, asked()), actives[1::2]
    assert texts([*beside, one]) == [*texts(plain), expected(kind)[6]]
    for found, right in zip(numbers(llm_of(kind), beside), numbers(llm_of(kind, None), plain), strict=True):
        if "logprobs" in OPTIONS[options]:
            np.testing.assert_allclose(found, right, atol=1e-4)
    if options == "logprobs":
        without = with_params(asked(), logprobs=None)
        assert outcomes(beside) == outcomes(serve(engine, without))
        assert max(max(active.drafted) for active in beside) == SHAPE.nodes - 1
    elif kind == "plain":
        how = {"num_draft_tokens": SHAPE.depth, "verify": "match", "draft_sampling": "coupled"}
        chains = serve(llm_of(kind, tree=None, **how).engine, asked())
        assert outcomes(beside) == outcomes(chains)
        assert sum(sum(active.accepted) for active in chains) > 0


def test_a_neighbour_with_options_that_is_aborted(engine, kind):
    own = outcomes(serve(engine, REQUESTS, at_a_time=2))

    def neighbour(i: int) -> Request:
        return with_options([passing(i)], [*OPTIONS][i % len(OPTIONS)])[0]

    assert outcomes(serve(engine, REQUESTS, at_a_time=2, neighbour=neighbour)) == own
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("most", [0, 1, 20])
def test_chains_of_few_drafts_to_the_last_slot(engine, kind, most):
    some = with_params(REQUESTS, max_drafts=most, **PENALTIES)
    actives = serve(engine, some)
    assert texts(actives) == alone(kind, some)
    assert len(actives[-1].request.prompt) + len(actives[-1].tokens) == MAX_LEN
    assert max(max(active.drafted) for active in actives) == min(most, SHAPE.depth)


def test_logprobs_are_the_targets_own(engine, kind):
    results = []
    for serving in (engine, llm_of(kind, None).engine):
        actives = serve(serving, with_params(REQUESTS, logprobs=2))
        results.append([serving.frontend.result(active).token_logprobs for active in actives])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_nothing_is_compiled_for_other_requests(engine, kind, xla_compilations):
    """Once rounds of all programs have run, and requests have been swapped."""
    asked = [one for name in OPTIONS for one in with_options(REQUESTS[:2], name)]
    with preempting(engine):
        serve(engine, [*REQUESTS, *asked])
        serve(engine, REQUESTS)
    programs, compiled = engine.num_compilations, len(xla_compilations)
    asked = [one for name in [*OPTIONS][::-1] for one in with_options(REQUESTS[4:7], name)]
    with preempting(engine):
        serve(engine, [*asked, *with_params(REQUESTS, max_drafts=2), *REQUESTS[::-1]])
    serve(engine, REQUESTS[:1])
    assert (engine.num_compilations, len(xla_compilations)) == (programs, compiled)


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
