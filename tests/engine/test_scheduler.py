"""Who waits, who enters which row with which pages, and who leaves; on a machine that need not have JAX."""

import subprocess
import sys
import types

import numpy as np
import pytest

from jspec.config import EngineConfig
from jspec.engine.request import FULL, LIVE, STOPPED, Request
from jspec.engine.scheduler import Scheduler
from jspec.sampling.params import SamplingParams

CONFIG = EngineConfig(max_batch=2, max_len=40, page_size=10, num_pages=6)
K = 2


def request(index: int, length: int = 5, max_tokens: int = 3, **fields) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(index, list(range(length)), params, np.array([0, index], np.uint32), **fields)


def scheduling(*requests: Request) -> Scheduler:
    scheduler = Scheduler(CONFIG, K)
    for one in requests:
        scheduler.check(one)
        scheduler.add(one)
    return scheduler


def logs(rounds) -> types.SimpleNamespace:
    """Logs of rounds, each a list of (tokens, accepted, outcome) by row, or None for a row that took no part."""

    def field(of, nothing):
        return np.array([[nothing if did is None else of(did) for did in row] for row in rounds])

    def padded(tokens):
        return [*tokens, *[-1] * (K + 1 - len(tokens))]

    fields = {
        "tokens": field(lambda did: padded(did[0]), padded([])),
        "count": field(lambda did: len(did[0]), 0),
        "drafted": field(lambda did: K, -1),
        "accepted": field(lambda did: did[1], -1),
        "outcome": field(lambda did: did[2], STOPPED),
    }
    of_row = lambda row: types.SimpleNamespace(**{name: value[:, row] for name, value in fields.items()})  # noqa: E731
    return types.SimpleNamespace(of_row=of_row)


def indices(scheduler: Scheduler) -> list[int | None]:
    return [None if active is None else active.request.index for active in scheduler.rows]


def test_it_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None; from jspec.engine.scheduler import Scheduler; print(Scheduler.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Scheduler\n"


def test_requests_enter_free_rows_in_their_order():
    scheduler = scheduling(*(request(i) for i in range(4)))
    entered = scheduler.enter()
    assert [(row, active.request.index) for row, active in entered] == [(0, 0), (1, 1)]
    assert [len(active.pages) for _, active in entered] == [1, 1]  # 5 + 3 + K slots
    assert not scheduler.enter()
    assert [active.request.index for active in scheduler.leave([0])] == [0]
    assert [row for row, _ in scheduler.enter()] == [0]
    assert indices(scheduler) == [2, 1]
    assert [waiting.index for waiting in scheduler.waiting] == [3]


def test_a_request_that_needs_many_pages_is_not_overtaken():
    scheduler = scheduling(request(0, 10, 20), request(1, 10, 20), request(2, 1, 1))  # 4 pages, 4 pages, 1 page
    scheduler.enter()
    assert indices(scheduler) == [0, None]
    assert scheduler.pages.free == 2
    scheduler.leave([0])
    scheduler.enter()
    assert indices(scheduler) == [1, 2]


def test_pages_are_those_of_the_request_alone():
    scheduler = scheduling(request(0, 10, 12), request(1, 10, 12))
    pages = [page for _, active in scheduler.enter() for page in active.pages]
    assert sorted(pages) == [1, 2, 3, 4, 5, 6]
    scheduler.leave([0, 1])
    assert scheduler.pages.free == 6
    assert not scheduler.unfinished


def test_what_may_be_sent_ahead():
    scheduler = scheduling(request(0), request(1))
    assert not scheduler.may_send_ahead()  # they wait
    scheduler.enter()
    assert scheduler.may_send_ahead()
    scheduler.add(request(2, find_stop=lambda tokens, seen: None))
    assert not scheduler.may_send_ahead()
    scheduler.leave([0])
    scheduler.enter()
    assert not scheduler.waiting
    assert not scheduler.may_send_ahead()  # the host looks for a stop string
    scheduler.leave([0])
    assert scheduler.may_send_ahead()


def test_following_a_call():
    scheduler = scheduling(request(0), request(1))
    scheduler.enter()
    rows = list(scheduler.rows)
    did = [[([7, 8], 1, LIVE), ([9], 0, LIVE)], [([5], 0, FULL), ([6, 6, 6], 2, LIVE)]]
    finished, accepted = scheduler.follow(rows, logs(did))
    assert finished == [0]
    assert sorted(accepted) == [0, 0, 1, 2]
    first, second = rows
    assert (first.tokens, first.from_draft, first.outcome) == ([7, 8, 5], [True, False, False], FULL)
    assert (second.tokens, second.accepted, second.outcome) == ([9, 6, 6, 6], [0, 2], LIVE)

    # A call that was sent before row 0 was known to have ended.
    finished, accepted = scheduler.follow(rows, logs([[None, ([1], 0, STOPPED)]]))
    assert (finished, accepted) == ([1], [0])
    assert scheduler.follow(rows, logs([[None, None]])) == ([], [])


def test_a_call_without_rounds_is_an_error():
    scheduler = scheduling(request(0))
    scheduler.enter()
    with pytest.raises(RuntimeError, match=r"the device made no round, although the requests in rows \[0\]"):
        scheduler.follow(list(scheduler.rows), logs([[None, None]]))


def test_clear():
    scheduler = scheduling(*(request(i) for i in range(4)))
    scheduler.enter()
    scheduler.clear()
    assert not scheduler.unfinished
    assert indices(scheduler) == [None, None]
    assert scheduler.pages.free == 6
