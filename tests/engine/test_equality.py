"""Nothing around a request changes it: its tokens and its drafts are those of the request alone on the same engine.

The last tests inject faults, each of which makes one of the checks before them fail.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disturbances import attribute, calls_of_any_length, few_pages, outcome_of, preempting, serve
from engines import MAX_LEN, hybrid, in_bytes, key_of, latents, plain_greedy, requests_of, target
from requests_and_engines import CONFIG, PARAMS, PROMPTS, REQUESTS, K, P, alone, chunks_of_states, engine_of, passing
from shared_prefixes import TEXT, cached_tokens, sharing

from jspec.config import NULL_PAGE
from jspec.engine.engine import Engine
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.runner.saved import pools
from jspec.engine.runner.step import DecodeStep
from jspec.engine.scheduler.prefix_cache import PrefixIndex
from jspec.models import Decoder
from jspec.models.kv_cache import PagedView
from jspec.pallas.mla.prefill import up_projected_attention_reference
from jspec.sampling.params import SamplingParams

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
def _latents_expand_on_any_platform():
    """Where they may: elsewhere that depends on the GPU and on sizes that its kernels know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedView, "up_projects", lambda view, q, kv, maps: view.may_up_project)
        patch.setattr("jspec.models.kv_cache.up_projected_attention", up_projected_attention_reference)
        yield


@pytest.fixture(scope="module", autouse=True)
def _chunks_of_states():
    with chunks_of_states():
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
    assert sum(active.num_preemptions > 1 for active in actives) >= 4


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


def check_found(engine: Engine, actives: list[ActiveRequest]):
    """They came one after another, and no page was evicted meanwhile."""
    prompts = [list(active.request.prompt) for active in actives]
    config = engine.config
    found = cached_tokens(prompts, config.page_size, config.chunk, engine.runner.looks_ahead, config.snapshot_every)
    assert [active.num_cached_tokens for active in actives] == found


def check_prefixes(engine: Engine, requests, expected, at_a_time: int | None = 1):
    engine.scheduler.pages.forget_prefixes()
    actives = serve(engine, requests, at_a_time)
    engine.scheduler.pages.forget_prefixes()
    if at_a_time == 1:
        check_found(engine, actives)
    assert sum(active.num_cached_tokens > 0 for active in actives) > len(actives) // 3
    assert [outcome_of(active) for active in actives] == expected


def sharing_requests(max_tokens: int = 8) -> list[Request]:
    params = [SamplingParams(temperature=t, max_tokens=max_tokens) for t in (1.0, 0.7, 1.4)]
    prompts = sharing(TEXT)
    return requests_of(prompts, [params[i % 3] for i in range(len(prompts))])


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


