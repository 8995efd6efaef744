"""Requests of all kinds beside trees of drafts: what one of them asks for changes nothing for another, not a bit where that
is promised."""

import numpy as np
import pytest
from disturbances import preempting, serve
from engines import MAX_LEN, assert_nothing_is_held
from requests_and_engines import passing
from tiers import in_tiers
from tree_engines import (
    KINDS,
    OPTIONS,
    PENALTIES,
    REQUESTS,
    SHAPE,
    alone,
    engine_of,
    expected,
    llm_of,
    numbers,
    outcomes,
    texts,
    with_options,
    with_params,
)

from jspec.engine.engine import Engine
from jspec.engine.request import Request


@pytest.fixture(scope="module", params=in_tiers(KINDS, ["plain"]))
def kind(request) -> str:
    return request.param


@pytest.fixture
def engine(kind) -> Engine:
    return engine_of(kind)


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
    else:
        assert [active.drafted for active in beside] == [active.deepest for active in beside]


@pytest.mark.nightly
@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "logprobs"])
def test_chains_accept_what_those_of_an_engine_without_trees_do(options):
    """Round by round, with jump-forward tokens in place of drafts where a grammar has some."""
    how = {"num_draft_tokens": SHAPE.depth, "verify": "match", "draft_sampling": "coupled"}
    engines = llm_of("plain").engine, llm_of("plain", tree=None, **how).engine
    among, alone = (serve(engine, with_options(REQUESTS, options)) for engine in engines)
    assert outcomes(among) == outcomes(alone)
    assert sum(sum(active.accepted) for active in alone) > 0


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
