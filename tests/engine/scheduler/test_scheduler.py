"""Who waits, who is read, who decodes, who is preempted, and with which pages; on a machine that need not have JAX."""

import subprocess
import sys

import numpy as np
import pytest
from simulated_device import Habits
from small_engine import ALL, NOTHING, K, entry_order, finish, orders, prompt, simulation

from jspec.config import EngineConfig
from jspec.engine.request import LIVE, Request
from jspec.engine.scheduler.scheduler import Scheduler
from jspec.outputs import DRAFT
from jspec.sampling.params import SamplingParams


def test_scheduler_imports_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from jspec.engine.scheduler.scheduler import Scheduler; print(Scheduler.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Scheduler\n"


class TestEntering:
    def test_a_prompt_is_prefilled_and_decoded_in_one_schedule(self):
        played = simulation()
        active = played.arrive(prompt(12), 20)
        schedule = played.step()
        assert [chunk[1:] for chunk in schedule.chunks] == [(0, 5), (5, 5), (10, 1)]  # all but the last token
        assert (schedule.admitted, schedule.decoding, schedule.rounds) == ([active], [active], 1)
        assert len(active.pages) == 2  # 12 tokens, a round of K + 1, and K drafts
        assert played.step().rounds == 4

    def test_a_prompt_of_one_token_needs_no_prefill(self):
        played = simulation()
        active = played.arrive([1], 3)
        schedule = played.step()
        assert (schedule.chunks, schedule.admitted, schedule.decoding) == ([], [active], [active])

    def test_first_come_first_served_within_a_priority(self):
        played = simulation(max_batch=1)
        for priority in (1, 0, 0, -1):
            played.arrive(prompt(), 1, priority)
        assert entry_order(played) == [3, 1, 2, 0]

    def test_a_request_that_needs_many_pages_is_not_overtaken(self):
        played = simulation(num_pages=5)
        for length, most in ((10, 12), (20, 18), (1, 1)):  # 3, 4 and 1 pages at their longest
            played.arrive(prompt(length), most)
        played.step()
        assert orders(played.scheduler.rows) == [0, None]
        assert entry_order(played) == [1, 2]

    def test_many_prompts_are_prefilled_before_rounds(self):
        played = simulation(max_batch=8, num_pages=None, prefill_tokens=10)
        for _ in range(8):
            played.arrive(prompt(11), 3)
        schedules = [played.step() for _ in range(4)]
        assert [len(schedule.chunks) for schedule in schedules] == [2, 2, 2, 2]
        assert [bool(schedule.decoding) for schedule in schedules] == [False, False, False, True]

    def test_a_request_that_never_fits_is_an_error(self):
        played = simulation(num_pages=2)
        unchecked = simulation(num_pages=4).arrive(prompt(20), 20)
        played.scheduler.add(unchecked)
        with pytest.raises(RuntimeError, match="1 requests wait, none is under way and none can be admitted; 2 pages"):
            played.step()


class TestRounds:
    def test_few_rounds_while_a_request_waits(self):
        played = simulation(NOTHING, max_batch=1)
        played.arrive(prompt(), 20)
        played.arrive(prompt(), 1)
        assert [played.step().rounds for _ in range(3)] == [1, 2, 2]

    def test_all_rounds_while_no_request_waits(self):
        played = simulation(NOTHING)
        played.arrive(prompt(), 20)
        assert [played.step().rounds for _ in range(3)] == [1, 4, 4]

    def test_one_round_with_a_request_just_admitted(self):
        played = simulation(NOTHING)
        played.arrive(prompt(), 20)
        played.step()
        played.step()
        late = played.arrive([1], 3)
        schedule = played.step()
        assert (schedule.admitted, schedule.rounds, len(schedule.decoding)) == ([late], 1, 2)


class TestLeaving:
    def test_row_of_an_ending_request_is_reused_at_once(self):
        played = simulation(max_batch=1)
        first, second = played.arrive(prompt(), 1), played.arrive(prompt(), 1)
        played.step()
        assert first.outcome == LIVE  # as far as the host knows
        schedule = played.step()
        assert (schedule.admitted, second.row, played.scheduler.ending) == ([second], 0, [])
        assert (first.row, first.pages) == (None, [])  # its last call was read meanwhile

    def test_pages_of_an_ending_request_are_held_until_its_end_is_read(self):
        played = simulation(max_batch=1)
        first = played.arrive(prompt(), 1)
        played.step()
        played.scheduler.schedule()
        assert (played.scheduler.ending, played.scheduler.rows) == ([first], [None])
        assert played.scheduler.pages.used == len(first.pages) > 0
        assert played.scheduler.under_way == [first]

    @pytest.mark.parametrize("schedules", range(6))
    def test_abort_frees_pages_in_every_state(self, schedules):
        played = simulation(NOTHING, swap_pages=6, num_pages=4, prefill_tokens=5, max_batch=3)
        for _ in range(4):
            played.arrive(prompt(9), 12)
        for _ in range(schedules):
            played.step()
        for active in played.all:
            played.abort(active)
        assert not played.scheduler.unfinished
        assert played.scheduler.pages.used == played.scheduler.pages_swapped == 0

    def test_abort_of_a_swapped_request_frees_host_memory(self):
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
    def test_a_decoding_request_is_swapped_out_and_in(self):
        played, young = preempted()
        assert played.scheduler.swapped == [young]
        assert (young.row, young.pages, young.num_preemptions) == (None, [], 1)
        third, swapped_in = played.arrive([1], 1), []
        while not third.decoding:
            swapped_in += [swap.active for swap in played.step().swap_in]
        assert set(swapped_in) == {young}  # before other admissions
        finish(played)
        assert [len(active.tokens) for active in played.all] == [30, 30, 1]
        assert played.scheduler.num_preemptions == sum(active.num_preemptions for active in played.all) >= 1

    def test_a_prefilling_request_begins_anew(self):
        played = simulation(ALL, swap_pages=8, num_pages=5, prefill_tokens=5, prefix_cache=False)
        played.arrive(prompt(4), 34)
        played.step()
        young = played.arrive(prompt(23), 15)
        schedules = []
        while not young.decoding:
            schedules.append(played.step())
        starts = [segment.start for schedule in schedules for segment in schedule.chunks]
        assert young.num_preemptions >= 1
        assert starts.count(0) == 1 + young.num_preemptions
        assert not any(schedule.swap_out for schedule in schedules)
        finish(played)

    def test_no_admission_that_risks_a_deadlock(self):
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


class TestFollowing:
    def test_updated_tokens_are_those_of_the_device(self):
        played = simulation(Habits(accept=0.5, stop=0.1))
        actives = [played.arrive(prompt(), 20) for _ in range(4)]
        finish(played)
        for active in actives:
            assert played.device.text(active).tokens == [*active.request.prompt, *active.tokens]
            assert active.sources.count(DRAFT) <= sum(active.accepted)

    def test_a_call_without_rounds_is_an_error(self):
        played = simulation()
        active = played.arrive(prompt(), 20)
        schedule = played.scheduler.schedule()
        logs = played.device.execute(schedule, K)
        assert logs is not None
        logs.rows[0].accepted[:] = [-1] * 4
        with pytest.raises(RuntimeError, match=r"the device made no round, although the requests in rows \[0\]"):
            played.scheduler.update([active], schedule.rounds, logs)  # pyright: ignore[reportArgumentType]


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
def test_requests_that_can_never_be_served_are_refused(refused, words):
    scheduler = Scheduler(EngineConfig(max_batch=2, max_len=40, page_size=10, num_pages=3), K)
    with pytest.raises(ValueError, match=words):
        scheduler.requirements.check(refused)
    scheduler.requirements.check(request(10, 18))  # 30 slots with K drafts


def test_has_room_up_to_max_waiting_and_free_rows():
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


def test_clear_leaves_waiting_requests():
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
