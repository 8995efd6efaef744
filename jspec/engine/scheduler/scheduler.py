"""The scheduler: which requests wait, prefill, decode or are preempted, and with which pages, decided on the host.

Nothing here needs JAX. The scheduler decides; ``engine/runner/model_runner.py`` executes.

The host is one call behind the device: when it schedules a call, it has not read the logs of the call before. So it
counts with the most tokens that the rounds under way may have committed, and it notices the end of a request one call
late. Programs run in the order in which they are sent. So pages may be given to others as soon as the last program that uses
them has been sent.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from jspec.config import EngineConfig
from jspec.engine.request import LIVE, ActiveRequest, row_of
from jspec.engine.scheduler.page_pool import PagePool
from jspec.engine.scheduler.page_requirements import PageRequirements
from jspec.engine.scheduler.prefill_batching import prefill_goes_first
from jspec.engine.scheduler.prefill_queue import PrefillQueue
from jspec.engine.scheduler.schedule import Schedule, Swap
from jspec.engine.scheduler.snapshots import Snapshots
from jspec.engine.scheduler.turns import Turns

if TYPE_CHECKING:
    from jspec.engine.round_log import RoundLog

MOST_ROUNDS_WAITED_FOR = 2  # of a call, while a request waits or is prefilled
TENANT_SHARE = 8  # a tenant has room for one part of so many of the queue, though others fill it
MOST_PREFILLS_IN_A_ROW = 4  # prefill batches before the next rounds, while many prompts are prefilled


class Scheduler:
    """Holds the queue, the rows and the pages.

    Requests are served in the order of their priority. Among those of the same priority tenants take turns, and those of a
    tenant are first come, first served. One that needs many pages is not overtaken by one that needs few. A request gets a
    row, and pages for its prompt and its first rounds, when it is admitted; further pages follow as its text grows.

    There are a few rows more than a call decodes. They are for requests whose prompts are read ahead, and which decode as
    soon as others have ended.

    Args:
      config: the number of rows and pages, and the longest text.
      num_draft_tokens: K, the most drafts of a round. A round writes its drafts behind the newest token, and may do so
        past the end of the request, so these slots are counted.
      looks_ahead: whether slot i of the drafter's cache depends on token i + 1, as in heads that are fed features.
      swap_pages: how many pages host memory may hold.
      plain_rounds: whether there are calls without drafts, whose tokens the drafter reads later.
      pages: the page pool; None makes one.
      slots_beyond: as ``Drafter.slots_beyond``.
      states: how many pages take as much host memory as the recurrent states of one row.
      most_snapshots: how many snapshots of recurrent states there may be; None for a target without such states.

    Attributes:
      waiting: requests that have no row yet, as a heap by seniority.
      swapped: requests in host memory.
      ending: requests that are certain to end with the rounds under way. Their rows are given to others at once; they hold
        their pages until the host knows their last tokens.
      rows: the request in each row of the batch, None for a free row.
      pages: the page pool.
      requirements: how many slots and pages requests need.
      prefill_queue: the next chunk of each prompt, and prefix-cache hits.
      num_preemptions: how many requests have been preempted so far.
      admits: whether waiting requests are admitted, as they are unless the engine is paused, or somebody waits until none is
        under way.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_draft_tokens: int,
        looks_ahead: bool = False,
        swap_pages: int = 0,
        plain_rounds: bool = False,
        pages: PagePool | None = None,
        slots_beyond: int = 0,
        states: int = 0,
        most_snapshots: int | None = None,
    ):
        # The most tokens at the end of a text that the drafter has not read.
        self._unread = num_draft_tokens + 1 + plain_rounds * config.rounds
        self._config, self._swap_pages = config, swap_pages
        # Where a seed means one text, only what prefill would write in the same bits: recurrent states are made otherwise.
        self._caches_answers = not config.reproducible or not (config.pins_shapes or states)
        if pages is None:
            snapshots = None if most_snapshots is None else Snapshots(most_snapshots)
            pages = PagePool(config.pool_pages - 1, config.page_size, config.prefix_cache, looks_ahead, snapshots)
        self.pages, self.prefill_queue = pages, PrefillQueue(config, pages)
        self.requirements = PageRequirements(config, num_draft_tokens, pages, slots_beyond, states)
        self.num_preemptions, self.admits = 0, True
        self.waiting: list[tuple[tuple[int, int, int], ActiveRequest]] = []
        self._turns = Turns()
        self.clear()

    def clear(self):
        """Forget every request but those that wait; all rows and pages are free, and no prefix is known.

        An interrupted ``clear`` can be repeated.
        """
        self.rows: list[ActiveRequest | None] = [None] * self._config.num_rows
        self.swapped: list[ActiveRequest] = []
        self.ending: list[ActiveRequest] = []
        self.pages.clear()
        self.prefill_queue.clear()
        self._prefills_since_call = 0
        self._processing_turn = False  # whether the next call is for requests that need processing

    @property
    def under_way(self) -> list[ActiveRequest]:
        """The admitted requests: those in rows, those in host memory, and those that are about to end."""
        return [*self._in_rows(), *self.swapped, *self.ending]

    @property
    def unfinished(self) -> bool:
        """Whether any request waits or is under way."""
        return bool(self.waiting) or bool(self.under_way)

    def has_room(self, arriving: int = 0, tenant: str = "") -> bool:
        """Whether one more request may wait, beside others that are about to be added.

        Requests that can be given a free row at once do not count. Where others fill the queue, a tenant still has room for
        an eighth of it, up to a queue of twice the length.
        """
        most = self._config.max_waiting
        if most is None:
            return True
        total = len(self.waiting) + arriving
        room = most + sum(row is None for row in self.rows)
        if total < room or not tenant:
            return total < room
        own = sum(active.request.tenant == tenant for _, active in list(self.waiting))
        return own + arriving < most // TENANT_SHARE and total < room + most

    @property
    def pages_swapped(self) -> int:
        """How many pages are in host memory, with those that recurrent states take as much as."""
        return sum(active.num_saved_pages + self.requirements.states for active in self.swapped)

    def add(self, active: ActiveRequest):
        """Queue a request that ``requirements.check`` has passed."""
        active.limit = active.request.limit(self._config.max_len)
        active.most_slots = self.requirements.most_slots(active.request)
        active.turn = self._turns.take(active.request.tenant)
        heapq.heappush(self.waiting, (active.seniority, active))

    def schedule(self, mix_free_with_constrained: bool = True) -> Schedule:
        """Decide the device's next work, and take rows and pages for it.

        1. Requests that are certain to end with the rounds under way give up their rows.
        2. Those that decode get pages for their next rounds. Where there are none, the youngest request is preempted: one
           that is still prefilled begins anew, and one that decodes is swapped to host memory.
        3. If nobody lacked pages, preempted requests come back, and then waiting ones are admitted.
        4. A prefill batch is chosen; requests whose prompts end in it decode from now on.
        5. Rounds follow, unless prompts go first: the drafts of constrained requests are verified, their next ones are made,
           and the free requests decode, at most ``max_batch`` of them, the most senior first.

        Args:
          mix_free_with_constrained: whether free requests may be decoded by the programs of constrained ones, in rounds of
            the most drafts, so that the target reads its weights once for all of them.

        Raises:
          RuntimeError: requests wait, but none is under way and none can be admitted.
        """
        schedule = Schedule()
        self._free_rows_of_ending()
        busy = bool(self.waiting or self.swapped or any(not active.decoding for active in self._in_rows()))
        rounds = min(self._config.rounds, MOST_ROUNDS_WAITED_FOR) if busy else self._config.rounds
        preempted_before = self.num_preemptions
        short = self._grow(rounds, schedule)
        if self.num_preemptions == preempted_before and not short:  # else pages are for requests that decode
            self._swap_in(rounds, schedule)
            if not self.swapped and self.admits:
                self._admit()
        self._choose_prefill(schedule)
        if self._calls_now(schedule):
            ready = _most_senior_first(active for active in self._in_rows() if active.decoding and active not in short)
            self._choose_split(schedule, ready, mix_free_with_constrained and not self._config.pins_shapes)
            if not any(active.request.constraint is None for active in schedule.drafting):
                free = [active for active in ready if active.request.constraint is None]
                free = [active for active in free if active not in schedule.verifying]
                schedule.decoding = self._of_one_program(free)[: self._config.max_batch]
            begins = any(not active.tokens and not active.unread_rounds for active in schedule.decoding)
            schedule.rounds = min(rounds, 1) if begins or schedule.drafting or schedule.verifying else rounds
        for active in schedule.decoding:
            active.unread_rounds += schedule.rounds
        if self.waiting and self.admits and not self.under_way:
            raise RuntimeError(
                f"{len(self.waiting)} requests wait, none is under way and none can be admitted; "
                f"{self.pages.available} pages are available"
            )
        return schedule

    def dispatched(self, schedule: Schedule):
        """Note that the programs of a schedule have been sent, so that other prompts may find its prefilled pages."""
        self.prefill_queue.dispatched(schedule.chunks, schedule.snapshots)

    def update(self, decoded: Sequence[ActiveRequest], rounds: int, logs: "RoundLog") -> list[tuple[int, int]]:
        """Update requests with the logs of a call.

        Args:
          decoded: the requests that the call decoded, in the order of its rows.
          rounds: how many rounds were requested.
          logs: its rounds on the host, fields ``[rounds, b]``.

        Returns:
          how many drafts the target verified and how many of them it accepted, in any order, one pair for every row and
          round that counts; those of requests that want few drafts are left out, because they say nothing of drafts that
          were not verified.

        Raises:
          RuntimeError: the device made no round although a request has not ended, so that it would never end.
        """
        live, verified, made = [], [], 0
        for active, log in zip(decoded, logs.by_row(), strict=False):
            active.unread_rounds -= rounds
            if active.outcome == LIVE:
                live.append(active)
                before = len(active.accepted)
                active.update(log)
                made += len(active.accepted) - before
                if active.request.params.max_drafts is None:
                    verified += zip(active.drafted[before:], active.accepted[before:], strict=True)
        if live and not made and all(active.outcome == LIVE for active in live):
            rows = [active.row for active in live]
            raise RuntimeError(f"the device made no round, although the requests in rows {rows} have not ended")
        return verified

    def remove(self, active: ActiveRequest):
        """Remove a request that has ended or is aborted, in any state."""
        if active in self.swapped:
            self.swapped.remove(active)
            active.saved = None
        elif active.row is not None or active in self.ending:
            if active.decoding and self._caches_answers:
                self._cache_text(active)
            if active.row is None:
                self.ending.remove(active)
            self._free(active)
        else:
            self.waiting = [entry for entry in self.waiting if entry[1] is not active]
            heapq.heapify(self.waiting)

    def begin_anew(self):
        """Let all requests under way wait to be admitted again, with the tokens that they have. No round is unread."""
        for active in [*self._in_rows(), *self.swapped]:
            self._free(active)
            active.begin_anew()
            heapq.heappush(self.waiting, (active.seniority, active))
        self.swapped.clear()

    def _free_rows_of_ending(self):
        """Free the rows of requests that rounds under way are certain to end: each round commits at least one token."""
        for active in self._in_rows():
            if active.decoding and active.length + active.unread_rounds >= active.limit:
                self.rows[row_of(active)] = active.row = None
                self.ending.append(active)

    def _grow(self, rounds: int, schedule: Schedule) -> list[ActiveRequest]:
        """Give each request that decodes pages for its next rounds, and preempt others where there are none.

        Returns:
          the requests that cannot decode now, because there are no pages and host memory is full.
        """
        short = []
        for active in _most_senior_first(self._in_rows()):
            if active.row is None or not active.decoding:
                continue  # it was preempted meanwhile, or is prefilled
            missing = self.requirements.pages_for(active, rounds) - len(active.pages)
            while missing > self.pages.available and active.row is not None:
                if not self._preempt(schedule):
                    break
            if active.row is not None and missing > self.pages.available:
                short.append(active)
            elif active.row is not None and missing > 0:
                active.pages += self.pages.take(missing)
        return short

    def _preempt(self, schedule: Schedule) -> bool:
        """Take row and pages from the youngest request; returns False if host memory has no room for it."""
        youngest = max(self._in_rows(), key=lambda active: active.seniority)
        if not youngest.decoding:
            self._free(youngest)
            youngest.num_prefilled = youngest.num_cached_tokens = 0
            self.add(youngest)
        else:
            if self.pages_swapped + len(youngest.pages) + self.requirements.states > self._swap_pages:
                return False
            schedule.swap_out.append(Swap(youngest, row_of(youngest), list(youngest.pages)))
            youngest.num_saved_pages = len(youngest.pages)
            self._free(youngest)
            self.swapped.append(youngest)
        youngest.num_preemptions += 1
        self.num_preemptions += 1
        return True

    def _swap_in(self, rounds: int, schedule: Schedule):
        """Give rows and pages to requests in host memory, the most senior first."""
        for active in _most_senior_first(self.swapped):
            row = self._first_free_row()
            needed = max(self.requirements.pages_for(active, rounds), active.num_saved_pages)
            if row is None or needed > self.pages.available:
                return
            self.swapped.remove(active)
            self._assign(active, row, self.pages.take(needed))
            schedule.swap_in.append(Swap(active, row, active.pages[: active.num_saved_pages]))

    def _admit(self):
        """Give free rows, and pages, to waiting requests."""
        while self.waiting:
            active, row = self.waiting[0][1], self._first_free_row()
            if row is None or not self.requirements.fits_together([*self.under_way, active], self._swap_pages):
                return
            cached = self.prefill_queue.find(active)
            missing = self.requirements.pages_for(active, 1) - len(cached)
            if missing > self.pages.available:
                self.pages.release(cached)
                return
            heapq.heappop(self.waiting)
            self._turns.served(active.turn)
            self._assign(active, row, [*cached, *self.pages.take(missing)])
            self.prefill_queue.begin(active, len(cached))

    def _choose_prefill(self, schedule: Schedule):
        """Choose the prefill batch, if there is one, and the requests that are put into their rows after it."""
        prefilling = _most_senior_first(active for active in self._in_rows() if not active.decoding)
        queue = self.prefill_queue
        schedule.chunks = queue.choose(prefilling, sum(active.decoding for active in self._in_rows()))
        schedule.restores, schedule.snapshots = queue.take_restores(), queue.snapshots(schedule.chunks)
        schedule.admitted = [active for active in prefilling if active.num_prefilled >= active.num_to_prefill]
        for active in schedule.admitted:
            active.decoding = True

    def _calls_now(self, schedule: Schedule) -> bool:
        """Whether rounds follow the prefill batch. While many prompts are prefilled, a few batches come first."""
        num_decoding = sum(active.decoding for active in self._in_rows())
        wait = schedule.chunks and prefill_goes_first(len(self._in_rows()) - num_decoding, num_decoding)
        self._prefills_since_call += 1
        if wait and self._prefills_since_call < MOST_PREFILLS_IN_A_ROW:
            return False
        self._prefills_since_call = 0
        return True

    def _choose_split(self, schedule: Schedule, ready: list[ActiveRequest], mix_free_with_constrained: bool):
        """Choose whose drafts are verified, and for whom the next ones are made, where requests are constrained.

        The host has to see drafts before they are verified, so those of one schedule are verified in the next. Free requests
        that are not mixed with constrained ones are decoded by programs of their own, behind these. If shapes are pinned,
        they never are: a neighbour must not decide which program computes a text.
        """
        schedule.verifying = [active for active in ready if active.proposed]
        for active in schedule.verifying:
            active.unread_rounds += 1  # whose log the host reads before the next schedule
        lasting = [active for active in ready if active.length + active.unread_rounds < active.limit]
        constrained = [active for active in lasting if active.request.constraint is not None]
        together = lasting if mix_free_with_constrained and constrained else constrained
        schedule.drafting = together[: self._config.max_batch]
        for active in self._in_rows():
            active.proposed = active in schedule.drafting

    def _of_one_program(self, ready: list[ActiveRequest]) -> list[ActiveRequest]:
        """The requests that the next call may decode together.

        If shapes are pinned, requests that need processing alternate with those that do not: a neighbour that needs it must
        not decide which program computes a text.
        """
        if not self._config.pins_shapes or len({active.request.needs_processing for active in ready}) < 2:
            return ready
        turn, self._processing_turn = self._processing_turn, not self._processing_turn
        return [active for active in ready if active.request.needs_processing == turn]

    def _cache_text(self, active: ActiveRequest):
        """Register the text of a request that has ended in the prefix cache, as far as no round would write it again.

        The drafter has not read the last tokens: those of its last round with drafts, and those of a call without drafts
        that ended the request.
        """
        request = active.request
        slots = min(active.length, self._config.max_len - 1) - self._unread - 2
        if slots > len(request.prompt):
            self.pages.register([*request.prompt, *active.tokens], active.pages, slots, request.salt)

    def _in_rows(self) -> list[ActiveRequest]:
        return [active for active in self.rows if active is not None]

    def _first_free_row(self) -> int | None:
        return next((row for row, active in enumerate(self.rows) if active is None), None)

    def _assign(self, active: ActiveRequest, row: int, pages: list[int]):
        active.row, active.pages, self.rows[row] = row, pages, active

    def _free(self, active: ActiveRequest):
        self.pages.release(active.pages)
        if active.row is not None:
            self.rows[active.row] = None
        active.row, active.pages, active.proposed = None, [], False


def _most_senior_first(actives: Iterable[ActiveRequest]) -> list[ActiveRequest]:
    return sorted(actives, key=lambda active: active.seniority)
