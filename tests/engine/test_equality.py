"""Nothing around a request changes it: its tokens and its drafts are those of the request alone on the same engine.

``test_equality_faults.py`` injects faults, each of which makes one of these checks fail.
"""

import dataclasses

import pytest
from disturbances import calls_of_any_length, few_pages, outcome_of, preempting, serve
from engines import MAX_LEN, hybrid, in_bytes, key_of, latents, plain_greedy, requests_of, target
from requests_and_engines import (
    CONFIG,
    PARAMS,
    PROMPTS,
    REQUESTS,
    P,
    alone,
    chunks_of_states,
    engine_of,
    expanded_latents,
    passing,
)
from shared_prefixes import TEXT, changed_contents, check_found, sharing_requests

from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest, Request
from jspec.models import Decoder

QUICK = (
    "draft_model",
    "eagle",
    "dspark",
    "latents/expanded",
    "eagle+lookup",
    "eagle/2/packets/batch-sharded",
    "hybrid",
)  # the last but one in two shards
NIGHTLY = (
    "eagle/2/batch-sharded",
    "draft_model/2/2/packets",
    "ngram",
    "p-eagle",
    "dflash-wide",
    "latents",
    "draft_model/2",
    "hybrid/2/packets",
    "eagle@fp8",
    "draft_model@fp8_per_token_head/2",
    "latents@fp8/expanded",
    "latents@fp8_per_token_head/2",
    "hybrid@fp8/2",
    "hybrid_draft",
    "hybrid_pair/2/2",
)
LONG = ("none", "eagle3", "pard", "mlp", "medusa", "mtp")
LONG += (
    "hybrid/2",
    "hybrid_pair",
    "hybrid_draft/2",
    "draft_model/2/2",
    "ngram/4",
    "eagle/4",
    "eagle3/2",
    "p-eagle/2",
    "mlp/2",
    "medusa/4",
    "mtp/2",
    "latents/2",
)
LONG += ("draft_model+lookup/2/2", "dspark+lookup", "p-eagle+lookup/2", "eagle+lookup/2/batch-sharded")
LONG += (
    "draft_model/2/2/batch-sharded",
    "ngram/4/batch-sharded",
    "mtp/2/batch-sharded",
    "dflash/4",
    "dflash2/2",
    "dspark/2/batch-sharded",
)
KINDS = [
    *QUICK,
    *(pytest.param(kind, marks=pytest.mark.nightly) for kind in NIGHTLY),
    *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG),
]


@dataclasses.dataclass
class Subject:
    """An engine, and what becomes of ``REQUESTS`` when each of them is alone on it, or on one like it on one device."""

    engine: Engine
    expected: list[tuple]
    target: Decoder

    def check(self, actives: list[ActiveRequest]):
        assert [outcome_of(active) for active in actives] == self.expected


@pytest.fixture(scope="module", autouse=True)
def _as_requests_and_engines_say():
    with expanded_latents(), chunks_of_states():
        yield


@pytest.fixture(scope="module", params=KINDS)
def subject(request) -> Subject:
    kind = request.param.split("/")[0]
    expected = alone(engine_of(kind), REQUESTS)
    models = {"latents": latents, "hybrid": hybrid, "hybrid_pair": hybrid}
    drafter, _, cached = kind.partition("@")
    model = models.get(drafter, target)()
    return Subject(engine_of(request.param), expected, in_bytes(model, cached) if cached else model)


def test_compared_requests_draft_and_differ(subject):
    tokens, _, _, drafted, accepted = zip(*subject.expected, strict=True)
    assert tokens[4] == plain_greedy(subject.target, PROMPTS)[4][:18]
    assert len(set(map(tuple, tokens))) == len(tokens)
    if subject.engine is not engine_of("none"):
        assert 0 < sum(map(sum, accepted)) < sum(map(sum, drafted))
    others = requests_of(PROMPTS, PARAMS, [key_of(100 + i) for i in range(len(PROMPTS))])
    assert alone(subject.engine, others) != subject.expected


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)])
def test_texts_beside_each_other_are_those_alone(subject, order):
    subject.check(serve(subject.engine, REQUESTS[order])[order])


