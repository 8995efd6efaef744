"""Who waits, who is read, who decodes, who is preempted, and with which pages; on a machine that need not have JAX."""

import math
import subprocess
import sys

import numpy as np
import pytest
from simulated_device import Habits
from simulated_engine import Simulation

from jspec.config import EngineConfig
from jspec.engine.request import FULL, LIVE, Request
from jspec.engine.scheduler import Scheduler
from jspec.results import DRAFT
from jspec.sampling.params import SamplingParams

K = 2
ALL, NOTHING = Habits(accept=1.0, stop=0.0), Habits(accept=0.0, stop=0.0)  # a round commits K + 1 tokens, or one


def simulation(
    habits: Habits = ALL, swap_pages: int = 0, looks_ahead: bool = False, chooses: bool = False, **fields
) -> Simulation:
    settings = {
        "max_batch": 2,
        "max_len": 40,
        "page_size": 10,
        "num_pages": 6,
        "prefill_chunk": 5,
        "rounds": 4,
        **fields,
    }
    return Simulation(EngineConfig(**settings), K, looks_ahead, swap_pages, habits=habits, chooses=chooses)


def prompt(length: int = 5, first: int = 1) -> list[int]:
    return [first, *[1] * (length - 1)]


def orders(actives) -> list[int | None]:
    return [None if active is None else active.order for active in actives]


def finish(played: Simulation):
    for _ in range(200):
        if played.scheduler.unfinished:
            played.step()
    assert not played.scheduler.unfinished
    assert played.scheduler.pages.used == played.scheduler.pages_swapped == 0


