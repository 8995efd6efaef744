"""Prefix-cache hits of prompts in the scheduler, and which request prefills the rest."""

import dataclasses
import math

import pytest
from engines import requests_of
from requests_and_engines import CONFIG
from shared_prefixes import TEXT, cached_tokens, sharing
from small_engine import NOTHING, K, finish, prompt, simulation

from jspec.engine.request import FULL, LIVE, ActiveRequest
from jspec.engine.scheduler.scheduler import Scheduler


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("page", "chunk"), [(4, 4), (1, 1), (2, 4), (4, 2), (2, 3), (4, 6), (3, 1), (16, 4)])
def test_cached_tokens_of_a_prompt(page, chunk, ahead):
    config = dataclasses.replace(CONFIG, page_size=page, prefill_chunk=chunk, max_len=48, num_pages=200)
    scheduler, prompts, found = Scheduler(config, 4, ahead), sharing(TEXT), []
    for order, request in enumerate(requests_of(prompts)):
        scheduler.add(active := ActiveRequest(request, order))
        while not active.decoding:
            scheduler.dispatched(scheduler.schedule())
        found.append(active.num_cached_tokens)
        scheduler.remove(active)
    assert found == cached_tokens(prompts, page, chunk, ahead)
    assert len(set(found)) > 1 or page > 12


class TestPrefixes:
    @pytest.mark.parametrize(("salt", "found"), [("", 20), ("a", 0)])
    def test_prompt_with_a_cached_prefix_skips_it(self, salt, found):
        played = simulation()
        played.arrive(prompt(25), 3)
        played.step()
        second, chunks = played.arrive([*prompt(22), 2, 2], 3, salt=salt), []
        while not second.decoding:
            chunks += played.step().chunks
        assert second.num_cached_tokens == played.scheduler.prefill_queue.num_cached_tokens == chunks[0].start == found
        finish(played)

    def test_at_least_one_token_is_prefilled(self):
        played = simulation()
        played.arrive(prompt(21), 3)
        finish(played)
        again = played.arrive(prompt(21), 3)
        played.step()
        assert again.num_cached_tokens == 10  # 20 of its 21 tokens are read, and one of them again

    @pytest.mark.parametrize("looks_ahead", [False, True])
    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"reproducible": False},
            {"prefill_tokens": 20_000},  # a pass that has room for all of them
            {"max_batch": 4},  # of which four wait for a row
            {"page_size": 16, "prefill_chunk": 64},
            {"page_size": 64, "prefill_chunk": 48},
        ],
    )
    def test_shared_prefix_of_concurrent_prompts_is_prefilled_once(self, fields, looks_ahead):
        roomy = {
            "max_batch": 8,
            "max_len": 2300,
            "page_size": 64,
            "num_pages": 320,
            "prefill_chunk": 32,
            "swap_pages": 999,
        }
        played = simulation(looks_ahead=looks_ahead, **{**roomy, **fields})
        shared = [1 + i % 7 for i in range(2000)]
        for i in range(8):
            played.arrive([*shared, 50 + i, *range(60, 75)], 8)
        finish(played)
        step = math.lcm(played.config.page_size, played.config.chunk)
        assert played.scheduler.prefill_queue.num_prefill_tokens < 2000 + 8 * (15 + step)
        assert played.all[0].num_cached_tokens == 0
        found = {active.num_cached_tokens for active in played.all[1:]}
        assert found == {2000 // step * step}

    def test_pages_of_a_prompt_are_found_during_its_prefill(self):
        played = simulation(max_batch=1, num_pages=12, prefill_tokens=10, max_len=60, read_ahead=1)
        first = played.arrive(prompt(45), 3)
        played.step()
        assert (first.num_prefilled, first.decoding) == (10, False)
        second = played.arrive([*prompt(15), 2, 2], 3)
        played.step()
        assert second.num_cached_tokens == 10
        finish(played)

    @pytest.mark.parametrize("salt", ["", "a"])
    def test_waiting_prompt_continues_when_the_prefilling_one_is_aborted(self, salt):
        """From the place to which it was read; the device checks what is read."""
        played = simulation(num_pages=20, prefill_tokens=10, max_len=60)
        first, second = played.arrive(prompt(45), 3), played.arrive(prompt(45), 3, salt=salt)
        for _ in range(2):
            played.step()
        assert (first.num_prefilled, second.num_prefilled) == (20, 0 if salt else 10)
        played.abort(first)
        assert played.scheduler.pages.cached == (2 if salt else 1)  # the second holds the other one
        played.step()
        assert (second.num_cached_tokens, second.num_prefilled) == ((0, 10) if salt else (20, 30))
        finish(played)

    def test_no_prompt_waits_for_another_text_or_a_few_tokens(self):
        played = simulation(max_batch=4, num_pages=40, prefill_tokens=60, max_len=60)  # 30 tokens are worth waiting
        first, other, same, short = [
            played.arrive(text, 3) for text in (prompt(42), prompt(42, 2), prompt(42), [*prompt(20), 3])
        ]
        schedule = played.step()
        read = {active: sum(one.length for one in schedule.chunks if one.active is active) for active in played.all}
        assert read == {first: 41, other: 15, same: 0, short: 0}
        assert same.num_prefilled == 0
        schedule = played.step()
        assert (same.num_cached_tokens, short.num_cached_tokens) == (40, 10)
        finish(played)

    def test_request_preempted_during_prefill_finds_its_pages(self):
        played = simulation(swap_pages=8, num_pages=5, prefill_tokens=5)
        played.arrive(prompt(4, 2), 34)
        played.step()
        young = played.arrive(prompt(23), 15)
        starts = []
        while not young.decoding:
            starts += [(young.num_preemptions, chunk.start) for chunk in played.step().chunks]
        # The second of its two full pages was given to the one that made it leave.
        assert starts == [(0, 0), (0, 5), (0, 10), (0, 15), (1, 10), (1, 15), (1, 20)]
        assert young.num_cached_tokens == 10
        finish(played)

    @pytest.mark.parametrize(("reproducible", "found"), [(True, 0), (False, 20)])
    def test_decoded_texts_are_cached_unless_reproducible(self, reproducible, found):
        played = simulation(reproducible=reproducible)
        first = played.arrive(prompt(5), 26)
        finish(played)
        second = played.arrive([*first.request.prompt, *first.tokens], 3)
        played.step()
        assert second.num_cached_tokens == found
        finish(played)

    def test_pages_of_plain_rounds_are_not_cached_for_the_drafter(self):
        """A row that ends in a call without drafts does not let its drafter catch up."""
        played = simulation(NOTHING, chooses=True, reproducible=False, rounds=20, page_size=2, num_pages=40)
        first = played.arrive(prompt(5), 12)
        for drafts in (K, 0, 0):
            played.execute(played.scheduler.schedule(), drafts)
        assert first.outcome == FULL
        second = played.arrive([*first.request.prompt, *first.tokens, 1, 1], 3)
        finish(played)  # the device checks what is read
        assert second.outcome != LIVE
