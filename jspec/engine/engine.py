"""The host loop: requests wait, take a row and its pages, are prefilled, decode on the device, and leave.

The engine speaks tokens only. It compiles four programs, once: prefill, admit, decode, retire; where it chooses how
many drafts a round makes, one decode for each number, and one that lets a drafter catch up in between."""

import collections
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.engine.adaptive import Controller
from jspec.engine.compiling import decode_options
from jspec.engine.pages import PageAllocator
from jspec.engine.request import ActiveRequest, Request
from jspec.engine.state import LIVE, DecodeState, admit, init_state, retire
from jspec.engine.step import DecodeStep, RoundLog
from jspec.models.params import DTYPES
from jspec.models.split import split
from jspec.sampling.params import MAX_STOP_TOKENS, SamplingParams
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES

TIMED_CALLS = 5  # of each decode program, when costs are measured


class Engine:
    """Decodes requests, ``config.max_batch`` at a time.

    Args:
      target: a ``Decoder`` or its like.
      draft_model: a model whose arrays the drafter needs, or None.
      make_drafter: builds the drafter around target and draft model, inside a trace; given a number of drafts as well,
        one of so many.
      verify: name of a verification rule.
      config: what may be used.
      noise: where a round's noise comes from.
      draft_lengths: every K that the engine may choose between calls, 0 and the drafter's own among them; None leaves
        no choice.
      costs: K -> seconds per round, for every K to choose from; None measures them in ``warmup``.

    Attributes:
      num_draft_tokens: K, the largest if there are several.
      width: rows that the target reads per round, for that K.
      longest_text: tokens of the longest text after which the drafter can draft, None if it has no limit.
      num_compilations: programs compiled so far.
      controller: what chooses K; None if there is no choice, or before costs are known.
    """

    def __init__(
        self,
        target: Any,
        draft_model: Any,
        make_drafter: Callable[..., Drafter],
        verify: str,
        config: EngineConfig,
        noise: Callable[..., RoundNoise] = RoundNoise,
        draft_lengths: Sequence[int] | None = None,
        costs: Mapping[int, float] | None = None,
    ):
        drafter = make_drafter(target, draft_model)
        self.config, self.num_draft_tokens = config, drafter.num_draft_tokens
        self.longest_text = drafter.longest_text
        self.width = config.width or self.num_draft_tokens + 1
        if self.width <= self.num_draft_tokens:
            raise ValueError(
                f"width={self.width}: expected at least num_draft_tokens + 1, which is {self.num_draft_tokens + 1}"
            )
        self.num_compilations = 0
        self._pages = PageAllocator(config)
        self._rows: list[ActiveRequest | None] = [None] * config.max_batch
        self._state: DecodeState = init_state(config, target, drafter, DTYPES[config.dtype])
        target_leaves, merge_target = split(target)
        draft_leaves, merge_draft = split(draft_model)
        self._leaves = (target_leaves, draft_leaves)

        most, self._chooses = self.num_draft_tokens, draft_lengths is not None
        self._drafts = 0  # of the last call
        self.controller: Controller | None = None
        if draft_lengths is not None and costs is not None:
            self.controller = Controller({K: costs[K] for K in draft_lengths})

        def step(leaves, K: int = most) -> DecodeStep:
            models = merge_target(leaves[0]), merge_draft(leaves[1])
            drafter = make_drafter(*models, K) if 0 < K < most else make_drafter(*models)
            # Without drafts every rule is the target's own draw, and ``match`` makes it in one pass over the
            # vocabulary.
            return DecodeStep(models[0], drafter, RULES[verify if K else "match"], config.width or K + 1, noise)

        def decode(leaves, state, K: int):
            run = DecodeStep.decode_plainly if K == 0 < most else DecodeStep.decode
            return run(step(leaves, K), state, config.rounds)

        def options(K: int):
            return decode_options(target_leaves, config.max_batch * (config.width or K + 1))

        self._decode = {
            K: self._program(functools.partial(decode, K=K), donate=1, options=options(K))
            for K in draft_lengths or (most,)
        }
        self._catch_up = self._program(lambda leaves, state: step(leaves).catch_up(state, most + 1), donate=1)
        self._prefill = self._program(lambda leaves, state, *chunk: step(leaves).prefill(state, *chunk), donate=1)
        self._admit = self._program(admit, donate=0)
        self._retire = self._program(retire, donate=0)

    def run(self, requests: Sequence[Request]) -> Iterator[ActiveRequest]:
        """Decode all requests, first come, first served; yield each when it is finished.

        Raises:
          ValueError: a request that can never be served, before any is started.
          RuntimeError: another run has not ended; exhaust or close its generator.
        """
        if any(self._rows):
            raise RuntimeError("the engine is busy: another run has not ended; exhaust or close its generator first")
        for request in requests:
            self.check(request)
        if self._chooses and self.controller is None:
            self.warmup()
        waiting, in_flight = collections.deque(requests), collections.deque[_Call]()
        try:
            while waiting or any(self._rows):
                self._fill_rows(waiting)
                in_flight.append(self._call())
                ahead = 1 if self._may_run_ahead(waiting) else 0
                while len(in_flight) > ahead:
                    yield from self._collect(in_flight.popleft())
        finally:  # the caller may stop listening: leave no row behind
            self._release([row for row, progress in enumerate(self._rows) if progress])

    def check(self, request: Request):
        """Raise a ValueError, with numbers, if the request can never be served."""
        length, S = len(request.prompt), self.config.max_len
        if length == 0:
            raise ValueError(f"prompt {request.index} is empty: expected at least one token")
        if length + 1 > S:
            raise ValueError(
                f"prompt {request.index} has {length} tokens, but max_len={S} leaves room for {S - 1} and one new token; "
                "load the model with a larger max_len, or shorten the prompt"
            )
        if len(request.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(
                f"prompt {request.index} has {len(request.stop_tokens)} stop tokens, end-of-sequence ids included: "
                f"expected at most {MAX_STOP_TOKENS}"
            )
        self._pages.check(request.index, self._slots(request))

    def warmup(self):
        """Compile all programs, on an idle engine, and measure costs that are not known; no later call compiles
        anything."""
        if any(self._rows):
            raise RuntimeError("warmup() needs an idle engine")
        request = Request(0, [0], SamplingParams(max_tokens=1), np.zeros(2, np.uint32))
        table = np.zeros(self.config.pages_per_row, np.int32)
        self._read_chunk(0, table, [], 0)
        self._state = self._admit(
            self._state, np.int32(0), request.padded(self.config), request.arrays(self.config, table)
        )
        self._state = self._retire(self._state, np.ones(self.config.max_batch, bool))
        if self._chooses:
            self._state = self._catch_up(self._leaves, self._state)
        for decode in self._decode.values():
            self._state, _ = decode(self._leaves, self._state)
        if self._chooses and self.controller is None:
            self.controller = Controller({K: self._measure(K) for K in self._decode})

    def replace_draft(self, draft_model: Any):
        """Draft with a model of other weights from the next run on; nothing is compiled again.

        Raises:
          ValueError: its arrays differ in number, shape or dtype from those of the model that it replaces.
          RuntimeError: a run has not ended.
        """
        if any(self._rows):
            raise RuntimeError("replace_draft() needs an idle engine")
        target_leaves, old = self._leaves
        new = split(draft_model).leaves
        kinds = [[(leaf.shape, leaf.dtype.name) for leaf in leaves] for leaves in (old, new)]
        if kinds[0] != kinds[1]:
            different = next(((a, b) for a, b in zip(*kinds, strict=False) if a != b), (len(old), len(new)))
            raise ValueError(f"draft_model has arrays of {different[1]}: expected {different[0]}, as in the one before")
        self._leaves = (target_leaves, new)
        if self.controller is not None:  # what the old weights taught it says nothing of the new
            self.controller = Controller(self.controller.seconds)

    def _program(self, function, donate: int, options: dict[str, str | int] | None = None):
        def counted(*args):
            self.num_compilations += 1  # runs when traced, that is, once per compilation
            return function(*args)

        return jax.jit(counted, donate_argnums=donate, compiler_options=options)

    def _fill_rows(self, waiting: collections.deque):
        for row, occupied in enumerate(self._rows):
            if occupied is None and waiting and self._pages.fits(self._slots(waiting[0])):
                request = waiting.popleft()
                pages = self._pages.take(self._slots(request))
                table = np.zeros(self.config.pages_per_row, np.int32)
                table[: len(pages)] = pages
                for start in range(0, len(request.prompt) - 1, self._chunk):
                    self._read_chunk(row, table, request.prompt[start : start + self._chunk + 1], start)
                self._state = self._admit(
                    self._state, np.int32(row), request.padded(self.config), request.arrays(self.config, table)
                )
                self._rows[row] = ActiveRequest(request, pages)

    @property
    def _chunk(self) -> int:
        return min(self.config.prefill_chunk, self.config.max_len)

    def _read_chunk(self, row: int, table, tokens: Sequence[int], start: int):
        """Prefill all but the last of ``tokens``, which tells what follows."""
        chunk = np.zeros((1, self._chunk + 1), np.int32)
        chunk[0, : len(tokens)] = tokens
        count = np.int32(max(len(tokens) - 1, 0))
        self._state = self._prefill(
            self._leaves, self._state, np.int32(row), chunk, np.int32(start), count, table[None]
        )

    def _slots(self, request: Request) -> int:
        """Cache slots the request may touch: the last round may draft past its end."""
        return min(len(request.prompt) + request.params.max_tokens + self.num_draft_tokens, self.config.max_len)

    def _may_run_ahead(self, waiting: collections.deque) -> bool:
        """Whether the next call can be sent before the host knows what the last one did, and need not change it.

        Then the device has no time to wait for the host. Rows that end on the device are left alone by the next call.
        """
        seen_by_host = any(progress.request.find_stop for progress in self._rows if progress)
        return not waiting and not seen_by_host and not (self.controller and self.controller.trying)

    def _call(self) -> "_Call":
        """Send rounds of all rows, without a host visit between them."""
        K = self.num_draft_tokens if self.controller is None else self.controller.choose()
        if 0 < K < self._drafts:  # the window in which a round of K drafts catches up is too short for the last one
            self._state = self._catch_up(self._leaves, self._state)
        self._drafts = K
        self._state, logs = self._decode[K](self._leaves, self._state)
        logs.copy_to_host_async()
        return _Call(K, list(self._rows), logs)

    def _measure(self, K: int) -> float:
        """Seconds of a round with K drafts: a median over calls, every row in a text of half of ``max_len``."""
        config, seconds = self.config, []
        request = Request(
            0, [0] * max(config.max_len // 2, 1), SamplingParams(max_tokens=config.max_len), np.zeros(2, np.uint32)
        )
        for _ in range(TIMED_CALLS + 1):
            for row in range(config.max_batch):
                places = row * config.pages_per_row + np.arange(config.pages_per_row)
                table = 1 + places % (config.pool_pages - 1)  # rows may share pages: what they write is nobody's
                self._state = self._admit(
                    self._state, np.int32(row), request.padded(self.config), request.arrays(self.config, table)
                )
            jax.block_until_ready(self._state.outcome)
            started = time.perf_counter()
            self._state, logs = self._decode[K](self._leaves, self._state)
            rounds = _rounds_made(RoundLog.unpacked(np.asarray(logs)))
            seconds.append((time.perf_counter() - started) / rounds)
        self._state = self._retire(self._state, np.ones(config.max_batch, bool))
        return statistics.median(seconds[1:])

    def _collect(self, call: "_Call") -> Iterator[ActiveRequest]:
        """Hand out what each row did; discard the rounds that ran past a stop which only the host could see."""
        finished, accepted, logs = [], [], RoundLog.unpacked(np.asarray(call.logs))
        for row, progress in enumerate(call.rows):
            if progress is not None and progress.outcome == LIVE:
                followed = len(progress.accepted)
                progress.follow(jax.tree.map(lambda leaf, row=row: leaf[:, row], logs))
                accepted += progress.accepted[followed:]
                if progress.outcome != LIVE:
                    finished.append(row)
        if self.controller is not None:
            self.controller.observe(call.K, _rounds_made(logs), accepted)
        done = [self._rows[row] for row in finished]
        self._release(finished)
        yield from (progress for progress in done if progress is not None)

    def _release(self, rows: Sequence[int]):
        if not rows:
            return
        mask = np.zeros(self.config.max_batch, bool)
        for row in rows:
            mask[row] = True
            progress = self._rows[row]
            if progress is not None:
                self._pages.give_back(progress.pages)
            self._rows[row] = None
        self._state = self._retire(self._state, mask)


class _Call(NamedTuple):
    """Rounds that were sent: how many drafts each has room for, who was in which row, and their logs, packed."""

    K: int
    rows: list[ActiveRequest | None]
    logs: jax.Array


def _rounds_made(logs: RoundLog) -> int:
    """Rounds of a call that any row took part in."""
    return int(np.any(logs.accepted >= 0, axis=1).sum())
