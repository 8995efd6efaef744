"""What callers use: requests arrive, stream and are cancelled, in any thread, while the engine's own thread serves them."""

import dataclasses
import queue
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax

from jspec._validation import is_int, require
from jspec.config import EngineConfig
from jspec.engine.adaptive.cost_table import RoundShape
from jspec.engine.core import EngineCore
from jspec.engine.decoding import Decoding
from jspec.engine.frontend import Frontend, end_tokens
from jspec.engine.handle import EngineHandle
from jspec.engine.lifecycle import Lifecycle
from jspec.engine.loop import Loop
from jspec.engine.mailbox import Cancel
from jspec.engine.metrics import Metrics
from jspec.engine.multihost.leader import require_leading
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.runner.model_runner import ModelRunner
from jspec.engine.runner.recompilation_guard import CompilationGuard
from jspec.engine.runner.sleeping import Sleeper
from jspec.engine.subscriber import Failure, Subscriber, deliver
from jspec.models.protocols import Target
from jspec.outputs import Delta
from jspec.sampling.params import SamplingParams
from jspec.sampling.request_keys import request_keys
from jspec.sampling.requested import requested, require_params
from jspec.text.detokenizer import Tokenizer
from jspec.text.prompts import Prompt, as_list


class QueueFull(RuntimeError):
    """As many requests wait as ``max_waiting`` allows.

    Example::

        engine = jspec.load("path/to/target", max_waiting=8).engine
        try:
            engine.add("def main(", max_tokens=64)
        except jspec.QueueFull:
            print("try again later")
    """


