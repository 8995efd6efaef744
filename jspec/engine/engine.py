"""The loop over scheduler and runner: requests wait, enter rows, decode, and leave. It speaks tokens only."""

import collections
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.engine.adaptive import Controller
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.runner import Runner
from jspec.engine.scheduler import Scheduler
from jspec.engine.turns import Turn
from jspec.models.contract import Target
from jspec.sampling.streams import RoundNoise


class Engine:
    """Decodes requests, ``config.max_batch`` at a time.

    Any thread may call it. One caller has it at a time, ``run`` until its generator is exhausted, closed or collected,
    and others wait for it; but who would wait for itself gets a RuntimeError.

    Whatever ends a caller early, an exception or Ctrl-C at any point, the next caller finds the engine as if it were
    new, apart from what is compiled by then.

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
      costs: K -> seconds per round, for every K to choose from; None measures them in ``warmup``, or in the first run.

    Attributes:
      config: what may be used.
      scheduler: decides who enters which row with which pages.
      runner: has the weights, the programs, and the state on the device.
      controller: chooses K before each call; None if there is no choice, or before costs are known.
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
        costs: Mapping[int, float] | None = None,
    ):
        self.config = config
        self.runner = Runner(target, draft_model, make_drafter, verify, config, noise, draft_lengths)
        self.scheduler = Scheduler(config, self.runner.num_draft_tokens)
        self.controller: Controller | None = None
        self._chooses = draft_lengths is not None
        if draft_lengths is not None and costs is not None:
            self.controller = Controller({K: costs[K] for K in draft_lengths})
        self._calls: collections.deque[_Call] = collections.deque()  # sent, but not read yet
        self._settled = True  # whether the last caller came to its end: nobody is in a row, here or on the device
        self._turn = Turn()

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
        """How many programs are compiled by now."""
        return self.runner.num_compilations

    def run(self, requests: Sequence[Request]) -> Generator[ActiveRequest, None, None]:
        """Decode all requests, first come, first served; yield each when it has ended.

        Raises:
          ValueError: a request that can never be served, before any is started.
          RuntimeError: this thread is in the middle of another run; exhaust or close its generator.
        """
        caller = self._turn.caller(
            "the engine is busy: another run has not ended; exhaust or close its generator first"
        )
        for request in requests:
            self.check(request)
        try:
            self._turn.take(caller)
            try:
                self._settle()
                if self._chooses and self.controller is None:
                    self._warmup()
                self._settled = False
                for request in requests:
                    self.scheduler.add(request)
                while self.scheduler.unfinished:
                    for ended in self._step():
                        yield ended
                        caller.thread = threading.current_thread()
                self._calls.clear()
                self._settled = True
            finally:
                if not self._settled:
                    self._forget()
        finally:  # ``Turn`` says why this is no method
            if caller.taken:
                self._turn.holder = None
                self._turn.lock.release()

    def check(self, request: Request):
        """Raise a ValueError, with numbers, if the request can never be served."""
        self.scheduler.check(request)

    def warmup(self):
        """Compile all programs, and measure costs that are not known; no later call compiles anything.

        Raises:
          RuntimeError: this thread is in the middle of a run.
        """
        self._alone("warmup", self._warmup)

    def replace_draft(self, draft_model: Any):
        """Draft with a model of other weights from the next run on; nothing is compiled again.

        Raises:
          ValueError: its arrays differ in number, shape or dtype from those of the model that it replaces.
          RuntimeError: this thread is in the middle of a run.
        """
        self._alone("replace_draft", lambda: self._replace_draft(draft_model))

    def _step(self) -> list[ActiveRequest]:
        """Let requests enter, send one call, and read calls; returns the requests that have ended.

        The last call is read one step later where that changes nothing, so that the device never waits for the host.
        """
        for row, active in self.scheduler.enter():
            self.runner.enter(row, active.request, active.pages)
        if not self.scheduler.occupied:
            raise RuntimeError(
                f"{len(self.scheduler.waiting)} requests wait, no row decodes and none can be given away; "
                f"{self.scheduler.pages.free} pages are free"
            )
        K = self.num_draft_tokens if self.controller is None else self.controller.choose()
        self._calls.append(_Call(K, list(self.scheduler.rows), self.runner.decode(K)))
        trying = self.controller is not None and self.controller.trying  # the next choice waits for this call
        ahead = 1 if self.scheduler.may_send_ahead() and not trying else 0
        ended = []
        while len(self._calls) > ahead:
            ended += self._read(self._calls.popleft())
        return ended

    def _read(self, call: "_Call") -> list[ActiveRequest]:
        """Wait for a call; returns the requests that have ended with it."""
        logs = self.runner.read(call.logs)
        rows, accepted = self.scheduler.follow(call.rows, logs)
        if self.controller is not None:
            self.controller.observe(call.K, logs.num_rounds, accepted)
        ended = self.scheduler.leave(rows)
        if rows:
            self.runner.retire(rows)
        return ended

    def _alone(self, name: str, function: Callable[[], None]):
        """Call the function when nobody else has the turn, on an engine without requests."""
        caller = self._turn.caller(f"{name}() needs an idle engine, but a run of this thread has not ended")
        try:
            self._turn.take(caller)
            self._settle()
            function()
        finally:  # ``Turn`` says why this is no method
            if caller.taken:
                self._turn.holder = None
                self._turn.lock.release()

    def _warmup(self):
        self._settled = False
        self.runner.warmup()
        if self._chooses and self.controller is None:
            self.controller = Controller({K: self.runner.measure(K) for K in self.runner.draft_lengths})
        self._settled = True

    def _replace_draft(self, draft_model: Any):
        self.runner.replace_draft(draft_model)
        if self.controller is not None:  # what the old weights taught it says nothing of the new
            self.controller = Controller(self.controller.seconds)

    def _settle(self):
        """Clear away what a caller left behind that did not come to its end."""
        if not self._settled:
            self._forget()
            self.runner.restore()
            self._settled = True

    def _forget(self):
        """Drop all requests on the host. The device still has rows that decode, until ``_settle``."""
        self._calls.clear()
        self.scheduler.clear()


class _Call(NamedTuple):
    """Rounds that were sent: the most drafts of each, who was in which row, and their logs, packed."""

    K: int
    rows: list[ActiveRequest | None]
    logs: jax.Array
