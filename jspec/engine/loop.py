"""The engine's steps: the scheduler decides, the model runner executes, and new tokens are noted for the subscribers."""

import collections
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jspec.config import EngineConfig
from jspec.engine.adaptive.controller import Controller
from jspec.engine.adaptive.cost_table import RoundShape, drafts_of
from jspec.engine.metrics import Meter
from jspec.engine.pausing import NotServing
from jspec.engine.request import ABORTED, FAILED, LIVE, ActiveRequest, Progress, Request
from jspec.engine.runner.model_runner import ModelRunner
from jspec.engine.runner.split_rounds import Dispatched
from jspec.engine.scheduler.schedule import Schedule
from jspec.engine.scheduler.scheduler import Scheduler


class Loop:
    """Scheduler, runner and controller together, for one thread.

    Args:
      runner: has the weights, the programs, and the state on the device.
      config: what may be used.
      draft_lengths: every K of chains that may be chosen between calls; None leaves no choice.
      costs: for each of ``config.batch_buckets``, round shape -> seconds per round; None has them measured.
      drafts_decide: whether the text of a seed depends on its drafts.

    Attributes:
      runner, config: as given.
      scheduler: decides who enters which row with which pages.
      controller: chooses the round shape before each call; None if there is no choice, or before costs are known.
      meter: counts.
      weights_version: the version of the weights that rounds have.
      incomplete: why the weights are no model's, in words; None if they are whole. Then no request is served.
      replacing: whether the thread writes weights right now, so that whoever comes may wait for it.
      progress: what has happened to requests and was not taken yet, the oldest first.
      next_order: gives a request its number among all requests of the engine. Any thread may call it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        draft_lengths: Sequence[int] | None,
        costs: Mapping[int, Mapping[RoundShape, float]] | None,
        drafts_decide: bool = True,
    ):
        self.runner, self.config, self._drafts_decide = runner, config, drafts_decide
        self.scheduler = Scheduler(
            config,
            runner.num_draft_tokens,
            runner.looks_ahead,
            runner.swap_pages,
            plain_rounds=draft_lengths is not None and 0 in draft_lengths,
            slots_beyond=runner.slots_beyond,
            states=runner.swap_pages_of_states,
            most_snapshots=runner.most_snapshots,
        )
        self.controller: Controller | None = None
        # Rows of a program -> its round shapes, in ascending order of K.
        self._shapes = {b: runner.batch.builder.round_shapes(b) for b in config.batch_buckets}
        self._chooses = any(len(shapes) > 1 for shapes in self._shapes.values())
        if self._chooses and costs is not None:
            self.controller = Controller({b: {one: costs[b][one] for one in self._shapes[b]} for b in self._shapes})
        self.meter = Meter(runner.num_draft_tokens)
        self.weights_version: int | str = 0
        self.incomplete: str | None = None
        self.replacing = False
        self.progress: list[Progress] = []
        self.next_order: Callable[[], int] = functools.partial(next, itertools.count())
        self._dispatched: collections.deque[Dispatched] = collections.deque()  # sent, but not read yet
        # Whether free requests are best decoded with the most drafts, by the programs of constrained ones.
        self._mix_free_with_constrained = True

    def submit(self, request: Request, subscriber: Any = None, order: int | None = None) -> ActiveRequest:
        """Let a request wait, which ``PageRequirements.check`` has passed.

        Args:
          request: what was asked for.
          subscriber: who has submitted it.
          order: its number; None takes the next one.
        """
        active = ActiveRequest(request, self.next_order() if order is None else order, subscriber)
        self.scheduler.add(active)
        return active

    def step(self, when_sent: Callable[[], None] = lambda: None):
        """Decide, send one call, and read the call before it, whose progress is noted.

        So the device has a call to work on while the host looks at the one before. An exception ends the requests that are
        under way; if there are none, those that wait, for which the same would happen again.

        Args:
          when_sent: is called before the host waits for the device.
        """
        try:
            self.require_weights()
            if self._chooses and self.controller is None:
                self.warmup()
            schedule, shape, trying = self._decide()
            self.runner.compile_for(schedule, shape)  # may take minutes
            self._execute(schedule, shape, trying, when_sent)
        except Exception as error:
            self.fail(error, waiting=self.incomplete is not None or not self.scheduler.under_way)

    def abort(self, actives: Iterable[ActiveRequest]):
        """Let those of the requests go that have not ended."""
        for active in actives:
            if active.outcome == LIVE:
                self.scheduler.remove(active)
                self._end(active, ABORTED)

    def take_progress(self) -> list[Progress]:
        """What has happened to requests since this was last asked."""
        progress, self.progress = self.progress, []
        return progress

    def warmup(self):
        """Compile and run all programs, and measure costs that are not known. No request may be under way.

        Raises:
          RuntimeError: the device does not recover from an exception.
          Exception: what compiling or running one of them raised.
        """
        self._dispatched.clear()  # of requests that have ended
        pages = self.scheduler.pages
        try:
            slots = pages.pages(self.runner.num_draft_tokens + 2)  # of a round behind one token
            held = pages.take(min(slots, pages.available, self.config.pages_per_row))
            self.runner.warmup(held)
            pages.release(held)
            if self._chooses and self.controller is None:
                self.controller = Controller(self.runner.costs())
                pages.forget_prefixes()  # measuring wrote over them
        except Exception as error:
            self.fail(error)
            raise

    def replace_draft(self, draft_model: Any):
        """Draft with a model of other weights, also for the requests that are under way.

        Raises:
          ValueError: its arrays differ in number, shape or dtype from those of the model that it replaces.
        """
        self.runner.replace_draft(draft_model)
        self.forget_weights()
        for active in self.scheduler.under_way:
            active.redrafted |= self._drafts_decide

    def forget_weights(self, recompute: bool = False):
        """Forget what was computed with weights that were replaced. Requests under way keep their own pages, unless
        ``recompute`` has them read their texts again."""
        while self._dispatched:
            self._read(self._dispatched.popleft())
        if recompute:
            self._end_failed()
            self.runner.split_rounds.forget()
            self.scheduler.begin_anew()
        for active in self.scheduler.under_way:
            if not active.versions and active.num_prefilled:  # keys and values of its prompt are of the old ones
                active.versions.append((self.weights_version, 0))
        self.scheduler.pages.forget_prefixes()
        if self.controller is not None:  # what the old weights taught it says nothing of the new
            self.controller = Controller(self.controller.seconds)

    def require_weights(self):
        """Raise ``NotServing`` if the weights are no model's, and are not being written."""
        why = None
        for _ in range(2):  # a write may begin between a look at one and at the other
            if self.replacing or (why := self.incomplete) is None:
                return
        raise NotServing(f"weights incomplete: {why}; call update_weights() with all of them, or restore()")

    def leave_device(self):
        """Forget what the device has done and keeps. No request may be under way."""
        self._dispatched.clear()
        self.runner.split_rounds.forget()
        self.scheduler.pages.forget_prefixes()

    def fail(self, error: BaseException, waiting: bool = False):
        """Fail every request that is under way, and those that wait if ``waiting``; then have a sound state, whatever was.

        Raises:
          RuntimeError: the device does not recover.
        """
        self._dispatched.clear()
        for active in [*self.scheduler.under_way, *(active for _, active in self.scheduler.waiting if waiting)]:
            if active.outcome == LIVE:
                self._end(active, FAILED, error)
        if waiting:
            self.scheduler.waiting.clear()
        self.scheduler.clear()
        try:
            self.runner.restore()
        except Exception as failure:
            raise RuntimeError(
                f"the engine cannot go on: its device failed, and its state could not be made again ({failure}); load the "
                "model again"
            ) from error

    def _decide(self) -> tuple[Schedule, RoundShape, bool]:
        """A schedule, the shape of its rounds, and whether the next choice of a shape waits for them."""
        schedule = self.scheduler.schedule(self._mix_free_with_constrained)
        now = time.perf_counter()
        for active in self.scheduler.under_way:
            if active.times.admitted != active.times.admitted:  # NaN
                active.times.admitted = now
                self.meter.admitted(active)
        shape, trying = self.runner.num_draft_tokens, False
        free = schedule.decoding or [active for active in schedule.drafting if active.request.constraint is None]
        if free and not any(active.request.needs_processing for active in free):
            shape, trying = self._round_shape(free)
            self._mix_free_with_constrained = drafts_of(shape) == self.runner.num_draft_tokens
        return schedule, shape, trying and bool(schedule.decoding)

    def _round_shape(self, decoding: Sequence[ActiveRequest]) -> tuple[RoundShape, bool]:
        """The round shape for these requests, and whether it is a trial whose outcome the next choice waits for."""
        bucket, trying = self.config.bucket(len(decoding)), False
        shape = self._shapes[bucket][-1]  # of the most drafts
        if self.controller is not None:
            shape = self.controller.choose(bucket, [(active.drafted, active.accepted) for active in decoding])
            trying = self.controller.trying
        wanted = max(active.request.max_drafts for active in decoding)
        enough = min((K for K in self.runner.draft_lengths if wanted <= K), default=self.runner.num_draft_tokens)
        if enough < drafts_of(shape):  # as many as each of the requests wants
            shape = next(one for one in self._shapes[bucket] if drafts_of(one) == enough)
        return shape, trying

    def _execute(self, schedule: Schedule, shape: RoundShape, trying: bool, when_sent: Callable[[], None]):
        sent = self.runner.execute(schedule, shape)
        self.scheduler.dispatched(schedule)
        for rounds in sent:
            self.meter.called(len(rounds.decoded))
        self._dispatched += sent
        self._end_failed()
        when_sent()
        # The choice after a trial waits for it, and the next drafts are verified under what came of those before. Where no
        # other rounds were sent, there is nothing to be ahead with.
        ahead = 1 if schedule.decoding and not trying else 0
        while len(self._dispatched) > ahead:
            self._read(self._dispatched.popleft())
        self.runner.split_rounds.verify_pass()
        self._end_failed()

    def _end_failed(self):
        """End the requests whose constraints have raised."""
        for active, error in self.runner.split_rounds.failures():
            if active.outcome == LIVE:
                self.scheduler.remove(active)
                self._end(active, FAILED, error)

    def _read(self, call: Dispatched):
        """Wait for a call, and note what it did."""
        logs = self.runner.read(call.logs)
        if call.places is not None:
            logs = logs.of_rows(call.places)
        before = [len(active.tokens) if active.outcome == LIVE else -1 for active in call.decoded]
        judged = self.scheduler.update(call.decoded, call.rounds, logs)
        if self.controller is not None and call.shape is not None and logs.num_rounds:
            verified, accepted = zip(*judged, strict=True) if judged else ((), ())
            self.controller.observe(call.shape, logs.num_rounds, accepted, verified)
        for active, seen in zip(call.decoded, before, strict=True):
            if seen < 0:
                continue  # it had ended before this call, whose rounds for it do not count
            if active.outcome != LIVE:
                self.scheduler.remove(active)
            self._note(active, seen)

    def _note(self, active: ActiveRequest, seen: int):
        """Note the tokens of a request behind the first ``seen``, or its end."""
        new = active.tokens[seen:]
        if new and (not active.versions or active.versions[-1][0] != self.weights_version):
            active.versions.append((self.weights_version, seen))
        finished = active.outcome != LIVE
        self.meter.progressed(active, len(new), finished)
        if finished or new:
            self.progress.append(Progress(active, new, finished, seen))

    def _end(self, active: ActiveRequest, outcome: int, error: BaseException | None = None):
        active.outcome, active.error = outcome, error
        self._note(active, len(active.tokens))