class Contents:
    """What every page of the prefix cache has ever held, by its key, and the keys that have stood for different bits."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._seen: dict[bytes, list[bytes]] = {}
        self.changed: set[bytes] = set()
        self.looks = 0

    def look(self):
        state, index = self._engine.runner.batch.state, self._engine.scheduler.pages._index
        arrays = [np.asarray(pool) for pool in jax.tree.leaves(pools((state.cache, state.draft)))]
        for key, page in index._pages.items():
            bits = [pool[:, page].tobytes() for pool in arrays]
            if self._seen.setdefault(key, bits) != bits:
                self.changed.add(key)
            self.looks += 1


def changed_contents(engine: Engine, requests) -> set[bytes]:
    """Pages of the cache that have changed, or that somebody else wrote otherwise, by their keys."""
    contents = Contents(engine)
    for at_a_time in (3, 1):
        engine.scheduler.pages.forget_prefixes()
        order = np.random.default_rng(at_a_time).permutation(len(requests))
        with preempting(engine):
            serve(engine, [requests[i] for i in order], at_a_time, after_step=contents.look)
    engine.scheduler.pages.forget_prefixes()
    assert contents.looks > 100
    return contents.changed


def test_pages_of_the_cache_never_change(subject):
    """Whoever wrote a page, and beside whom, its bits follow from its key alone; and nobody writes to it again."""
    assert not changed_contents(subject.engine, sharing_requests(max_tokens=2))


# Faults that the checks above have to see.


def outcomes_with_hits(engine: Engine, requests) -> list[tuple]:
    engine.scheduler.pages.forget_prefixes()
    outcomes = [outcome_of(active) for active in serve(engine, requests, at_a_time=1)]
    engine.scheduler.pages.forget_prefixes()
    return outcomes


@contextlib.contextmanager
def one_slot_more(engine: Engine):
    """Share pages whose last slot is two before the end of a prompt, where rounds still write."""
    pages = engine.scheduler.pages
    match, register = pages.match, pages.register
    with (
        attribute(pages, "match", lambda tokens, slots, *rest: match(tokens, slots + 1, *rest)),
        attribute(pages, "register", lambda tokens, held, slots, *rest: register(tokens, held, slots + 1, *rest)),
    ):
        yield


@pytest.mark.parametrize("kind", ["draft_model", "eagle", "p-eagle"])
def test_off_by_one_prefix_hit_is_detected(kind):
    """A head finds no feature to begin with, and its drafts tell. A draft model writes the same token again into a page
    that others read; where that gives the same bits, as on a CPU, it is the number of tokens found that tells."""
    engine, requests = engine_of(kind), sharing_requests()
    expected = alone(engine, requests)
    with one_slot_more(engine):
        actives = serve(engine, requests, at_a_time=1)
    engine.scheduler.pages.forget_prefixes()
    with pytest.raises(AssertionError):
        check_found(engine, actives)
    if kind != "draft_model":
        assert [outcome_of(active) for active in actives] != expected


@pytest.mark.parametrize("kind", ["eagle", "p-eagle"])
def test_prefix_hit_that_ignores_the_next_token_is_detected(kind):
    """Slot i of such a head depends on token i + 1; drafts of a head that normalises its tokens depend much on it."""
    engine, requests = engine_of(kind), sharing_requests()
    expected = alone(engine, requests)
    with attribute(engine.scheduler.pages, "_looks_ahead", False):
        outcomes, changed = outcomes_with_hits(engine, requests), changed_contents(engine, requests)
    engine.scheduler.pages.forget_prefixes()
    assert changed
    assert kind == "eagle" or outcomes != expected


@pytest.mark.parametrize("kind", ["draft_model", "eagle"])
def test_page_keys_without_the_prefix_are_detected(kind, monkeypatch):
    """Without the text before a page, or the salt, in its key."""

    def keys(self, tokens, first, last, previous):
        for page in range(first, last):
            yield bytes(tokens[page * P : page * P + P + self._ahead])

    engine, requests = engine_of(kind), sharing_requests()
    expected = alone(engine, requests)
    monkeypatch.setattr(PrefixIndex, "_keys", keys)
    assert outcomes_with_hits(engine, requests) != expected


@pytest.mark.parametrize(
    ("kind", "fault"), [("draft_model", "pages"), ("eagle", "pages"), ("eagle", "features"), ("eagle", "previous")]
)
def test_wrong_restore_is_detected(kind, fault):
    engine = engine_of(kind)
    expected, swap_in = alone(engine, REQUESTS), engine.runner._swaps.swap_in

    def swap_in_wrongly(move):
        if fault == "pages":
            return swap_in(move._replace(pages=move.pages[::-1]))
        for block in move.active.saved:
            row = block.saved.row
            block.saved = dataclasses.replace(block.saved, row=row | {fault: jnp.zeros_like(row[fault])})
        return swap_in(move)

    with preempting(engine):
        assert [outcome_of(active) for active in serve(engine, REQUESTS)] == expected
        with attribute(engine.runner._swaps, "swap_in", swap_in_wrongly):
            assert [outcome_of(active) for active in serve(engine, REQUESTS)] != expected


@pytest.mark.nightly
def test_expanded_values_of_another_head_are_detected(monkeypatch):
    def wrongly(q, pool, table, positions, valid, maps, scores):
        maps = maps._replace(values=jnp.roll(maps.values, 1, axis=0))
        return up_projected_attention_reference(q, pool, table, positions, valid, maps, scores)

    config = dataclasses.replace(CONFIG, prefill_chunk=2 * P)  # a trace of its own
    expected = alone(engine_of("latents", config), REQUESTS)
    monkeypatch.setattr("jspec.models.kv_cache.up_projected_attention", wrongly)
    assert alone(engine_of("latents/expanded", config), REQUESTS) != expected


def test_a_round_beyond_the_pages_is_detected():
    """Writes behind the last page of a row are dropped, and whoever needs them finds nothing."""
    engine = engine_of("draft_model")
    expected, scheduler = alone(engine, REQUESTS), engine.scheduler

    def too_few(active, rounds):
        return scheduler.pages.pages(active.length + rounds)

    with attribute(scheduler.requirements, "pages_for", too_few):
        assert [outcome_of(active) for active in serve(engine, REQUESTS)] != expected


@pytest.mark.nightly
def test_a_block_beyond_the_pages_is_detected():
    """The slots of a block that reach farther than drafts do need pages, too, since all of them are seen."""
    engine = engine_of("dflash-wide")
    expected, needs = alone(engine, REQUESTS), engine.scheduler.requirements
    with attribute(needs, "_ahead", K):
        assert [outcome_of(active) for active in serve(engine, REQUESTS)] != expected


@pytest.mark.nightly
def test_fewer_drafts_for_lack_of_pages_are_detected(monkeypatch):
    """The text stays lossless, but a seed would depend on who else holds pages."""
    propose = DecodeStep._propose

    def propose_within_pages(self, state, *others):
        slots = P * jnp.sum(state.request.table != NULL_PAGE, axis=1)
        room = jnp.clip(slots - state.request.length, 0, K)
        drafter = dataclasses.replace(self.drafter)

        def narrow(draft, context):
            return self.drafter.propose(draft, dataclasses.replace(context, room=jnp.minimum(context.room, room)))

        object.__setattr__(drafter, "propose", narrow)
        return propose(dataclasses.replace(self, drafter=drafter), state, *others)

    monkeypatch.setattr(DecodeStep, "_propose", propose_within_pages)
    engine = engine_of("draft_model", dataclasses.replace(CONFIG, rounds=3))
    expected, scheduler = alone(engine, REQUESTS), engine.scheduler
    assert [outcome_of(active) for active in serve(engine, REQUESTS)] == expected
    pages_for = scheduler.requirements.pages_for

    def fewer_when_short(active, rounds):
        return pages_for(active, rounds) - (scheduler.pages.available < 2)

    with attribute(scheduler.requirements, "pages_for", fewer_when_short), few_pages(engine, MAX_LEN // P):
        outcomes = [outcome_of(active) for active in serve(engine, REQUESTS)]
    drafted = [[outcome[3] for outcome in some] for some in (outcomes, expected)]
    assert drafted[0] != drafted[1]