def test_it_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None; from jspec.engine.scheduler import Scheduler; print(Scheduler.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Scheduler\n"


class TestEntering:
    def test_a_prompt_is_read_and_decoded_in_one_plan(self):
        played = simulation()
        active = played.arrive(prompt(12), 20)
        plan = played.step()
        assert [segment[1:] for segment in plan.segments] == [(0, 5), (5, 5), (10, 1)]  # all but the last token
        assert (plan.entering, plan.decoding, plan.rounds) == ([active], [active], 1)
        assert len(active.pages) == 2  # 12 tokens, a round of K + 1, and K drafts
        assert played.step().rounds == 4

    def test_a_prompt_of_one_token_has_nothing_to_read(self):
        played = simulation()
        active = played.arrive([1], 3)
        plan = played.step()
        assert (plan.segments, plan.entering, plan.decoding) == ([], [active], [active])

    def test_first_come_first_served_within_a_priority(self):
        played = simulation(max_batch=1)
        for priority in (1, 0, 0, -1):
            played.arrive(prompt(), 1, priority)
        entered = []
        while played.scheduler.unfinished:
            entered += orders(played.step().entering)
        assert entered == [3, 1, 2, 0]

    def test_a_request_that_needs_many_pages_is_not_overtaken(self):
        played = simulation(num_pages=5)
        for length, most in ((10, 12), (20, 18), (1, 1)):  # 3, 4 and 1 pages at their longest
            played.arrive(prompt(length), most)
        played.step()
        assert orders(played.scheduler.rows) == [0, None]
        entered = []
        while played.scheduler.unfinished:
            entered += orders(played.step().entering)
        assert entered == [1, 2]

    def test_more_prompts_read_than_texts_decoded_are_read_first(self):
        played = simulation(max_batch=8, num_pages=None, prefill_tokens=10)
        for _ in range(8):
            played.arrive(prompt(11), 3)
        plans = [played.step() for _ in range(4)]
        assert [len(plan.segments) for plan in plans] == [2, 2, 2, 2]
        assert [bool(plan.decoding) for plan in plans] == [False, False, False, True]

    def test_nobody_who_can_never_enter(self):
        played = simulation(num_pages=2)
        unchecked = simulation(num_pages=4).arrive(prompt(20), 20)
        played.scheduler.add(unchecked)
        with pytest.raises(RuntimeError, match="1 requests wait, nobody is under way and nobody can enter; 2 pages"):
            played.step()


class TestRounds:
    def test_few_while_somebody_waits(self):
        played = simulation(NOTHING, max_batch=1)
        played.arrive(prompt(), 20)
        played.arrive(prompt(), 1)
        assert [played.step().rounds for _ in range(3)] == [1, 2, 2]

    def test_many_while_nobody_does(self):
        played = simulation(NOTHING)
        played.arrive(prompt(), 20)
        assert [played.step().rounds for _ in range(3)] == [1, 4, 4]

    def test_one_with_somebody_who_enters(self):
        played = simulation(NOTHING)
        played.arrive(prompt(), 20)
        played.step()
        played.step()
        late = played.arrive([1], 3)
        plan = played.step()
        assert (plan.entering, plan.rounds, len(plan.decoding)) == ([late], 1, 2)


class TestLeaving:
    def test_the_row_of_one_who_ends_for_sure_is_given_on_at_once(self):
        played = simulation(max_batch=1)
        first, second = played.arrive(prompt(), 1), played.arrive(prompt(), 1)
        played.step()
        assert first.outcome == LIVE  # as far as the host knows
        plan = played.step()
        assert (plan.entering, second.row, played.scheduler.ending) == ([second], 0, [])
        assert (first.row, first.pages) == (None, [])  # its last call was read meanwhile

    def test_its_pages_are_kept_until_the_host_knows_its_end(self):
        played = simulation(max_batch=1)
        first = played.arrive(prompt(), 1)
        played.step()
        played.scheduler.plan()
        assert (played.scheduler.ending, played.scheduler.rows) == ([first], [None])
        assert played.scheduler.pages.used == len(first.pages) > 0
        assert played.scheduler.under_way == [first]

    @pytest.mark.parametrize("plans", range(6))
    def test_wherever_it_is(self, plans):
        played = simulation(NOTHING, swap_pages=6, num_pages=4, prefill_tokens=5, max_batch=3)
        for _ in range(4):
            played.arrive(prompt(9), 12)
        for _ in range(plans):
            played.step()
        for active in played.all:
            played.abort(active)
        assert not played.scheduler.unfinished
        assert played.scheduler.pages.used == played.scheduler.pages_swapped == 0

    def test_one_in_host_memory(self):
        played, young = preempted()
        assert played.scheduler.pages_swapped == young.num_saved_pages > 0
        played.abort(young)
        assert (played.scheduler.swapped, played.scheduler.pages_swapped, young.saved) == ([], 0, None)


def preempted(**fields):
    """Two requests that grow until the younger one is in host memory."""
    played = simulation(NOTHING, swap_pages=8, num_pages=5, **fields)
    _, young = played.arrive(prompt(9), 30), played.arrive(prompt(9), 30)
    while not played.scheduler.swapped:
        assert played.scheduler.unfinished
        played.step()
    return played, young


class TestPreemption:
    def test_one_who_decodes_goes_to_host_memory_and_comes_back(self):
        played, young = preempted()
        assert played.scheduler.swapped == [young]
        assert (young.row, young.pages, young.num_preemptions) == (None, [], 1)
        third, returned = played.arrive([1], 1), []
        while not third.decoding:
            returned += [move.active for move in played.step().returning]
        assert set(returned) == {young}  # before anybody else enters
        finish(played)
        assert [len(active.tokens) for active in played.all] == [30, 30, 1]
        assert played.scheduler.num_preemptions == sum(active.num_preemptions for active in played.all) >= 1

    def test_one_who_is_read_begins_anew(self):
        played = simulation(ALL, swap_pages=8, num_pages=5, prefill_tokens=5, prefix_cache=False)
        played.arrive(prompt(4), 34)
        played.step()
        young = played.arrive(prompt(23), 15)
        plans = []
        while not young.decoding:
            plans.append(played.step())
        starts = [segment.start for plan in plans for segment in plan.segments]
        assert young.num_preemptions >= 1
        assert starts.count(0) == 1 + young.num_preemptions
        assert not any(plan.leaving for plan in plans)
        finish(played)

    def test_nobody_enters_who_could_bring_a_standstill(self):
        for swap_pages, entered in ((0, [0, None]), (6, [0, None]), (7, [0, 1])):
            played = simulation(NOTHING, swap_pages=swap_pages, num_pages=5)
            for _ in range(
                2
            ):  # 4 pages each at their longest, of which one request may not fit into host memory any more
                played.arrive(prompt(9), 30)
            played.step()
            assert orders(played.scheduler.rows) == entered
            finish(played)
            assert (played.scheduler.num_preemptions > 0) == (entered == [0, 1])


class TestPrefixes:
    @pytest.mark.parametrize(("salt", "found"), [("", 20), ("a", 0)])
    def test_a_prompt_that_begins_as_an_earlier_one(self, salt, found):
        played = simulation()
        played.arrive(prompt(25), 3)
        played.step()
        second, segments = played.arrive([*prompt(22), 2, 2], 3, salt=salt), []
        while not second.decoding:
            segments += played.step().segments
        assert second.num_cached_tokens == played.scheduler.reading.num_cached_tokens == segments[0].start == found
        finish(played)

    def test_one_token_is_read_at_least(self):
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
    def test_what_prompts_share_that_come_together_is_read_once(self, fields, looks_ahead):
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
        assert played.scheduler.reading.num_prefill_tokens < 2000 + 8 * (15 + step)
        assert played.all[0].num_cached_tokens == 0
        found = {active.num_cached_tokens for active in played.all[1:]}
        assert found == {2000 // step * step}

    def test_the_pages_of_a_prompt_are_found_while_the_rest_of_it_is_read(self):
        played = simulation(max_batch=1, num_pages=12, prefill_tokens=10, max_len=60, read_ahead=1)
        first = played.arrive(prompt(45), 3)
        played.step()
        assert (first.num_read, first.decoding) == (10, False)
        second = played.arrive([*prompt(15), 2, 2], 3)
        played.step()
        assert second.num_cached_tokens == 10
        finish(played)

    @pytest.mark.parametrize("salt", ["", "a"])
    def test_who_waits_for_a_text_goes_on_alone_when_its_reader_leaves(self, salt):
        """From the place to which it was read; the device checks what is read."""
        played = simulation(num_pages=20, prefill_tokens=10, max_len=60)
        first, second = played.arrive(prompt(45), 3), played.arrive(prompt(45), 3, salt=salt)
        for _ in range(2):
            played.step()
        assert (first.num_read, second.num_read) == (20, 0 if salt else 10)
        played.abort(first)
        assert played.scheduler.pages.cached == (2 if salt else 1)  # the second holds the other one
        played.step()
        assert (second.num_cached_tokens, second.num_read) == ((0, 10) if salt else (20, 30))
        finish(played)

    def test_nobody_waits_for_another_text_or_for_a_few_tokens(self):
        played = simulation(max_batch=4, num_pages=40, prefill_tokens=60, max_len=60)  # 30 tokens are worth waiting
        first, other, same, short = [
            played.arrive(text, 3) for text in (prompt(42), prompt(42, 2), prompt(42), [*prompt(20), 3])
        ]
        plan = played.step()
        read = {active: sum(one.length for one in plan.segments if one.active is active) for active in played.all}
        assert read == {first: 41, other: 15, same: 0, short: 0}
        assert same.num_read == 0
        plan = played.step()
        assert (same.num_cached_tokens, short.num_cached_tokens) == (40, 10)
        finish(played)

    def test_who_is_preempted_while_it_is_read_finds_what_it_had_read(self):
        played = simulation(swap_pages=8, num_pages=5, prefill_tokens=5)
        played.arrive(prompt(4, 2), 34)
        played.step()
        young = played.arrive(prompt(23), 15)
        starts = []
        while not young.decoding:
            starts += [(young.num_preemptions, segment.start) for segment in played.step().segments]
        # The second of its two full pages was given to the one that made it leave.
        assert starts == [(0, 0), (0, 5), (0, 10), (0, 15), (1, 10), (1, 15), (1, 20)]
        assert young.num_cached_tokens == 10
        finish(played)

    @pytest.mark.parametrize(("reproducible", "found"), [(True, 0), (False, 20)])
    def test_texts_that_were_decoded_are_kept_unless_numbers_would_differ(self, reproducible, found):
        played = simulation(reproducible=reproducible)
        first = played.arrive(prompt(5), 26)
        finish(played)
        second = played.arrive([*first.request.prompt, *first.tokens], 3)
        played.step()
        assert second.num_cached_tokens == found
        finish(played)

    def test_a_page_that_rounds_without_drafts_have_written_is_not_kept_for_the_drafter(self):
        """A row that ends in a call without drafts does not let its drafter catch up."""
        played = simulation(NOTHING, chooses=True, reproducible=False, rounds=20, page_size=2, num_pages=40)
        first = played.arrive(prompt(5), 12)
        for drafts in (K, 0, 0):
            played.carry_out(played.scheduler.plan(), drafts)
        assert first.outcome == FULL
        second = played.arrive([*first.request.prompt, *first.tokens, 1, 1], 3)
        finish(played)  # the device checks what is read
        assert second.outcome != LIVE


class TestFollowing:
    def test_tokens_are_those_of_the_device(self):
        played = simulation(Habits(accept=0.5, stop=0.1))
        actives = [played.arrive(prompt(), 20) for _ in range(4)]
        finish(played)
        for active in actives:
            assert played.device.text(active).tokens == [*active.request.prompt, *active.tokens]
            assert active.sources.count(DRAFT) <= sum(active.accepted)

    def test_a_call_without_rounds_is_an_error(self):
        played = simulation()
        active = played.arrive(prompt(), 20)
        plan = played.scheduler.plan()
        logs = played.device.carry_out(plan, K)
        assert logs is not None
        logs.rows[0].accepted[:] = [-1] * 4
        with pytest.raises(RuntimeError, match=r"the device made no round, although the requests in rows \[0\]"):
            played.scheduler.follow([active], plan.rounds, logs)  # pyright: ignore[reportArgumentType]


def request(length: int, max_tokens: int | None, **fields) -> Request:
    return Request(7, [1] * length, SamplingParams(max_tokens=max_tokens), np.zeros(2, np.uint32), **fields)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (request(0, 1), "prompt 7 is empty"),
        (request(40, 1), "prompt 7 has 40 tokens, but max_len=40 leaves room for 39 and one new token"),
        (
            request(10, 29),
            r"prompt 7 needs 4 pages of 10 tokens \(prompt, max_tokens and drafts: 40\), but the pool has 3",
        ),
        (request(1, 1, stop_tokens=tuple(range(999))), "prompt 7 has 999 stop tokens"),
    ],
)
def test_what_can_never_be_served_is_refused(refused, words):
    scheduler = Scheduler(EngineConfig(max_batch=2, max_len=40, page_size=10, num_pages=3), K)
    with pytest.raises(ValueError, match=words):
        scheduler.needs.check(refused)
    scheduler.needs.check(request(10, 18))  # 30 slots with K drafts


def test_has_room():
    """Whoever finds a free row does not count."""
    played = simulation(max_waiting=1)
    for _ in range(3):
        assert played.scheduler.has_room()
        played.arrive(prompt(), 1)
    assert not played.scheduler.has_room()
    played.step()
    assert not played.scheduler.has_room()  # two have rows, one waits
    finish(played)
    assert played.scheduler.has_room()


def test_clear_leaves_those_who_wait():
    played = simulation(max_batch=1)
    played.arrive(prompt(), 3)
    waiting = played.arrive(prompt(), 3)
    played.step()
    played.fail()
    assert played.scheduler.under_way == []
    assert [active for _, active in played.scheduler.waiting] == [waiting]
    assert played.scheduler.pages.free == 6
    finish(played)
    assert len(waiting.tokens) == 3
