"""Faults, each of which makes one of the checks of ``test_equality.py`` fail."""

import contextlib
import dataclasses

import jax.numpy as jnp
import pytest
from disturbances import attribute, few_pages, outcome_of, preempting, serve
from engines import MAX_LEN
from requests_and_engines import CONFIG, REQUESTS, K, P, alone, chunks_of_states, engine_of, expanded_latents
from shared_prefixes import changed_contents, check_found, sharing_requests

from jspec.config import NULL_PAGE
from jspec.engine.engine import Engine
from jspec.engine.runner.step import DecodeStep
from jspec.engine.scheduler.prefix_cache import PrefixIndex
from jspec.pallas.mla.prefill import up_projected_attention_reference


@pytest.fixture(scope="module", autouse=True)
def _as_requests_and_engines_say():
    with expanded_latents(), chunks_of_states():
        yield


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
