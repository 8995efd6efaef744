"""What callers use: requests arrive, stream and are given up, in any thread, while the loop serves all of them."""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax

from jspec.config import EngineConfig, count
from jspec.drafting.base import Drafter
from jspec.engine.adaptive.controller import Controller
from jspec.engine.adaptive.cost_table import RoundShape
from jspec.engine.inbox import Inbox, Progress
from jspec.engine.loop import Loop
from jspec.engine.metrics import Metrics
from jspec.engine.multihost.leader import require_leading
from jspec.engine.processor import Frontend
from jspec.engine.request import FAILED, LIVE, ActiveRequest, Request
from jspec.engine.runner.model_runner import ModelRunner
from jspec.engine.runner.programs import Budgets, verify_every_draft
from jspec.engine.runner.recompilation_guard import CompilationGuard
from jspec.engine.scheduler.scheduler import Scheduler
from jspec.engine.turns import Turn
from jspec.models.protocols import Target
from jspec.outputs import Delta, Result
from jspec.sampling.params import SamplingParams
from jspec.sampling.streams import RoundNoise
from jspec.text.prompts import Prompt


class QueueFull(RuntimeError):
    """As many requests wait as ``max_waiting`` allows."""


PATIENCE = 0.01  # seconds between two looks into an inbox, while another thread steps the engine
MOMENT = 1e-4  # seconds in which a thread that waits for the turn can take it


