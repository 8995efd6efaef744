"""Prefill batches: chunks on a grid, in programs that they fill, or waiting for others."""

import dataclasses
import random

import numpy as np
import pytest
from simulated_device import Habits
from simulated_engine import Simulation

from jspec.config import EngineConfig
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.scheduler.prefill_batching import MOST_CALLS_WAITED, choose_prefill_batch, chunks_of
from jspec.sampling.params import SamplingParams

# PrefillInputs of 32 tokens: up to 16 in a pass, and no less; or 2, 4, 8, .. or 64.
REPRODUCIBLE = EngineConfig(max_batch=64, max_len=1024)
FAST = EngineConfig(max_batch=64, max_len=1024, reproducible=False, prefill_tokens=2048)


def prefilling(*num_to_prefill: int, num_prefilled: int = 0) -> list[ActiveRequest]:
    """Requests of whose prompts so many tokens are to be read."""
    params, key = SamplingParams(max_tokens=1), np.zeros(2, np.uint32)
    return [
        ActiveRequest(Request(order, [1] * (number + 1), params, key), order, num_prefilled=num_prefilled)
        for order, number in enumerate(num_to_prefill)
    ]


def places(chunks) -> list[tuple[int, int, int]]:
    return [(active.order, start, count) for active, start, count in chunks]


@pytest.mark.parametrize(
    ("num_prefilled", "expected"),
    [
        (0, [(0, 0, 8), (0, 8, 8), (0, 16, 3)]),
        (8, [(0, 8, 8), (0, 16, 3)]),
        (11, [(0, 11, 5), (0, 16, 3)]),  # up to the next multiple
        (16, [(0, 16, 3)]),
        (19, []),
    ],
)
def test_chunks_end_at_multiples_of_their_size(num_prefilled, expected):
    config = EngineConfig(prefill_chunk=8, page_size=8)
    assert places(chunks_of(prefilling(19, num_prefilled=num_prefilled)[0], config)) == expected


@pytest.mark.parametrize(("num_prefilled", "ends"), [(0, [8, 16]), (8, [16]), (16, [24, 32]), (32, [40]), (40, [48])])
def test_chunks_of_a_batch_end_with_the_next_snapshot(num_prefilled, ends):
    """They lie behind 16 and 32 tokens, and behind the last whole page that others may share, of 40."""
    config = EngineConfig(prefill_chunk=8, page_size=8, snapshot_every=16)
    chunks = chunks_of(prefilling(48, num_prefilled=num_prefilled)[0], config)
    assert [start + length for _, start, length in chunks] == ends


@pytest.mark.parametrize(("num_held", "chunks"), [(0, 16), (3, 64)])
def test_held_prompts_count_as_prefilling(num_held, chunks):
    """One long prompt beside a dozen texts is read in small passes, but not if others wait for it."""
    assert len(choose_prefill_batch(prefilling(4000), 12, 0, FAST, num_held)) == chunks