class Engine:
    """Decodes requests, up to ``config.max_batch`` at a time, as they come.

    ``request`` makes a request, which the ``EngineHandle`` puts into the ``Mailbox`` of the engine's own ``EngineThread``;
    there the ``EngineCore`` gives it to the ``Loop``, which makes the steps, and puts what is new of it into the queue of
    its ``Subscriber``.

    The thread begins with the first request, sleeps while there is nothing to do, and ends when the engine is collected or
    Python ends. Any thread may submit requests, and waits for what is new of them. Whatever ends a caller early, an
    exception or Ctrl-C at any point, cancels the caller's requests and nothing else.

    An exception that ends the engine's thread is the cause of a RuntimeError for everybody who waits. The next caller finds
    a new thread.

    The thread has JAX's settings of the thread that makes the engine (``jax_settings.NAMES``). A caller whose settings
    differ is refused.

    Args:
      target: a ``Decoder`` or its like.
      draft_model: a model whose arrays the drafter needs, or None.
      decoding: how rounds draft and verify.
      config: what may be used.
      costs: for each of ``config.batch_buckets``, round shape -> seconds per round, for every shape to choose from; None
        measures them in ``warmup``, or before the first request.
      tokenizer: the target's; None leaves ``add`` without one.
      eos_token_ids: the tokens that end a text; None takes those of the target and of the tokenizer.
      method: the drafting method, for messages; None for plain decoding.
      reproducible: the value of ``Result.reproducible``.
      drafts_decide: whether the text of a seed depends on its drafts.
      default_params: the defaults of a request without SamplingParams.

    Attributes:
      config: what may be used.
      loop: makes the steps; ``loop.controller`` chooses how rounds are made.
      runner: carries out what the scheduler decides; ``runner.batch`` has weights, programs, and the state on the device.
      scheduler: decides who enters which row with which pages.
      frontend: makes requests of prompts, and deltas and results of tokens.
      handle: how callers reach the engine's thread.
      lifecycle: pauses the engine, lets it sleep, and closes it.
      guard: notices what is compiled after ``warmup``, and warns; ``guard.on_compile = "raise"`` makes it an error.

    Example::

        engine = jspec.load("path/to/target").engine
        request = engine.add("def main(", max_tokens=64)
        while engine.unfinished:
            for delta in engine.step():
                print(delta.id == request, delta.text)
    """

    def __init__(
        self,
        target: Target,
        draft_model: Any,
        decoding: Decoding,
        config: EngineConfig,
        costs: Mapping[int, Mapping[RoundShape, float]] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Sequence[int] | None = None,
        method: str | None = None,
        reproducible: bool = True,
        drafts_decide: bool = True,
        default_params: SamplingParams | None = None,
    ):
        self.config = config
        self.runner = runner = ModelRunner(target, draft_model, decoding, config)
        self.loop = Loop(runner, config, decoding.draft_lengths, costs, drafts_decide)
        self.scheduler = self.loop.scheduler
        if eos_token_ids is None:
            eos_token_ids = end_tokens(target.config, tokenizer)
        self.frontend = Frontend(
            tokenizer,
            target.config.vocab_size,
            eos_token_ids,
            method=method,
            reproducible=reproducible,
            default_params=default_params,
            max_len=config.max_len,
            num_draft_tokens=runner.num_draft_tokens,
            longest_text=runner.longest_text,
        )
        self.guard = CompilationGuard()
        core = EngineCore(self.loop, self.frontend, self.guard)
        self.handle = EngineHandle(core)
        sleeper = Sleeper(runner.batch, (target, draft_model))
        self.lifecycle = Lifecycle(self.handle, self.loop, core.pausing, core.abort_all, sleeper)
        # The subscriber that ``add`` is called for.
        self._added = Subscriber(-1, queue.SimpleQueue(), deliver, streams=True, cancel=lambda: None)

    @property
    def num_compilations(self) -> int:
        """How many programs are compiled by now, and how many a step compiled after ``warmup`` that should not have."""
        return self.runner.batch.num_compilations + self.guard.count

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        key: jax.Array | None = None,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        **options,
    ) -> Request:
        """The request that a caller asks for, which can be served. Nothing is started yet.

        ``add``, ``jspec.stream``, ``LLM.stream`` and ``AsyncEngine.generate`` take the same arguments and pass them on to
        here.

        Args:
          prompt: text, token ids, or vLLM's dictionary of either.
          params: how to sample, and when to end.
          key: a JAX key, instead of ``params.seed``. With neither, a fresh key is drawn.
          priority: requests with a lower number go first.
          salt: only requests with the same salt share cached pages of their prompts, so that a tenant cannot find out by
            the time that it takes what others have asked.
          tenant: whose request it is. Tenants take turns where requests of the same priority wait, so that none has to wait
            for all requests of another.
          **options: fields of ``SamplingParams`` by name, instead of ``params``; fields that are not given come from
            ``LLM.default_sampling_params``.

        Raises:
          ValueError: the prompt is empty, too long, or several, or a value is out of range.
          TypeError: an option is unknown or given twice. The message says what may have been meant.
        """
        asked = requested("a request", params, options, self.frontend.default_params)
        require_params(asked, "SamplingParams or None")
        require(is_int(priority), "priority", priority, "an integer; lower numbers go first")
        for name, value in (("salt", salt), ("tenant", tenant)):
            require(isinstance(value, str), name, value, "a string")
        prompts, _ = as_list(prompt)
        if len(prompts) != 1:
            raise ValueError(f"prompt has {len(prompts)} prompts: expected one; jspec.generate() takes several")
        [key_data] = request_keys([asked], key)
        request = self.frontend.request(0, prompts[0], asked, key_data)
        request = dataclasses.replace(request, priority=priority, salt=salt, tenant=tenant)
        self.check(request)
        return request

    def add(self, prompt: Prompt, params: SamplingParams | None = None, **options) -> int:
        """Let the request wait that ``request`` makes of the same arguments, and return its id. ``step`` serves it, beside
        all others.

        Raises:
          ValueError, TypeError: as ``request`` does.
          QueueFull: ``max_waiting`` requests wait already.
        """
        return self.add_request(self.request(prompt, params, **options))

    def add_request(self, request: Request) -> int:
        """Let a request wait that ``request`` has returned, as ``add`` does.

        Raises:
          QueueFull: ``max_waiting`` requests wait already.
        """
        self.require_room(tenant=request.tenant)
        return self.handle.add(request, self._added)

    def step(self) -> list[Delta]:
        """Wait for what is new of the requests that were added, of one call to the device; empty if all of them have ended.

        A request that ends early, because of an error of the device for example, ends with a delta that says so.

        Raises:
          RuntimeError: the engine's thread ended, and with it all requests that were added.
        """
        if not self.unfinished:
            return []
        outputs = self.handle.running().wait_for(self._added.outputs, lambda: self.unfinished) or []
        for output in outputs:
            if isinstance(output, Failure):
                raise output.raised()
        return outputs

    def abort(self, id: int):
        """Cancel a request that was added, wherever it is. Its last delta says ``abort``.

        Nothing happens if it has ended already.
        """
        self.handle.running().mailbox.post(Cancel(self._added.number, id))

    @property
    def unfinished(self) -> bool:
        """Whether ``step`` has anything more to return: a request that was added has not ended, or was not told."""
        added = self._added  # looked at in the order in which a request moves on, so that none is overlooked
        arriving = added in [submission.subscriber for submission in self.handle.arriving]
        return arriving or bool(added.unfinished) or not added.outputs.empty()

    def metrics(self) -> Metrics:
        """What the engine is doing and has done, in numbers."""
        return self.loop.meter.metrics(self.scheduler, self.num_compilations)

    def check(self, request: Request):
        """Raise a ValueError, with numbers, if the request can never be served.

        Raises:
          RuntimeError: this process follows another, which is the one to ask, or the weights are incomplete.
        """
        require_leading(self.runner.batch.group)
        self.handle.require_usable()
        self.loop.require_weights()
        self.scheduler.requirements.check(request)

    def require_room(self, count: int = 1, tenant: str = ""):
        """Raise ``QueueFull`` unless so many more requests of a tenant may wait."""
        arriving = sum(len(one.requests) for one in self.handle.arriving if one.orders is not None)
        if not self.scheduler.has_room(arriving + count - 1, tenant):
            most = self.config.max_waiting
            raise QueueFull(f"max_waiting={most} requests wait already; try again later, or load with more")

    def stream(self, request: Request) -> Generator[Delta, None, None]:
        """Serve a request, beside those of other callers; yield what is new of it after each call to the device."""
        return self.handle.outputs([request], streams=True)

    def run(self, requests: Sequence[Request]) -> Generator[ActiveRequest, None, None]:
        """Serve requests, beside those of other callers; yield each when it has ended.

        Raises:
          ValueError: a request that can never be served, before any is started.
          Exception: what ended one of the requests, an error of the device for example; the others are cancelled.
        """
        for request in requests:
            self.check(request)
        ends = self.handle.outputs(requests, streams=False)
        try:
            for active in ends:
                if active.error is not None:
                    raise active.error
                yield active
        finally:
            ends.close()

    def pause(self, mode: str = "wait"):
        """As ``BesideTrainer.pause``."""
        self.lifecycle.pause(mode)

    def resume(self):
        """As ``BesideTrainer.resume``."""
        self.lifecycle.resume()

    @property
    def is_paused(self) -> bool:
        """As ``BesideTrainer.is_paused``."""
        return self.lifecycle.is_paused

    def warmup(self):
        """Compile and run all programs, and measure costs that are not known; no later call compiles anything.

        It waits until all requests that are under way have ended. Ctrl-C ends it at once; what is being compiled then, is
        compiled to its end in the background.
        """
        require_leading(self.runner.batch.group)
        self.handle.running().call(self.loop.warmup, idle=True)
        self.guard.seal()

    def between_requests(self, change: Callable[[], Any], wait: bool = True) -> Any:
        """Call a function in the engine's thread once all requests that are under way have ended, or unless ``wait`` between
        two steps; its result. Others wait meanwhile. It may change weights, and then has the loop ``forget_weights``.

        Raises:
          RuntimeError: requests stand still after ``pause("keep")``, so that none of them ends.
        """
        return self.handle.running().call(change, idle=wait)

    def replace_draft(self, draft_model: Any, wait: bool = True):
        """Draft with a model of other weights from now on; nothing is compiled again.

        Args:
          draft_model: the model, or a list of its arrays.
          wait: whether requests that are under way end first. If not, the new weights draft from their next round on, behind
            what the old ones have cached. The law of their texts stays, since a round verifies the drafts that it has made;
            but a seed may mean another text then, and ``Result.reproducible`` says so.

        Raises:
          ValueError: its arrays differ in number, shape or dtype from those of the model that it replaces.
        """
        self.between_requests(lambda: self.loop.replace_draft(draft_model), wait)