def test_texts_of_requests_arriving_between_steps(subject):
    subject.check(serve(subject.engine, REQUESTS, at_a_time=1))
    subject.check(serve(subject.engine, REQUESTS, at_a_time=2))


def test_texts_under_preemption_at_every_call(subject):
    before = subject.engine.metrics().num_preemptions
    with preempting(subject.engine):
        actives = serve(subject.engine, REQUESTS)
    subject.check(actives)
    assert subject.engine.metrics().num_preemptions - before > 10
    assert sum(active.num_preemptions > 1 for active in actives) >= 3


def test_texts_with_few_pages(subject):
    """Also requests whose prompt is still being read lose their rows."""
    before = subject.engine.metrics().num_preemptions
    with few_pages(subject.engine, MAX_LEN // P):
        actives = serve(subject.engine, REQUESTS)
    subject.check(actives)
    assert subject.engine.metrics().num_preemptions > before


def test_texts_beside_aborted_neighbours(subject):
    subject.check(serve(subject.engine, REQUESTS, at_a_time=2, neighbour=passing))


def test_texts_with_calls_of_any_length(subject):
    with calls_of_any_length(subject.engine):
        subject.check(serve(subject.engine, REQUESTS))


def test_texts_under_all_disturbances(subject):
    """And once more, when the prompts are in the cache."""
    engine = subject.engine
    engine.scheduler.pages.forget_prefixes()
    for cached in (False, True):
        with calls_of_any_length(engine), preempting(engine):
            actives = serve(engine, REQUESTS, at_a_time=2, neighbour=passing)
        subject.check(actives)
        if cached:
            assert sum(active.num_cached_tokens > 0 for active in actives) >= 2


def check_prefixes(engine: Engine, requests, expected, at_a_time: int | None = 1):
    engine.scheduler.pages.forget_prefixes()
    actives = serve(engine, requests, at_a_time)
    engine.scheduler.pages.forget_prefixes()
    if at_a_time == 1:
        check_found(engine, actives)
    assert sum(active.num_cached_tokens > 0 for active in actives) > len(actives) // 3
    assert [outcome_of(active) for active in actives] == expected


def test_texts_of_cached_prompts(subject):
    """One after another, so that it is known what is found; then beside each other, while the pages are in use."""
    requests = sharing_requests()
    expected = alone(subject.engine, requests)
    check_prefixes(subject.engine, requests, expected)
    check_prefixes(subject.engine, requests, expected, at_a_time=3)
    with preempting(subject.engine):
        check_prefixes(subject.engine, requests, expected, at_a_time=3)


def test_salts_do_not_share_prompts(subject):
    request = Request(0, TEXT, PARAMS[0], key_of(0))
    for salt, found in (("a", 0), ("b", 0), ("a", 12), ("", 0)):
        (active,) = serve(subject.engine, [dataclasses.replace(request, salt=salt)])
        assert active.num_cached_tokens == found


@pytest.mark.long
@pytest.mark.parametrize("kind", ["draft_model", "eagle", "p-eagle", "pard", "dspark"])
@pytest.mark.parametrize(("page", "chunk"), [(2, 3), (4, 8), (1, 1)])
def test_texts_of_cached_prompts_on_another_grid(kind, page, chunk):
    engine = engine_of(kind, dataclasses.replace(CONFIG, page_size=page, prefill_chunk=chunk))
    requests = sharing_requests()
    check_prefixes(engine, requests, alone(engine, requests))


def test_pages_of_the_cache_never_change(subject):
    """Whoever wrote a page, and beside whom, its bits follow from its key alone; and nobody writes to it again."""
    assert not changed_contents(subject.engine, sharing_requests(max_tokens=2))