class TestExpandedLatents:
    """Texts of a pass have room for the pages of one text of any length, and of what the pass itself reads."""

    config = dataclasses.replace(FAST, max_len=4096, prefill_chunk=128, expand_latents=True)  # room for 64 and 32 pages

    @pytest.mark.parametrize(
        ("num_prefilled", "to_read", "expected"),
        [
            (0, (2000, 500), 16),  # nothing was read before: a full pass
            (2048, (4000, 4000), 16),
            (2048, (2200, 2200, 2200, 2200), 4),  # 35 pages each, two chunks: there is room for 72
            (1408, (1536,) * 6, 3),  # 24 pages each, and room for 72
            (3968, (4000, 4000), 1),  # 63 pages each
        ],
    )
    def test_batch_fills_the_room_for_pages(self, num_prefilled, to_read, expected):
        chosen = choose_prefill_batch(prefilling(*to_read, num_prefilled=num_prefilled), 0, 0, self.config)
        assert len(chosen) == expected
        everything = choose_prefill_batch(
            prefilling(*to_read, num_prefilled=num_prefilled),
            0,
            0,
            dataclasses.replace(self.config, expand_latents=False),
        )
        assert places(chosen) == places(everything)[:expected]

    def test_passes_for_log_probabilities_too(self):
        prompts = prefilling(4000, 4000, num_prefilled=3968)
        for active in prompts:
            object.__setattr__(active.request.params, "prompt_logprobs", 0)
        assert len(choose_prefill_batch(prompts, 0, 0, self.config)) == 1

    def test_everything_is_read_in_the_end(self):
        prompts = prefilling(*[4000] * 5, *[100] * 20, num_prefilled=0)
        for _ in range(200):
            chunks = choose_prefill_batch(
                [one for one in prompts if one.num_prefilled < one.num_to_prefill], 3, 0, self.config
            )
            ends = {}
            for active, start, count in chunks:
                active.num_prefilled = ends[active.order] = start + count
            n = next((n for n in self.config.chunk_buckets if n >= len(chunks)), 0)
            assert sum(-(-end // 64) for end in ends.values()) <= (self.config.pages_of_prefill(n) or 0)
        assert all(one.num_prefilled == one.num_to_prefill for one in prompts)


def test_chunks_of_several_prompts_share_a_batch_in_order():
    chosen = choose_prefill_batch(prefilling(40, 0, 32, 500), 0, 0, REPRODUCIBLE)
    assert places(chosen[:4]) == [(0, 0, 32), (0, 32, 8), (2, 0, 32), (3, 0, 32)]
    assert len(chosen) == 16


def test_no_chunk_waits_while_nothing_decodes():
    assert len(choose_prefill_batch(prefilling(10), 0, 0, FAST)) == 1
    assert len(choose_prefill_batch(prefilling(10), 0, 0, REPRODUCIBLE)) == 1
    assert choose_prefill_batch(prefilling(0), 0, 0, FAST) == []


@pytest.mark.parametrize(
    ("config", "chunks", "sent"),
    [
        (FAST, 1, 0),  # half of the smallest program
        (FAST, 2, 2),
        (FAST, 3, 2),  # one of them waits for another
        (FAST, 7, 7),
        (FAST, 13, 8),
        (FAST, 14, 14),
        (REPRODUCIBLE, 13, 0),
        (REPRODUCIBLE, 14, 14),
    ],
)
def test_batch_fills_its_program_while_others_decode(config, chunks, sent):
    prompts = prefilling(32 * chunks)
    assert len(choose_prefill_batch(prompts, 4, 0, config)) == sent
    assert len(choose_prefill_batch(prompts, 4, MOST_CALLS_WAITED - 1, config)) == sent
    assert len(choose_prefill_batch(prompts, 4, MOST_CALLS_WAITED, config)) == (
        sent or chunks
    )  # the few wait no longer


def test_rounds_wait_for_few_tokens_while_most_requests_decode():
    prompts = prefilling(*[960] * 3)
    assert len(choose_prefill_batch(prompts, 11, 0, FAST)) == 64  # 2,048 tokens: many prompts for so few texts
    assert len(choose_prefill_batch(prompts, 12, 0, FAST)) == 16  # 512
    assert len(choose_prefill_batch(prefilling(*[960] * 4), 60, 0, FAST)) == 64  # many prompts
    long = EngineConfig(max_batch=64, max_len=1024, prefill_tokens=1024)
    assert len(choose_prefill_batch(prompts, 12, 0, long)) == 32  # there is no smaller program


def test_nothing_is_read_by_halves_while_all_rows_decode():
    few, many, long = prefilling(*[320] * 2), prefilling(*[320] * 6), prefilling(960)
    assert choose_prefill_batch(few, 69, 9, FAST) == []  # five are read ahead
    assert len(choose_prefill_batch(many, 69, 0, FAST)) == 60  # enough for a program of 64
    assert len(choose_prefill_batch(few, 68, 0, FAST)) == 16  # few are read ahead, and no program is filled
    assert len(choose_prefill_batch(long, 69, 0, FAST)) == 16  # a long prompt goes on, 512 tokens at a time


@pytest.mark.parametrize(("reproducible", "most_padding"), [(False, 0.1), (True, 0.11)])
def test_a_queue_of_requests(reproducible, most_padding):
    """512 requests over 64 rows, 2.77 tokens a round: passes have little padding, and rounds have nearly every row."""
    rng = random.Random(5)
    queue = [(rng.randrange(128, 386), rng.randrange(64, 449)) for _ in range(512)]
    config = EngineConfig(max_batch=64, max_len=1024, reproducible=reproducible)
    played = Simulation(config, 4, rng=random.Random(1), habits=Habits(accept=0.7, stop=0.0), checks_contents=False)
    for length, max_tokens in queue:
        played.arrive([rng.randrange(1, 3) for _ in range(length)], max_tokens)
    rows = rounds = 0
    while played.scheduler.waiting:
        schedule = played.step()
        rows, rounds = (
            rows + len(schedule.decoding) * schedule.rounds,
            rounds + schedule.rounds * bool(schedule.decoding),
        )
    crowd = rows / rounds
    while played.scheduler.unfinished:
        played.step()

    scheduler = played.scheduler
    assert scheduler.prefill_queue.num_prefill_tokens == sum(length - 1 for length, _ in queue)
    assert scheduler.prefill_queue.num_padding < most_padding * (
        scheduler.prefill_queue.num_padding + scheduler.prefill_queue.num_prefill_tokens
    )
    assert crowd > 63
    num_rounds = sum(len(active.accepted) for active in played.all)
    assert 2.7 < sum(len(active.tokens) for active in played.all) / num_rounds < 2.85