class Engine:
    """Decodes requests, up to ``config.max_batch`` at a time, as they come.

    Any thread may call it. Whoever waits for something steps the engine for everybody, one thread at a time, and each
    owner of requests learns of its own through an ``Inbox``.

    Whatever ends a caller early, an exception or Ctrl-C at any point, the next caller finds a sound engine. Ctrl-C is
    held off while a step decides and sends. What cannot be held off fails the requests that were under way.

    Args:
      target: a ``Decoder`` or its like.
      draft_model: a model whose arrays the drafter needs, or None.
      make_drafter: builds the drafter around target and draft model, inside a trace; given a number of drafts as well,
        one that drafts so many.
      verify: the name of a verification rule.
      config: what may be used.
      noise: where the noise of a round comes from.
      draft_lengths: every K that the engine may choose between calls, 0 and the drafter's own among them; None leaves
        no choice.
      costs: for each of ``config.batch_buckets``, way of making rounds -> seconds per round, for every way to choose from;
        None measures them in ``warmup``, or before the first request.
      frontend: makes requests of prompts, and deltas and results of tokens. None leaves ``add`` without a tokenizer.
      budgets: for so many rows and a K, how many tokens the target may read in a round, None for all; the engine chooses
        where there are several.

    Attributes:
      config: what may be used.
      frontend: knows the tokenizer.
      guard: notices what is compiled after ``warmup``, and warns; ``guard.on_compile = "raise"`` makes it an error.
    """

    def __init__(
        self,
        target: Target,
        draft_model: Any,
        make_drafter: Callable[..., Drafter],
        verify: str,
        config: EngineConfig,
        noise: Callable[..., RoundNoise] = RoundNoise,
        draft_lengths: Sequence[int] | None = None,
        costs: Mapping[int, Mapping[RoundShape, float]] | None = None,
        frontend: Frontend | None = None,
        budgets: Budgets = verify_every_draft,
    ):
        self.config = config
        runner = ModelRunner(target, draft_model, make_drafter, verify, config, noise, draft_lengths, budgets)
        self._loop = Loop(runner, config, draft_lengths, costs)
        self.frontend = frontend or Frontend(
            None, target.config.vocab_size, target.config.eos_token_ids, max_len=config.max_len
        )
        self._added = Inbox(streams=True)  # of the requests that ``add`` was called for
        self.guard = CompilationGuard()
        self._abandoned: collections.deque[Inbox] = collections.deque()  # of owners that have left
        self._turn = Turn()

    @property
    def scheduler(self) -> Scheduler:
        """What decides who enters which row with which pages."""
        return self._loop.scheduler

    @property
    def runner(self) -> ModelRunner:
        """What has the weights, the programs, and the state on the device."""
        return self._loop.runner

    @property
    def controller(self) -> Controller | None:
        """What chooses how rounds are made before each call; None if there is no choice, or before costs are known."""
        return self._loop.controller

    @controller.setter
    def controller(self, controller: Controller | None):
        self._loop.controller = controller

    @property
    def num_draft_tokens(self) -> int:
        """K, the largest if there are several."""
        return self.runner.num_draft_tokens

    @property
    def width(self) -> int:
        """How many query tokens the target reads for each row in a round, for that K."""
        return self.runner.width

    @property
    def longest_text(self) -> int | None:
        """How many tokens a text may have for the drafter to draft after it; None if it has no limit."""
        return self.runner.longest_text

    @property
    def num_compilations(self) -> int:
        """How many programs are compiled by now, and how many a step compiled after ``warmup`` that should not have."""
        return self.runner.num_compilations + self.guard.count

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        key: jax.Array | None = None,
        priority: int = 0,
        salt: str = "",
        **options,
    ) -> Request:
        """The request that a caller asks for, which can be served. Nothing is started yet.

        ``add``, ``jspec.stream`` and ``AsyncEngine.generate`` take the same arguments and pass them on to here.

        Args:
          prompt: text, token ids, or vLLM's dictionary of either.
          params: how to sample, and when to end.
          key: a JAX key, instead of ``params.seed``. With neither, a fresh key is drawn.
          priority: requests with a lower number go first.
          salt: only requests with the same salt share cached pages of their prompts, so that a tenant cannot find out by
            the time that it takes what others have asked.
          **options: fields of ``SamplingParams`` by name, instead of ``params``; fields that are not given come from
            ``LLM.default_sampling_params``.

        Raises:
          ValueError: the prompt is empty, too long, or several, or a value is out of range.
          TypeError: an option is unknown or given twice. The message says what may have been meant.
        """
        request = self.frontend.single(prompt, params, options, key, priority, salt)
        self.check(request)
        return request

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        key: jax.Array | None = None,
        priority: int = 0,
        salt: str = "",
        **options,
    ) -> int:
        """Let a request wait, and return its id. ``step`` serves it, beside all others.

        Args:
          prompt, params, key, priority, salt, **options: as for ``request``.

        Raises:
          ValueError: the prompt or an argument cannot be used.
          TypeError: an option is unknown or given twice. The message says what may have been meant.
          QueueFull: ``max_waiting`` requests wait already.
        """
        request = self.request(prompt, params, key=key, priority=priority, salt=salt, **options)
        self.require_room()
        return self.submit(request, self._added).order

    def step(self) -> list[Delta]:
        """What is new of the requests that were added: at most one call to the device of news, empty if nothing is new yet.

        It serves all requests of the engine, also those of other callers, but returns only what concerns requests made
        with ``add``. A request that ends early, an error of the device included, ends with a delta that says so.
        """
        return self.deltas(self.advance(self._added))

    def abort(self, id: int):
        """Give up a request that was added, wherever it is. Its last delta, of the next ``step``, says ``abort``.

        Nothing happens if it has ended already.
        """
        active = self._added.unfinished.get(id)
        if active is not None:
            self.give_up([active])

    @property
    def unfinished(self) -> bool:
        """Whether ``step`` has anything more to return: a request that was added has not ended, or was not told."""
        return bool(self._added.unfinished or self._added.items)

    def metrics(self) -> Metrics:
        """What the engine is doing and has done, in numbers."""
        return self._loop.meter.metrics(self.scheduler, self.num_compilations)

    def check(self, request: Request):
        """Raise a ValueError, with numbers, if the request can never be served.

        Raises:
          RuntimeError: this process follows another, which is the one to ask.
        """
        require_leading(self.runner.group)
        self.scheduler.requirements.check(request)

    def require_room(self, arriving: int = 0):
        """Raise ``QueueFull`` unless one more request may wait, beside others that are about to be submitted."""
        if not self.scheduler.has_room(arriving):
            most = self.config.max_waiting
            raise QueueFull(f"max_waiting={most} requests wait already; try again later, or load with more")

    def submit(self, request: Request, inbox: Inbox) -> ActiveRequest:
        """Let a request wait, which ``check`` has passed, and whose progress goes to ``inbox``."""
        return self._in_turn(lambda: self._loop.submit(request, inbox))

    def advance(self, inbox: Inbox) -> list[Progress]:
        """What has happened to the requests of an inbox that has any; a step of the engine, if nothing has yet.

        While another thread steps the engine, this one waits for its own requests' progress.
        """
        inbox.thread = threading.current_thread()
        while not self._has_advanced(inbox):
            time.sleep(MOMENT)  # for those who go first
        return inbox.taken()

    def give_up(self, actives: Iterable[ActiveRequest]):
        """Give up those of the requests that have not ended. Their owners are told that they were aborted."""
        self._in_turn(lambda: self._loop.abort(list(actives)))

    def leave(self, inbox: Inbox):
        """Give up what an owner has not finished who looks into its inbox no more.

        This happens at once, or with the next step: if this thread is in the middle of one, or if it fails now.
        """
        if inbox.unfinished:
            self._abandoned.append(inbox)
            holder = self._turn.holder
            if holder is None or holder.thread is not threading.current_thread():
                self._in_turn(self._sweep)

    def deltas(self, news: Iterable[Progress]) -> list[Delta]:
        """The progress of requests for their owners, with text. A tokenizer that raises ends its request alone."""
        return [self.delta(progress) for progress in news if not progress.active.end_delivered]

    def delta(self, progress: Progress) -> Delta:
        """The progress of a request that has not been told to have ended."""
        active, token_ids, finished, start = progress
        about = active.order, active, token_ids, start
        try:
            delta = self.frontend.delta(*about, finished, self.longest_text, self.num_draft_tokens)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of the Rust code in tokenizers is no Exception
            self._in_turn(lambda: self._loop.abort([active]))
            active.outcome, active.error = FAILED, error
            delta = self.frontend.delta(*about, True, self.longest_text, self.num_draft_tokens)
        active.end_delivered = delta.finished
        return delta

    def result(self, active: ActiveRequest) -> Result:
        """The result of a request that has ended."""
        return self.frontend.result(active, self.longest_text, self.num_draft_tokens)

    def follow(self, requests: Sequence[Request], streams: bool) -> Generator[Progress, None, None]:
        """Serve requests, beside those of other callers; yield their progress, or only their ends unless ``streams``.

        Requests that have not ended when the generator is closed are given up.

        Raises:
          ValueError: a request that can never be served, before any is started.
        """
        for request in requests:
            self.check(request)
        inbox, pending = Inbox(streams), collections.deque(requests)
        try:
            try:
                while pending or inbox.unfinished or inbox.items:
                    while pending and (self.scheduler.has_room() or not inbox.unfinished):
                        self.submit(pending[0], inbox)
                        pending.popleft()
                    yield from self.advance(inbox)
            finally:
                self.leave(inbox)
        finally:  # an interrupt may have come at the first of the two
            self.leave(inbox)

    def stream(self, request: Request) -> Generator[Delta, None, None]:
        """Serve a request, beside those of other callers; yield what is new of it after each call to the device."""
        with contextlib.closing(self.follow([request], streams=True)) as news:
            for progress in news:
                yield from self.deltas([progress])

    def run(self, requests: Sequence[Request]) -> Generator[ActiveRequest, None, None]:
        """Serve requests, beside those of other callers; yield each when it has ended.

        Raises:
          ValueError: a request that can never be served, before any is started.
          Exception: what ended one of the requests, an error of the device for example; the others are given up.
        """
        with contextlib.closing(self.follow(requests, streams=False)) as ends:
            for active, *_ in ends:
                if active.error is not None:
                    raise active.error
                yield active

    def warmup(self):
        """Compile all programs, and measure costs that are not known; no later call compiles anything.

        Raises:
          RuntimeError: this thread has requests that have not ended.
        """
        require_leading(self.runner.group)
        self._alone("warmup", self._loop.warmup)
        self.guard.seal()

    def replace_draft(self, draft_model: Any):
        """Draft with a model of other weights from the next request on; nothing is compiled again.

        Raises:
          ValueError: its arrays differ in number, shape or dtype from those of the model that it replaces.
          RuntimeError: this thread has requests that have not ended.
        """
        self._alone("replace_draft", lambda: self._loop.replace_draft(draft_model))

    def _sweep(self):
        """Give up the requests of owners that have left."""
        while self._abandoned:
            self._loop.abort(list(self._abandoned[0].unfinished.values()))
            self._abandoned.popleft()

    def _has_advanced(self, inbox: Inbox) -> bool:
        """Make a step unless the inbox has something by then; returns False if this thread did not get to it in time, or
        if it was the turn of others."""
        turn, caller = self._turn, self._turn.caller(_BUSY)
        try:
            if not inbox.items:
                turn.try_to_take(caller, PATIENCE)
            there_is_more = not inbox.items and bool(inbox.unfinished)
            its_turn = bool(caller.taken) and not turn.others_go_first
            if there_is_more and its_turn:
                try:
                    self._sweep()
                    with self.guard.watching():
                        self._loop.step()
                finally:
                    turn.num_steps += 1
        finally:  # ``Turn`` says why this is no method
            if caller.taken:
                turn.holder = None
                turn.lock.release()
        return its_turn or not there_is_more

    def _in_turn(self, function: Callable[[], Any]) -> Any:
        """Call the function while nobody else has the turn."""
        turn, caller = self._turn, self._turn.caller(_BUSY)
        try:
            turn.take(caller)
            result = function()
        finally:  # ``Turn`` says why this is no method
            try:
                if caller.taken:
                    turn.holder = None
                    turn.lock.release()
            finally:
                turn.waiting.pop(caller, None)
        return result

    def _alone(self, name: str, function: Callable[[], None]):
        """Call the function when no request waits or is under way; requests of other threads are waited for."""
        while not self._in_turn(lambda: self._when_idle(name, function)):
            time.sleep(PATIENCE)

    def _when_idle(self, name: str, function: Callable[[], None]) -> bool:
        self._loop.settle()
        unfinished = self._loop.unfinished
        live = [active for active in unfinished if active.outcome == LIVE]  # others only wait for a plan to be sent
        own = [active for active in live if active.inbox.thread is threading.current_thread()]
        if own:
            raise RuntimeError(
                f"{name}() needs an idle engine, but this thread has {count(len(own), 'request')} under way; let them "
                "end, or give them up, first"
            )
        if unfinished:
            return False
        function()
        return True


_BUSY = "the engine is busy with a step that called this; a callback cannot use the engine that calls it"
