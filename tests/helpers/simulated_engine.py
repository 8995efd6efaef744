"""The engine's loop around a scheduler and a simulated device.

The host reads a call only after it has sent the next one, as ``Loop`` does.
"""

import collections
import random
from collections.abc import Sequence

import numpy as np
from simulated_device import STOP, Device, Habits, Logs, WatchedPages

from jspec.config import EngineConfig
from jspec.engine.request import ABORTED, FAILED, LIVE, ActiveRequest, Request
from jspec.engine.scheduler.schedule import Schedule
from jspec.engine.scheduler.scheduler import Scheduler
from jspec.engine.scheduler.snapshots import Snapshots
from jspec.sampling.params import SamplingParams


class Simulation:
    """The loop of ``Engine`` over a scheduler and a device on paper.

    Args:
      config: what may be used.
      K: the most drafts of a round.
      looks_ahead: whether slot i of the drafter depends on token i + 1.
      swap_pages: how many pages host memory may hold.
      rng: what rounds emit, and whatever else is up to chance.
      habits: how likely things are in a round.
      chooses: whether each call has another number of drafts, up to K.
      states: how many pages take as much host memory as the recurrent states of a row.
      most_snapshots: how many snapshots of these there may be; None for a target without them.
      checks_contents: whether the device looks at everything that it reads, which takes most of the time.
    """

    def __init__(
        self,
        config: EngineConfig,
        K: int,
        looks_ahead: bool = False,
        swap_pages: int = 0,
        rng: random.Random | None = None,
        habits: Habits = Habits(),  # noqa: B008
        chooses: bool = False,
        checks_contents: bool = True,
        states: int = 0,
        most_snapshots: int | None = None,
    ):
        self.config, self.K, self.rng = config, K, rng or random.Random(0)
        self.swap_pages = swap_pages
        snapshots = None if most_snapshots is None else Snapshots(most_snapshots)
        self.pages = WatchedPages(config.pool_pages - 1, config.page_size, config.prefix_cache, looks_ahead, snapshots)
        self.scheduler = scheduler = Scheduler(
            config, K, looks_ahead, swap_pages, plain_rounds=chooses, pages=self.pages, states=states
        )
        self.device = Device(config, K, looks_ahead, scheduler, self.pages, self.rng, habits, checks_contents)
        self.all: list[ActiveRequest] = []
        self._chooses = chooses
        self._calls: collections.deque[tuple[Schedule, Logs]] = collections.deque()

    def arrive(
        self, prompt: Sequence[int], max_tokens: int | None, priority: int = 0, salt: str = "", tenant: str = ""
    ) -> ActiveRequest:
        """Let a request wait.

        Raises:
          ValueError: it can never be served.
        """
        order = len(self.all)
        params, key = SamplingParams(max_tokens=max_tokens), np.array([0, order], np.uint32)
        request = Request(order, list(prompt), params, key, (STOP,), priority=priority, salt=salt, tenant=tenant)
        self.scheduler.requirements.check(request)
        active = ActiveRequest(request, order)
        self.scheduler.add(active)
        self.all.append(active)
        return active

    def abort(self, active: ActiveRequest):
        """Give a request up, if it has not ended."""
        if active.outcome == LIVE:
            self.scheduler.remove(active)
            active.outcome = ABORTED
            self.pages.keep_promises()

    def fail(self):
        """Fail all that are under way, as an error of the device does."""
        self._calls.clear()
        for active in self.scheduler.under_way:
            active.outcome = FAILED
        self.scheduler.clear()

    def step(self) -> Schedule:
        """Decide, carry out, and read the call before."""
        schedule = self.scheduler.schedule()
        self.execute(schedule)
        return schedule

    def execute(self, schedule: Schedule, K: int | None = None):
        """Execute a schedule, with rounds of up to K drafts, and read the call before."""
        if K is None:
            K = self.rng.randrange(self.K + 1) if self._chooses else self.K
        logs = self.device.execute(schedule, K)
        self.scheduler.dispatched(schedule)
        if logs is not None:
            self._calls.append((schedule, logs))
        waits = self._chooses and self.rng.random() < 0.2  # the next choice of K waits for this call
        ahead = 1 if logs is not None and not waits else 0
        while len(self._calls) > ahead:
            self._read(*self._calls.popleft())
        self.pages.keep_promises()

    @property
    def calls_under_way(self) -> int:
        """How many calls were sent and not read."""
        return len(self._calls)

    def _read(self, schedule: Schedule, logs: Logs):
        before: list[int] = [active.outcome for active in schedule.decoding]
        accepted = [number for _, number in self.scheduler.update(schedule.decoding, schedule.rounds, logs)]
        counted = [
            number
            for row, outcome in zip(logs.rows, before, strict=True)
            for number in row.accepted
            if number >= 0 and outcome == LIVE
        ]
        assert sorted(accepted) == sorted(counted)
        for active, outcome in zip(schedule.decoding, before, strict=True):
            if outcome == LIVE != active.outcome:
                assert [*active.request.prompt, *active.tokens] == self.device.text(active).tokens
                self.scheduler.remove(active)
