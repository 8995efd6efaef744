"""The host loop: requests wait, take a row and its pages, are prefilled, decode on the device, and leave.

The engine speaks tokens only. It compiles four programs, once: prefill, admit, decode, retire.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.models.params import DTYPES
from jspec.models.split import split
from jspec.pages import PageAllocator
from jspec.sampling.law import Warp
from jspec.sampling.params import MAX_STOP_TOKENS, SamplingParams
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES
from jspec.state import BROKEN, FULL, LIVE, STOPPED, DecodeState, Request, admit, init_state, retire
from jspec.step import RoundLog, Step

FINISH_REASONS = {STOPPED: "stop", FULL: "length", BROKEN: "error"}


@dataclasses.dataclass(frozen=True)
class Job:
    """A request as the engine sees it.

    Attributes:
      index: what the caller knows it by.
      prompt: its tokens, at least one.
      params: how to sample.
      key_data: uint32 ``[2]``, its Threefry key.
      stop_tokens: ids that end it.
      find_stop: given the new tokens and how many of them were looked at before, how many to keep if the text they
        make contains a stop string, else None.
    """

    index: int
    prompt: Sequence[int]
    params: SamplingParams
    key_data: np.ndarray
    stop_tokens: tuple[int, ...] = ()
    find_stop: Callable[[list[int], int], int | None] | None = None


@dataclasses.dataclass
class Progress:
    """A job in flight, and after its end what became of it: ``outcome`` is STOPPED, FULL or BROKEN by then."""

    job: Job
    pages: list[int]
    tokens: list[int] = dataclasses.field(default_factory=list)
    from_draft: list[bool] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    outcome: int = LIVE


class Engine:
    """Decodes jobs, ``config.max_batch`` at a time.

    Args:
      target: a ``Decoder`` or its like.
      draft_model: a model whose arrays the drafter needs, or None.
      make_drafter: builds the drafter around target and draft model, inside a trace.
      verify: name of a verification rule.
      config: what may be used.
      noise: where a round's noise comes from.
    """

    def __init__(
        self,
        target: Any,
        draft_model: Any,
        make_drafter: Callable[[Any, Any], Drafter],
        verify: str,
        config: EngineConfig,
        noise: Callable[..., RoundNoise] = RoundNoise,
    ):
        drafter = make_drafter(target, draft_model)
        self.config, self.num_draft_tokens = config, drafter.num_draft_tokens
        self.width = config.width or self.num_draft_tokens + 1
        if self.width <= self.num_draft_tokens:
            raise ValueError(
                f"width={self.width}: expected at least num_draft_tokens + 1, which is {self.num_draft_tokens + 1}"
            )
        self.num_compilations = 0
        self._pages = PageAllocator(config)
        self._rows: list[Progress | None] = [None] * config.max_batch
        self._state: DecodeState = init_state(config, target, drafter, DTYPES[config.dtype])
        target_leaves, merge_target = split(target)
        draft_leaves, merge_draft = split(draft_model)
        self._leaves = (target_leaves, draft_leaves)

        # Without drafts every rule is the target's own draw, and ``match`` makes it in one pass over the vocabulary.
        rule = RULES[verify if self.num_draft_tokens else "match"]

        def step(leaves) -> Step:
            of = merge_target(leaves[0])
            return Step(of, make_drafter(of, merge_draft(leaves[1])), rule, self.width, noise)

        self._decode = self._program(lambda leaves, state: step(leaves).decode(state, config.rounds), donate=1)
        self._prefill = self._program(lambda leaves, state, *chunk: step(leaves).prefill(state, *chunk), donate=1)
        self._admit = self._program(admit, donate=0)
        self._retire = self._program(retire, donate=0)

    def run(self, jobs: Sequence[Job]) -> Iterator[Progress]:
        """Decode all jobs, first come, first served; yield each when it is finished.

        Raises:
          ValueError: a job that can never be served, before any is started.
          RuntimeError: another run has not ended; exhaust or close its generator.
        """
        if any(self._rows):
            raise RuntimeError("the engine is busy: another run has not ended; exhaust or close its generator first")
        for job in jobs:
            self.check(job)
        waiting = collections.deque(jobs)
        try:
            while waiting or any(self._rows):
                self._fill_rows(waiting)
                self._state, logs = self._decode(self._leaves, self._state)
                yield from self._collect(jax.device_get(logs))
        finally:  # the caller may stop listening: leave no row behind
            self._release([row for row, progress in enumerate(self._rows) if progress])

    def check(self, job: Job):
        """Raise a ValueError, with numbers, if the job can never be served."""
        length, S = len(job.prompt), self.config.max_len
        if length == 0:
            raise ValueError(f"prompt {job.index} is empty: expected at least one token")
        if length + 1 > S:
            raise ValueError(
                f"prompt {job.index} has {length} tokens, but max_len={S} leaves room for {S - 1} and one new token; "
                "load the model with a larger max_len, or shorten the prompt"
            )
        if len(job.stop_tokens) > MAX_STOP_TOKENS:
            raise ValueError(
                f"prompt {job.index} has {len(job.stop_tokens)} stop tokens, end-of-sequence ids included: "
                f"expected at most {MAX_STOP_TOKENS}"
            )
        self._pages.check(job.index, self._slots(job))

    def warmup(self):
        """Compile all programs, on an idle engine; no later call compiles anything."""
        if any(self._rows):
            raise RuntimeError("warmup() needs an idle engine")
        job = Job(0, [0], SamplingParams(max_tokens=1), np.zeros(2, np.uint32))
        table = np.zeros(self.config.pages_per_row, np.int32)
        self._read_chunk(0, table, [], 0)
        self._state = self._admit(self._state, np.int32(0), self._padded(job), self._request(job, table))
        self._state = self._retire(self._state, np.ones(self.config.max_batch, bool))
        self._state, _ = self._decode(self._leaves, self._state)

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

    def _program(self, function, donate: int):
        def counted(*args):
            self.num_compilations += 1  # runs when traced, that is, once per compilation
            return function(*args)

        return jax.jit(counted, donate_argnums=donate)

    def _fill_rows(self, waiting: collections.deque):
        for row, occupied in enumerate(self._rows):
            if occupied is None and waiting and self._pages.fits(self._slots(waiting[0])):
                job = waiting.popleft()
                pages = self._pages.take(self._slots(job))
                table = np.zeros(self.config.pages_per_row, np.int32)
                table[: len(pages)] = pages
                for start in range(0, len(job.prompt) - 1, self._chunk):
                    self._read_chunk(row, table, job.prompt[start : start + self._chunk + 1], start)
                self._state = self._admit(self._state, np.int32(row), self._padded(job), self._request(job, table))
                self._rows[row] = Progress(job, pages)

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

    def _slots(self, job: Job) -> int:
        """Cache slots the job may touch: the last round may draft past its end."""
        return min(len(job.prompt) + job.params.max_tokens + self.num_draft_tokens, self.config.max_len)

    def _padded(self, job: Job) -> np.ndarray:
        prompt = np.zeros(self.config.max_len, np.int32)
        prompt[: len(job.prompt)] = job.prompt
        return prompt

    def _request(self, job: Job, table: np.ndarray) -> Request:
        params, length = job.params, len(job.prompt)
        stop_tokens = [*job.stop_tokens, *[-1] * (MAX_STOP_TOKENS - len(job.stop_tokens))]
        return Request(
            length=_array(length, np.int32),
            limit=_array(min(length + params.max_tokens, self.config.max_len), np.int32),
            min_length=_array(length + params.min_tokens, np.int32),
            stop_tokens=_array(stop_tokens, np.int32),
            key_data=_array(job.key_data, np.uint32),
            table=_array(table, np.int32),
            warp=Warp(
                temperature=_array(0.0 if params.greedy else params.temperature, np.float32),
                top_k=_array(max(params.top_k, 0), np.int32),
                top_p=_array(params.top_p, np.float32),
                min_p=_array(params.min_p, np.float32),
            ),
        )

    def _collect(self, logs: RoundLog) -> Iterator[Progress]:
        """Hand out what each row did; discard the rounds that ran past a stop which only the host could see."""
        finished = []
        for row, progress in enumerate(self._rows):
            if progress is not None:
                self._follow(progress, jax.tree.map(lambda leaf, row=row: leaf[:, row], logs))
                if progress.outcome != LIVE:
                    finished.append(row)
        done = [self._rows[row] for row in finished]
        self._release(finished)
        yield from (progress for progress in done if progress is not None)

    def _follow(self, progress: Progress, log: RoundLog):
        for i in range(log.count.shape[0]):
            if progress.outcome != LIVE or log.accepted[i] < 0:
                break
            count, accepted = int(log.count[i]), int(log.accepted[i])
            looked_at = len(progress.tokens)
            progress.tokens += log.tokens[i, :count].tolist()
            progress.from_draft += [j < accepted for j in range(count)]
            progress.drafted.append(int(log.drafted[i]))
            progress.accepted.append(accepted)
            progress.outcome = int(log.outcome[i])
            keep = progress.job.find_stop(progress.tokens, looked_at) if progress.job.find_stop else None
            if keep is not None:
                del progress.tokens[keep:], progress.from_draft[keep:]
                progress.outcome = STOPPED

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


def _array(value, dtype) -> Any:
    """A host array that enters a program as an argument, without a transfer of its own."""
    return np.asarray(value, dtype)
