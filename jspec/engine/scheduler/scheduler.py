"""Who waits, who is read, who decodes, who is preempted, and with which pages: decisions on the host, on numbers alone.

Nothing here needs JAX. The scheduler decides; ``engine/runner/model_runner.py`` carries out.

The host is one call behind the device: when it decides on a call, it has not read the logs of the call before. So it
counts with the most tokens that the rounds under way may have committed, and it notices the end of a request one call
late. Programs run in the order in which they are sent. So pages may be given away as soon as the last program that uses
them has been sent.
"""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jspec.config import EngineConfig
from jspec.engine.request import LIVE, ActiveRequest
from jspec.engine.scheduler.page_pool import PagePool
from jspec.engine.scheduler.page_requirements import Needs
from jspec.engine.scheduler.prefill_batching import crowded
from jspec.engine.scheduler.prefill_queue import Reading
from jspec.engine.scheduler.schedule import Move, Plan

if TYPE_CHECKING:
    from jspec.engine.runner.step_io import RoundLog

MOST_ROUNDS_WAITED_FOR = 2  # of a call, while a request waits or is read
MOST_PASSES_IN_A_ROW = 4  # before rounds follow, while many prompts are read


class Scheduler:
    """Keeps the queue, the rows and the pages.

    Requests are served in the order of their priority, then first come, first served. One that needs many pages is not
    overtaken by one that needs few. A request gets a row, and pages for its prompt and its first rounds, when it enters;
    further pages follow as its text grows. If there are none, the youngest request is preempted: one whose prompt is
    still being read begins anew, and one that decodes is swapped to host memory. Those that were preempted come back
    before anybody else enters.

    There are a few rows more than a call decodes. They are for requests whose prompts are read ahead, and which decode as
    soon as others have ended.

    Args:
      config: how many rows and pages there are, and how long a text may become.
      num_draft_tokens: K, the most drafts of a round. A round writes its drafts behind the newest token, and may do so
        past the end of the request, so these slots are counted.
      looks_ahead: whether slot i of the drafter's cache depends on token i + 1, as in heads that are fed features.
      swap_pages: how many pages host memory may hold.
      rests: whether there are calls without drafts, whose tokens the drafter reads later.
      pages: the pages and what they hold; None makes a pool.
      slots_beyond: as ``Drafter.slots_beyond``.

    Attributes:
      waiting: requests that have no row yet, as a heap by seniority.
      swapped: requests in host memory.
      ending: requests that rounds under way end for sure. Their rows are given to others at once; their pages are kept
        until the host knows their last tokens.
      rows: who is in each row of the batch, None for a free row.
      pages: the pages and what they hold.
      needs: how many slots and pages requests need.
      reading: who reads which part of which prompt, and finds which.
      num_preemptions: how many requests have been preempted so far.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_draft_tokens: int,
        looks_ahead: bool = False,
        swap_pages: int = 0,
        rests: bool = False,
        pages: PagePool | None = None,
        slots_beyond: int = 0,
    ):
        self._unread = num_draft_tokens + 1 + rests * config.rounds  # tokens at the end that a drafter has not read
        self._config, self._swap_pages = config, swap_pages
        if pages is None:
            pages = PagePool(config.pool_pages - 1, config.page_size, config.prefix_cache, looks_ahead)
        self.pages, self.reading = pages, Reading(config, pages)
        self.needs = Needs(config, num_draft_tokens, pages, slots_beyond)
        self.num_preemptions = 0
        self.waiting: list[tuple[tuple[int, int], ActiveRequest]] = []
        self.clear()

    def clear(self):
        """Forget every request but those that wait, and have all rows and pages free and no prefix known.

        An interrupted ``clear`` can be repeated.
        """
        self.rows: list[ActiveRequest | None] = [None] * self._config.num_rows
        self.swapped: list[ActiveRequest] = []
        self.ending: list[ActiveRequest] = []
        self.pages.clear()
        self.reading.clear()
        self._passes_since_call = 0
        self._processing_turn = False  # whether the next call is for requests that need processing, if there are others

    @property
    def under_way(self) -> list[ActiveRequest]:
        """The requests that have entered: those in rows, those in host memory, and those whose end is under way."""
        return [*self._seated(), *self.swapped, *self.ending]

    @property
    def unfinished(self) -> bool:
        """Whether any request waits or is under way."""
        return bool(self.waiting) or bool(self.under_way)

    def has_room(self, arriving: int = 0) -> bool:
        """Whether one more request may wait, beside others that are about to be added. One for which a row is free does
        not wait for long, and is not counted."""
        most = self._config.max_waiting
        return most is None or len(self.waiting) + arriving < most + sum(row is None for row in self.rows)

    @property
    def pages_swapped(self) -> int:
        """How many pages are in host memory."""
        return sum(active.num_saved_pages for active in self.swapped)

    def add(self, active: ActiveRequest):
        """Let a request wait, which ``needs.check`` has passed."""
        active.limit, active.most_slots = (
            active.request.limit(self._config.max_len),
            self.needs.most_slots(active.request),
        )
        heapq.heappush(self.waiting, (active.seniority, active))

    def plan(self) -> Plan:
        """Decide what the device does next, and take rows and pages for it.

        Raises:
          RuntimeError: requests wait, but nobody is under way and nobody can enter.
        """
        plan = Plan()
        self._let_go()
        busy = bool(self.waiting or self.swapped or any(not active.decoding for active in self._seated()))
        rounds = min(self._config.rounds, MOST_ROUNDS_WAITED_FOR) if busy else self._config.rounds
        preempted_before = self.num_preemptions
        short = self._grow(rounds, plan)
        if self.num_preemptions == preempted_before and not short:  # pages taken from somebody are for those who grow
            self._return(rounds, plan)
            if not self.swapped:
                self._enter()
        self._choose_pass(plan)
        if self._calls_now(plan):
            able = [active for active in self._seated() if active.decoding and active not in short]
            able.sort(key=lambda active: active.seniority)
            free = self._of_one_program([active for active in able if active.request.constraint is None])
            plan.decoding = free[: self._config.max_batch]
            self._choose_constrained(plan, [active for active in able if active.request.constraint is not None])
            begins = any(not active.tokens and not active.unread_rounds for active in plan.decoding)
            plan.rounds = min(rounds, 1) if begins or plan.drafting or plan.judging else rounds
        for active in plan.decoding:
            active.unread_rounds += plan.rounds
        if self.waiting and not self.under_way:
            raise RuntimeError(
                f"{len(self.waiting)} requests wait, nobody is under way and nobody can enter; "
                f"{self.pages.available} pages are available"
            )
        return plan

    def sent(self, plan: Plan):
        """Take notice that the programs of a plan have been sent, so that other prompts may find what its pass reads."""
        self.reading.sent(plan.segments)

    def follow(self, decoded: Sequence[ActiveRequest], rounds: int, logs: "RoundLog") -> list[tuple[int, int]]:
        """Take notice of what one call did.

        Args:
          decoded: the requests that the call decoded, in the order of its rows.
          rounds: how many rounds it was asked for.
          logs: its rounds on the host, fields ``[rounds, b]``.

        Returns:
          how many drafts the target verified and how many of them it accepted, in any order, one pair for every row and
          round that counts; those of requests that want few drafts are left out, because they say nothing of drafts that
          were not verified.

        Raises:
          RuntimeError: the device made no round although a request has not ended, so that it would never end.
        """
        live, judged, made = [], [], 0
        for active, log in zip(decoded, logs.by_row(), strict=False):
            active.unread_rounds -= rounds
            if active.outcome == LIVE:
                live.append(active)
                followed = len(active.accepted)
                active.follow(log)
                made += len(active.accepted) - followed
                if active.request.params.max_drafts is None:
                    judged += zip(active.drafted[followed:], active.accepted[followed:], strict=True)
        if live and not made and all(active.outcome == LIVE for active in live):
            rows = [active.row for active in live]
            raise RuntimeError(f"the device made no round, although the requests in rows {rows} have not ended")
        return judged

    def leave(self, active: ActiveRequest):
        """Let a request go that has ended or is given up, wherever it is."""
        if active in self.swapped:
            self.swapped.remove(active)
            active.saved = None
        elif active.row is not None or active in self.ending:
            if active.decoding and not self._config.reproducible:
                self._keep_for_later(active)
            if active.row is None:
                self.ending.remove(active)
            self._vacate(active)
        else:
            self.waiting = [entry for entry in self.waiting if entry[1] is not active]
            heapq.heapify(self.waiting)

    def _let_go(self):
        """Take the rows from requests that rounds under way end for sure: each round commits at least one token."""
        for active in self._seated():
            if active.decoding and active.length + active.unread_rounds >= active.limit:
                self.rows[self._row_of(active)] = active.row = None
                self.ending.append(active)

    def _grow(self, rounds: int, plan: Plan) -> list[ActiveRequest]:
        """Give each request that decodes pages for its next rounds, and preempt others where there are none.

        Returns:
          those that must sit out, because there are no pages and host memory is full.
        """
        short = []
        for active in sorted(self._seated(), key=lambda active: active.seniority):
            if active.row is None or not active.decoding:
                continue  # it was preempted meanwhile, or is being read
            missing = self.needs.pages_for(active, rounds) - len(active.pages)
            while missing > self.pages.available and active.row is not None:
                if not self._preempt(plan):
                    break
            if active.row is not None and missing > self.pages.available:
                short.append(active)
            elif active.row is not None and missing > 0:
                active.pages += self.pages.take(missing)
        return short

    def _preempt(self, plan: Plan) -> bool:
        """Take row and pages from the youngest request; returns False if host memory has no room for it."""
        youngest = max(self._seated(), key=lambda active: active.seniority)
        if not youngest.decoding:
            self._vacate(youngest)
            youngest.num_read = youngest.num_cached_tokens = 0
            self.add(youngest)
        else:
            if self.pages_swapped + len(youngest.pages) > self._swap_pages:
                return False
            plan.leaving.append(Move(youngest, self._row_of(youngest), list(youngest.pages)))
            youngest.num_saved_pages = len(youngest.pages)
            self._vacate(youngest)
            self.swapped.append(youngest)
        youngest.num_preemptions += 1
        self.num_preemptions += 1
        return True

    def _return(self, rounds: int, plan: Plan):
        """Let those come back whose state is in host memory, the most senior first."""
        for active in sorted(self.swapped, key=lambda active: active.seniority):
            row, needed = self._free_row(), max(self.needs.pages_for(active, rounds), active.num_saved_pages)
            if row is None or needed > self.pages.available:
                return
            self.swapped.remove(active)
            self._seat(active, row, self.pages.take(needed))
            plan.returning.append(Move(active, row, active.pages[: active.num_saved_pages]))

    def _enter(self):
        """Give free rows, and pages, to requests that wait."""
        while self.waiting:
            active, row = self.waiting[0][1], self._free_row()
            if row is None or not self.needs.may_commit([*self.under_way, active], self._swap_pages):
                return
            found = self.reading.find(active)
            missing = self.needs.pages_for(active, 1) - len(found)
            if missing > self.pages.available:
                self.pages.release(found)
                return
            heapq.heappop(self.waiting)
            self._seat(active, row, [*found, *self.pages.take(missing)])
            self.reading.begin(active, len(found))

    def _choose_pass(self, plan: Plan):
        """Choose what the prefill pass reads, if there is one, and who enters the batch with it."""
        reading = sorted(
            (active for active in self._seated() if not active.decoding), key=lambda active: active.seniority
        )
        plan.segments = self.reading.choose(reading, sum(active.decoding for active in self._seated()))
        plan.entering = [active for active in reading if active.num_read >= active.num_to_read]
        for active in plan.entering:
            active.decoding = True

    def _calls_now(self, plan: Plan) -> bool:
        """Whether rounds follow the pass. While many prompts are read, a few passes come first."""
        reading = sum(not active.decoding for active in self._seated())
        wait = plan.segments and crowded(reading, sum(active.decoding for active in self._seated()))
        self._passes_since_call += 1
        if wait and self._passes_since_call < MOST_PASSES_IN_A_ROW:
            return False
        self._passes_since_call = 0
        return True

    def _choose_constrained(self, plan: Plan, able: list[ActiveRequest]):
        """Draft for the constrained requests, or have their drafts judged.

        Between the two the host has to see the drafts. While the device waits for that, it decodes the others: those who
        draft in one plan are judged in the next. If there are no others, one plan does both.
        """
        plan.judging = [active for active in able if active.proposed]
        if not plan.judging:
            plan.drafting = able[: self._config.max_batch]
            if not plan.decoding:
                plan.judging = plan.drafting
        for active in self._seated():
            active.proposed = active in plan.drafting and active not in plan.judging
        for active in plan.judging:
            active.unread_rounds += 1  # which the host reads before the next plan

    def _of_one_program(self, able: list[ActiveRequest]) -> list[ActiveRequest]:
        """Those that the next call may decode together.

        If ``reproducible``, requests that need processing take turns with those that do not: whether a neighbour needs it
        must not decide which program computes a text.
        """
        if not self._config.reproducible or len({active.request.needs_processing for active in able}) < 2:
            return able
        turn, self._processing_turn = self._processing_turn, not self._processing_turn
        return [active for active in able if active.request.needs_processing == turn]

    def _keep_for_later(self, active: ActiveRequest):
        """Let later prompts find the text of a request that has ended, as far as no round would write it again.

        The drafter has not read the last tokens: those of its last round with drafts, and those of a call without drafts
        that ended the request.
        """
        request = active.request
        slots = min(active.length, self._config.max_len - 1) - self._unread - 2
        if slots > len(request.prompt):
            self.pages.register([*request.prompt, *active.tokens], active.pages, slots, request.salt)

    def _seated(self) -> list[ActiveRequest]:
        return [active for active in self.rows if active is not None]

    def _free_row(self) -> int | None:
        return next((row for row, active in enumerate(self.rows) if active is None), None)

    def _row_of(self, active: ActiveRequest) -> int:
        assert active.row is not None
        return active.row

    def _seat(self, active: ActiveRequest, row: int, pages: list[int]):
        active.row, active.pages, self.rows[row] = row, pages, active

    def _vacate(self, active: ActiveRequest):
        self.pages.release(active.pages)
        if active.row is not None:
            self.rows[active.row] = None
        active.row, active.pages, active.proposed = None, [], False
