"""What happens on the device: the weights, the compiled programs, and the state of the batch that they hand on.

Every program takes the state and gives a new one back, in the same memory: the state is *donated*. Only this file
touches donated arrays.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.engine.compiling import Program
from jspec.engine.interrupts import uninterrupted
from jspec.engine.programs import WEIGHTS_THEN_STATE, Leaves, Programs, StepBuilder
from jspec.engine.request import Request
from jspec.engine.state import DecodeState, padded_prompt, request_arrays
from jspec.engine.step import RoundLog
from jspec.models.split import split
from jspec.sampling.params import SamplingParams
from jspec.sampling.streams import RoundNoise

TIMED_CALLS = 5  # of a decode program, when its cost is measured


class Runner:
    """Carries out what the scheduler decides: reads a prompt into a row, decodes all rows, stops rows.

    Programs are compiled when they are first needed, or all of them by ``warmup``: prefill, admit, retire; a decode
    program for every K; and where there is a choice of K, one by which the drafter catches up.

    Args:
      target: a ``Decoder`` or its like.
      draft_model: a model whose arrays the drafter needs, or None.
      make_drafter: builds the drafter around target and draft model, inside a trace; given a number of drafts as well,
        one that drafts so many.
      verify: the name of a verification rule.
      config: what may be used.
      noise: where the noise of a round comes from.
      draft_lengths: every K for which rounds may be asked; None is the drafter's own K alone.

    Attributes:
      num_draft_tokens: the drafter's own K, which is the largest.
      longest_text: how many tokens a text may have for the drafter to draft after it; None if it has no limit.
      width: how many query tokens the target reads for each row in a round of that K.
      draft_lengths: every K for which rounds may be asked, as a tuple.
      leaves: the arrays of the target, and those of the draft model.
      programs: all programs, compiled or not.
      state: the batch, as the last program sent will leave it. Every program takes its buffers away.

    Raises:
      ValueError: ``config.width`` is too narrow for the drafts.
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
    ):
        drafter = make_drafter(target, draft_model)
        most, self.longest_text = drafter.num_draft_tokens, drafter.longest_text
        target_leaves, merge_target = split(target)
        draft_leaves, merge_draft = split(draft_model)
        self._config = config
        self._builder = StepBuilder(merge_target, merge_draft, make_drafter, verify, config, noise, most)
        self.num_draft_tokens, self.width = most, self._builder.width(most)
        if self.width <= most:
            raise ValueError(f"width={self.width}: expected at least num_draft_tokens + 1, which is {most + 1}")
        self.draft_lengths = tuple(draft_lengths or (most,))
        self.leaves: Leaves = (target_leaves, draft_leaves)
        self.programs = Programs(self._builder, target_leaves, self.draft_lengths)
        self.state: DecodeState = self._builder.empty_state(self.leaves)
        self._last_K = 0  # of the last decode call

    @property
    def num_compilations(self) -> int:
        """How many programs are compiled by now."""
        return sum(program.compiled for program in self.programs)

    def enter(self, row: int, request: Request, pages: Sequence[int]):
        """Read the request's prompt into its pages, and let it decode in this row, which is free."""
        table = np.zeros(self._config.pages_per_row, np.int32)
        table[: len(pages)] = pages
        prompt = padded_prompt(request, self._config)
        arrays = request_arrays(request, self._config, table)
        for start in range(0, len(request.prompt) - 1, self._chunk):
            self._read_chunk(row, table, request.prompt[start : start + self._chunk + 1], start)
        self._send(self.programs.admit, np.int32(row), prompt, arrays)

    def decode(self, K: int) -> jax.Array:
        """Send rounds with up to K drafts each, of all rows, without a host visit between them.

        Returns:
          their logs, on the way to the host; ``read`` waits for them.
        """
        if 0 < K < self._last_K:  # a round of K drafts reads too short a window to make up for the last one
            self._send(self.programs.catch_up)
        self._last_K = K
        logs = self._send(self.programs.decode[K])
        logs.copy_to_host_async()
        return logs

    def read(self, logs: jax.Array) -> RoundLog:
        """Wait for a call to end: its logs on the host, fields ``[rounds, B]``."""
        return RoundLog.unpacked(np.asarray(logs))

    def retire(self, rows: Sequence[int]):
        """Stop these rows, whether the device knows that they have ended or not."""
        mask = np.zeros(self._config.max_batch, bool)
        mask[list(rows)] = True
        self._send(self.programs.retire, mask)

    def restore(self):
        """Have every row idle again after anything may have happened: a run left in the middle, an exception, an error
        of the device.

        The state is kept if it is whole. It is not if a program took its buffers and never gave others back, or if the
        device failed while it computed them; then it is made anew.
        """
        if self._intact():
            self.retire(range(self._config.max_batch))
        else:
            del self.state  # its memory is needed
            self.state, self._last_K = self._builder.empty_state(self.leaves), 0

    def warmup(self):
        """Compile all programs by running each of them, on an idle batch."""
        request = Request(0, [0], SamplingParams(max_tokens=1), np.zeros(2, np.uint32))
        self._read_chunk(0, np.zeros(self._config.pages_per_row, np.int32), [], 0)
        self.enter(0, request, [])
        self.retire(range(self._config.max_batch))
        if len(self.draft_lengths) > 1:
            self._send(self.programs.catch_up)
        for decode in self.programs.decode.values():
            self._send(decode)

    def measure(self, K: int) -> float:
        """How many seconds a round with K drafts takes: the median of a few calls, on an idle batch after ``warmup``,
        with every row in a text of half of ``max_len``."""
        config, seconds = self._config, []
        request = Request(
            0, [0] * max(config.max_len // 2, 1), SamplingParams(max_tokens=config.max_len), np.zeros(2, np.uint32)
        )
        prompt = padded_prompt(request, config)
        for _ in range(TIMED_CALLS + 1):
            for row in range(config.max_batch):
                places = row * config.pages_per_row + np.arange(config.pages_per_row)
                table = 1 + places % (config.pool_pages - 1)  # rows may share pages: what they write is nobody's
                self._send(self.programs.admit, np.int32(row), prompt, request_arrays(request, config, table))
            jax.block_until_ready(self.state.outcome)
            started = time.perf_counter()
            logs = self.read(self._send(self.programs.decode[K]))
            seconds.append((time.perf_counter() - started) / logs.num_rounds)
        self.retire(range(config.max_batch))
        return statistics.median(seconds[1:])

    def replace_draft(self, draft_model: Any):
        """Draft with a model of other weights from the next call on; nothing is compiled again.

        Raises:
          ValueError: its arrays differ in number, shape or dtype from those of the model that it replaces.
        """
        target_leaves, old = self.leaves
        new = split(draft_model).leaves
        kinds = [[(leaf.shape, leaf.dtype.name) for leaf in leaves] for leaves in (old, new)]
        if kinds[0] != kinds[1]:
            different = next(((a, b) for a, b in zip(*kinds, strict=False) if a != b), (len(old), len(new)))
            raise ValueError(f"draft_model has arrays of {different[1]}: expected {different[0]}, as in the one before")
        self.leaves = (target_leaves, new)

    def _send(self, program: Program, *args) -> Any:
        """Send a program, and keep the state that it gives back; returns what else it gives."""
        args = (*((self.leaves,) if program.donate == WEIGHTS_THEN_STATE else ()), self.state, *args)
        program.compile(*args)
        return uninterrupted(self._exchange_state, program, args)

    def _exchange_state(self, program: Program, args: tuple) -> Any:
        self.state, other = program(*args)
        return other

    def _intact(self) -> bool:
        leaves = jax.tree.leaves(getattr(self, "state", None))
        if not leaves or any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            jax.block_until_ready(leaves)
        except jax.errors.JaxRuntimeError:  # of a program that computed it
            return False
        return True

    @property
    def _chunk(self) -> int:
        """How many tokens of a prompt one prefill call reads."""
        return min(self._config.prefill_chunk, self._config.max_len)

    def _read_chunk(self, row: int, table: np.ndarray, tokens: Sequence[int], start: int):
        """Read all but the last of ``tokens``, which only tells the drafter what follows."""
        chunk = np.zeros((1, self._chunk + 1), np.int32)
        chunk[0, : len(tokens)] = tokens
        count = np.int32(max(len(tokens) - 1, 0))
        self._send(self.programs.prefill, np.int32(row), chunk, np.int32(start), count, table[None])
