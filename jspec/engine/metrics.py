"""Metrics of an engine. Nothing here needs JAX."""

import bisect
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from jspec.engine.request import FINISH_REASONS, FULL, STOPPED, ActiveRequest

if TYPE_CHECKING:
    from jspec.engine.scheduler.scheduler import Scheduler

# Upper bounds of the histograms' buckets, in seconds: vLLM's for the time to the first token, between tokens, to the end.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LAST_TOKEN_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


_VERSIONS = 16  # of the weights, the newest of which are counted apart


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How often a duration fell into each bucket.

    Attributes:
      bounds: the upper bounds of the buckets in seconds, ascending, each included in its bucket.
      counts: how often a duration fell into each of them; one entry more, for durations above all bounds.
      total: the sum of all durations, in seconds.

    Example::

        durations = Histogram(bounds=(0.1, 1.0), counts=(3, 1, 0), total=0.9)
        mean = durations.total / durations.count  # seconds
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        """How many durations there were."""
        return sum(self.counts)


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Metrics of an engine at one moment. Numbers of "so far" count since the engine was made, and only grow.

    Attributes:
      num_running: admitted requests: they are prefilled, decode, or are in host memory.
      num_waiting: requests that are not admitted yet.
      num_finished: requests that have ended so far, for any reason.
      num_finished_by_reason: the same for each ``Result.finish_reason``.
      num_preemptions: how often a request lost its row and its pages so far.
      num_cached_tokens: tokens of prompts that were found in the prefix cache so far.
      num_prompt_tokens: tokens of the prompts of all requests that had a first token so far.
      num_prefill_tokens: tokens of prompts that were prefilled so far.
      num_padding_tokens: tokens of padding in the prefill batches so far.
      num_generation_tokens: new tokens so far.
      num_calls: calls of decode programs so far.
      rows_per_call: rows that decoded in a call, on average so far; 0.0 before the first.
      num_rounds: rounds so far, each counted once for every request that took part.
      num_drafting_rounds: those of them that had drafts.
      num_draft_tokens: drafts that were verified so far.
      num_accepted_tokens: drafts that were accepted so far.
      num_accepted_tokens_per_position: how many drafts were accepted so far at each place of a round, K entries.
      drafts_by_version: for each of the newest versions of the weights, as text (``LLM.update_weights``), how many drafts
        were verified and how many accepted: what shows that a drafter has grown old.
      pages_used: pages that requests hold.
      pages_cached: pages of the prefix cache without a holder.
      pages_swapped: pages in host memory.
      pages_total: pages of the pool.
      num_compilations: programs that are compiled.
      queue_seconds: from a request's arrival until it was admitted.
      first_token_seconds: from its arrival until the host knew its first token.
      between_tokens_seconds: from one call's tokens of a request to the next call's, divided by the number of these.
      last_token_seconds: from a request's arrival to its end, of those that ended with ``stop`` or ``length``.

    Example::

        metrics = jspec.load("path/to/target", draft="path/to/draft").engine.metrics()
        print(metrics.num_running, metrics.num_accepted_tokens / metrics.num_draft_tokens)
    """

    num_running: int
    num_waiting: int
    num_finished: int
    num_finished_by_reason: dict[str, int]
    num_preemptions: int
    num_cached_tokens: int
    num_prompt_tokens: int
    num_prefill_tokens: int
    num_padding_tokens: int
    num_generation_tokens: int
    num_calls: int
    rows_per_call: float
    num_rounds: int
    num_drafting_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_position: tuple[int, ...]
    drafts_by_version: dict[str, tuple[int, int]]
    pages_used: int
    pages_cached: int
    pages_swapped: int
    pages_total: int
    num_compilations: int
    queue_seconds: Histogram
    first_token_seconds: Histogram
    between_tokens_seconds: Histogram
    last_token_seconds: Histogram

    def as_dict(self) -> dict[str, Any]:
        """The metrics in dictionaries, lists and numbers, for JSON."""
        return dataclasses.asdict(self)


class Meter:
    """Counts the metrics that the scheduler does not count itself.

    Args:
      num_draft_tokens: K, the most drafts of a round.
    """

    def __init__(self, num_draft_tokens: int):
        self._queue, self._first = _Counts(FIRST_TOKEN_BOUNDS), _Counts(FIRST_TOKEN_BOUNDS)
        self._between, self._last = _Counts(BETWEEN_TOKENS_BOUNDS), _Counts(LAST_TOKEN_BOUNDS)
        self._finished = self._tokens = self._calls = self._rows = self._rounds = self._drafted = 0
        self._prompts = self._drafting = 0
        self._accepted = [0] * num_draft_tokens
        self._reasons = dict.fromkeys(FINISH_REASONS.values(), 0)
        self._by_version: dict[str, list[int]] = {}  # drafts and accepted ones
        self._counted: dict[int, int] = {}  # order of a request under way -> how many of its rounds are counted

    def admitted(self, active: ActiveRequest):
        """A request has a row for the first time."""
        self._queue.add(active.times.admitted - active.times.arrived)

    def called(self, rows: int):
        """A call was sent that decodes so many rows."""
        self._calls += 1
        self._rows += rows

    def progressed(self, active: ActiveRequest, new: int, finished: bool):
        """The host has learnt of new tokens of a request, or of its end."""
        now, times = time.perf_counter(), active.times
        if new and times.first_token != times.first_token:  # NaN
            times.first_token = now
            self._prompts += len(active.request.prompt)
            self._first.add(now - times.arrived)
        elif new:
            self._between.add((now - times.newest_token) / new, new)
        if new:
            times.newest_token = now
        self._tokens += new
        counted = self._counted.get(active.order, 0)
        for i in range(counted, len(active.accepted)):
            of_version = self._of_version(active)
            of_version[0] += active.drafted[i]
            of_version[1] += active.accepted[i]
            self._rounds += 1
            self._drafting += active.drafted[i] > 0
            self._drafted += active.drafted[i]
            for place in range(active.accepted[i]):
                self._accepted[place] += 1
        self._counted[active.order] = len(active.accepted)
        if finished:
            self._finished += 1
            self._reasons[FINISH_REASONS[active.outcome]] += 1
            if active.outcome in (STOPPED, FULL):
                self._last.add(now - times.arrived)
            self._counted.pop(active.order, None)

    def _of_version(self, active: ActiveRequest) -> list[int]:
        """The counts of drafts of the weights that a request's newest tokens are of."""
        version = str(active.versions[-1][0]) if active.versions else ""
        if version not in self._by_version:
            if len(self._by_version) == _VERSIONS:
                del self._by_version[next(iter(self._by_version))]  # the oldest
            self._by_version[version] = [0, 0]
        return self._by_version[version]

    def metrics(self, scheduler: "Scheduler", num_compilations: int) -> Metrics:
        """The metrics now."""
        pages = scheduler.pages
        return Metrics(
            num_running=len(scheduler.under_way),
            num_waiting=len(scheduler.waiting),
            num_finished=self._finished,
            num_finished_by_reason=dict(self._reasons),
            num_preemptions=scheduler.num_preemptions,
            num_cached_tokens=scheduler.prefill_queue.num_cached_tokens,
            num_prompt_tokens=self._prompts,
            num_prefill_tokens=scheduler.prefill_queue.num_prefill_tokens,
            num_padding_tokens=scheduler.prefill_queue.num_padding,
            num_generation_tokens=self._tokens,
            num_calls=self._calls,
            rows_per_call=self._rows / max(self._calls, 1),
            num_rounds=self._rounds,
            num_drafting_rounds=self._drafting,
            num_draft_tokens=self._drafted,
            num_accepted_tokens=sum(self._accepted),
            num_accepted_tokens_per_position=tuple(self._accepted),
            drafts_by_version={name: (n, k) for name, (n, k) in self._by_version.items() if n},
            pages_used=pages.used,
            pages_cached=pages.cached,
            pages_swapped=scheduler.pages_swapped,
            pages_total=pages.total,
            num_compilations=num_compilations,
            queue_seconds=self._queue.histogram(),
            first_token_seconds=self._first.histogram(),
            between_tokens_seconds=self._between.histogram(),
            last_token_seconds=self._last.histogram(),
        )


class _Counts:
    """A histogram that grows."""

    def __init__(self, bounds: tuple[float, ...]):
        self._bounds, self._counts, self._total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float, times: int = 1):
        self._counts[bisect.bisect_left(self._bounds, seconds)] += times
        self._total += seconds * times

    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)
