"""The scheduler against a simulated device, with random arrivals and aborts: no text is damaged, no request starves, and
no page is lost.
"""

import dataclasses
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from simulated_device import SALTS, Habits
from simulated_engine import Simulation

from jspec.config import EngineConfig
from jspec.engine.request import LIVE, ActiveRequest
from jspec.engine.scheduler.schedule import Schedule
from jspec.engine.scheduler.scheduler import MOST_ROUNDS_WAITED_FOR


@dataclasses.dataclass
class Arrival:
    """A request to come.

    Attributes:
      schedules: how many schedules are made before it arrives.
      shared: how much of an earlier text its prompt begins with, in percent.
      fresh: how many tokens of its own follow.
      max_tokens: the most new tokens.
      priority: lower goes first.
      salt: which salt, a number.
      event: what happens as it arrives: below 3, an earlier request is aborted; 3, the device fails; else nothing.
    """

    schedules: int
    shared: int
    fresh: int
    max_tokens: int | None
    priority: int
    salt: int
    event: int


def arrivals() -> st.SearchStrategy[list[Arrival]]:
    one = st.builds(
        Arrival,
        schedules=st.sampled_from([0, 0, 1, 1, 2, 3, 7]),
        shared=st.sampled_from([0, 60, 90, 100]),
        fresh=st.integers(1, 15),
        max_tokens=st.sampled_from([1, 3, 10, 15, 20, 30, 50, None]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([0, 0, 0, 0, 1, 2]),
        event=st.integers(0, 15),
    )
    return st.lists(one, min_size=1, max_size=14)


@st.composite
def configs(draw) -> EngineConfig:
    page_size, chunk = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.sampled_from([1, 2, 2, 4, 4, 6, 9]))
    max_len = draw(st.integers(8, 60))
    rows, most = draw(st.sampled_from([1, 2, 3, 4, 5, 5])), -(-max_len // page_size)
    return EngineConfig(
        max_batch=rows,
        max_len=max_len,
        page_size=page_size,
        num_pages=draw(st.sampled_from([None, most, most + 1, most + 2, most * 3 // 2])),
        prefill_chunk=chunk,
        prefill_tokens=draw(st.one_of(st.none(), st.integers(chunk, 6 * chunk))),
        rounds=draw(st.integers(1, 6)),
        reproducible=draw(st.booleans()),
        prefix_cache=draw(st.sampled_from([True, True, False])),
    )


@dataclasses.dataclass
class Before:
    """The requests in rows before a schedule was made."""

    in_rows: list[ActiveRequest]
    preemptions: dict[ActiveRequest, int]
    busy: bool

    @staticmethod
    def of(simulation: Simulation) -> "Before":
        scheduler = simulation.scheduler
        in_rows = [active for active in scheduler.rows if active is not None]
        reading = any(not active.decoding for active in in_rows)
        preemptions = {active: active.num_preemptions for active in simulation.all}
        return Before(in_rows, preemptions, bool(scheduler.waiting or scheduler.swapped or reading))


def check_order(simulation: Simulation, before: Before, schedule: Schedule):
    """The senior enter first, the youngest is preempted, and who was preempted comes back before others enter."""
    scheduler = simulation.scheduler
    in_rows = [active for active in scheduler.rows if active is not None]
    preempted = [active for active in simulation.all if active.num_preemptions > before.preemptions[active]]
    returned = [move.active for move in schedule.swap_in]
    entered = [active for active in in_rows if active not in before.in_rows and active not in returned]
    kept = [active for active in before.in_rows if active in in_rows and active not in preempted]

    def seniority(actives):
        return [active.seniority for active in actives]

    waiting = [key for key, _ in scheduler.waiting]
    assert max(seniority(entered), default=(-9, 0)) < min(waiting, default=(9, 0))
    assert max(seniority(returned), default=(-9, 0)) < min(seniority(scheduler.swapped), default=(9, 0))
    assert max(seniority(kept), default=(-9, 0)) < min(seniority(preempted), default=(9, 0))
    assert not (entered and scheduler.swapped)
    assert not (entered and preempted)
    assert not (returned and preempted)


def check_plan(simulation: Simulation, before: Before, schedule: Schedule):
    """How many rounds there are, who makes them, and that pages and host memory suffice."""
    config, scheduler = simulation.config, simulation.scheduler
    if schedule.decoding:
        most = min(config.rounds, MOST_ROUNDS_WAITED_FOR) if before.busy else config.rounds
        begins = any(not active.tokens and active.unread_rounds == schedule.rounds for active in schedule.decoding)
        assert schedule.rounds == (1 if begins else most)
        able = [active for active in scheduler.rows if active is not None and active.decoding]
        senior = sorted(able, key=lambda active: active.seniority)
        assert schedule.decoding == senior[: simulation.config.max_batch]
    assert schedule.chunks or schedule.decoding or simulation.calls_under_way  # there is no standstill
    assert scheduler.pages_swapped <= simulation.swap_pages
    rows = [active for active in scheduler.rows if active is not None]
    assert all(scheduler.rows[active.row] is active for active in rows if active.row is not None)
    assert len(set(scheduler.under_way)) == len(scheduler.under_way)
    assert not set(scheduler.under_way) & {active for _, active in scheduler.waiting}
    assert all(active.row is None and not active.pages for active in scheduler.swapped)


def check_pages(simulation: Simulation):
    """A page is held by one request, or it is final as a whole."""
    holders, pages = simulation.device.holders, simulation.pages
    assert all(pages.final.get(page) == pages.page_size for page, times in holders.items() if times > 1)
    assert all(len(set(active.pages)) == len(active.pages) for active in simulation.scheduler.under_way)


def step(simulation: Simulation):
    before = Before.of(simulation)
    schedule = simulation.scheduler.schedule()
    check_plan(simulation, before, schedule)
    check_order(simulation, before, schedule)
    simulation.execute(schedule)
    check_pages(simulation)


def prompt_of(arrival: Arrival, simulation: Simulation) -> list[int]:
    """A prompt that may begin as a text before it does."""
    rng, shared = simulation.rng, []
    if simulation.all and arrival.shared:
        donor = rng.choice(simulation.all)
        text = [*donor.request.prompt, *donor.tokens]
        shared = text[: len(text) * arrival.shared // 100]
    prompt = [*shared, *(rng.randrange(1, 3) for _ in range(arrival.fresh))]
    return prompt[: simulation.config.max_len - 1]


def play(simulation: Simulation, coming: list[Arrival]):
    """Have requests come and go, and check every schedule."""
    for arrival in coming:
        for _ in range(arrival.schedules):
            if simulation.scheduler.unfinished:
                step(simulation)
        if arrival.event < 3 and simulation.all:
            simulation.abort(simulation.rng.choice(simulation.all[-4:]))
        elif arrival.event == 3 and arrival.schedules == 7:
            simulation.fail()
        prompt = prompt_of(arrival, simulation)
        try:
            simulation.arrive(prompt, arrival.max_tokens, arrival.priority, SALTS[arrival.salt])
        except ValueError:
            continue  # it can never be served


def finish(simulation: Simulation):
    """Serve those that are there to their end, in a number of schedules that is bounded by their work."""
    config, scheduler, schedules = simulation.config, simulation.scheduler, 0
    unfinished = [active for active in simulation.all if active.outcome == LIVE]
    work = sum(
        -(-active.num_to_prefill // config.chunk) + active.request.limit(config.max_len) - active.length + 4
        for active in unfinished
    )
    while scheduler.unfinished:
        step(simulation)
        schedules += 1
        assert schedules <= 2 * work
    assert all(active.outcome != LIVE for active in simulation.all)


def check_end(simulation: Simulation):
    """Nothing is left behind, and the counters add up."""
    scheduler = simulation.scheduler
    assert scheduler.pages.used == scheduler.pages_swapped == 0
    assert scheduler.pages.available == scheduler.pages.total
    assert scheduler.rows == [None] * simulation.config.num_rows
    assert scheduler.num_preemptions == sum(active.num_preemptions for active in simulation.all)
    assert scheduler.prefill_queue.num_prefill_tokens == simulation.device.num_prefilled
    assert scheduler.prefill_queue.num_padding == simulation.device.num_padding
    if not any(active.num_preemptions for active in simulation.all):
        assert scheduler.prefill_queue.num_cached_tokens == sum(active.num_cached_tokens for active in simulation.all)


@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    K=st.integers(0, 3),
    looks_ahead=st.booleans(),
    chooses=st.booleans(),
    swap_pages=st.sampled_from([0, 5, 9, 20, 40, 1000, 1000, 1000]),
    habits=st.sampled_from([Habits(0.5), Habits(0.9, 0.1), Habits(0.2, 0.0), Habits(0.6, 0.02, 0.02)]),
    coming=arrivals(),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_arrivals_and_aborts_damage_no_text(config, K, looks_ahead, chooses, swap_pages, habits, coming, seed):
    rng = random.Random(seed)
    simulation = Simulation(config, K, looks_ahead, swap_pages, rng, habits, chooses and K > 0)
    play(simulation, coming)
    finish(simulation)
    check_end(simulation)


@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    config=configs(),
    K=st.integers(0, 3),
    looks_ahead=st.booleans(),
    every=st.sampled_from([1, 4, 8, 100]),
    states=st.sampled_from([0, 1, 4]),
    most_snapshots=st.sampled_from([0, 1, 2, 5, 100]),
    swap_pages=st.sampled_from([0, 9, 40, 1000, 1000]),
    coming=arrivals(),
    seed=st.integers(0, 2**32 - 1),
)
def test_recurrent_states_have_read_the_text_of_their_row(
    config, K, looks_ahead, every, states, most_snapshots, swap_pages, coming, seed
):
    """Whatever is found in the prefix cache, preempted, aborted or failed in between."""
    config = dataclasses.replace(config, snapshot_every=every if config.prefix_cache else None)
    how = {"states": states, "most_snapshots": most_snapshots}
    simulation = Simulation(config, K, looks_ahead, swap_pages, random.Random(seed), **how)
    play(simulation, coming)
    finish(simulation)
    check_end(simulation)
