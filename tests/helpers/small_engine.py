"""A simulated engine of few rows and pages, and what tests of its scheduler ask of it."""

from simulated_device import Habits
from simulated_engine import Simulation

from jspec.config import EngineConfig

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


def entry_order(played: Simulation) -> list[int]:
    """The numbers of the requests in the order in which they are given rows."""
    found = []
    while played.scheduler.unfinished:
        found += orders(played.step().admitted)
    return found


def finish(played: Simulation):
    for _ in range(200):
        if played.scheduler.unfinished:
            played.step()
    assert not played.scheduler.unfinished
    assert played.scheduler.pages.used == played.scheduler.pages_swapped == 0
