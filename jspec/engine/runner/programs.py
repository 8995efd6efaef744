"""The programs that an engine runs on the device, each a function of flat weights and the state of the batch.

A program is called with flat leaves and not with modules, because calling a jitted function on an NNX module costs
milliseconds. It puts the modules together inside of its trace.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.drafting.base import Drafter
from jspec.engine.multihost.shard_map import Spread
from jspec.engine.request import Request
from jspec.engine.runner.compile import Program, decode_options
from jspec.engine.runner.host_packing import Packing
from jspec.engine.runner.state import DecodeState, Entries, admit, init_state, put, restore, save, take, with_processors
from jspec.engine.runner.step import DecodeStep
from jspec.engine.runner.step_io import Call, CallLogs, Drafting, Judging, Segments, every_token, no_segments
from jspec.models.params import DTYPES
from jspec.sampling.params import SamplingParams
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES, Proposal

Budgets = Callable[[int, int], Sequence[int | None]]
Leaves = tuple[list[jax.Array], list[jax.Array]]  # the arrays of the target, and those of the draft model
WEIGHTS_THEN_STATE, STATE = 1, 0  # what the arguments of a program begin with; as a number, the place of the state
MOST_ENTRIES = 8  # requests that enter with one program
MOST_MOVED = 16  # pages that one program moves between device and host


def every_token_is_read(rows: int, K: int) -> tuple[None]:
    """``Budgets`` that leave the target no choice but to read the drafts of every row."""
    del rows, K
    return (None,)


@dataclasses.dataclass(frozen=True)
class StepBuilder:
    """Builds a ``DecodeStep`` from flat leaves, for the inside of a trace.

    Attributes:
      merge_target, merge_draft: put the leaves of the target, and of the draft model, together.
      make_drafter: builds the drafter around target and draft model; given a number of drafts as well, one that drafts
        so many.
      verify: the name of a verification rule.
      config: what may be used.
      noise: where the noise of a round comes from.
      most: K, the most drafts of a round: the drafter's own number.
      vocab_size: V of the target.
      spread: how programs run on several devices; None on one.
      budgets: for so many rows and a K, how many tokens the target may be told to read in a round, None for all.
      estimates: whether any of these is a number, so that the state keeps what estimates of acceptance are made of.
    """

    merge_target: Callable[[Sequence[jax.Array]], Any]
    merge_draft: Callable[[Sequence[jax.Array]], Any]
    make_drafter: Callable[..., Drafter]
    verify: str
    config: EngineConfig
    noise: Callable[..., RoundNoise]
    most: int
    vocab_size: int
    spread: Spread | None = None
    budgets: Budgets = every_token_is_read
    estimates: bool = False

    def width(self, K: int) -> int:
        """How many query tokens the target reads for each row in a round of K drafts."""
        return self.config.width or K + 1

    def step(self, leaves: Leaves, K: int, budget: int | None = None) -> DecodeStep:
        """For rounds of K drafts, of which the target reads up to ``budget`` tokens in all, None for every one.

        K = 0 keeps the drafter, which may have to make up later for what it missed."""
        target, draft_model = self.merge_target(leaves[0]), self.merge_draft(leaves[1])
        own = K in (0, self.most)
        drafter = self.make_drafter(target, draft_model) if own else self.make_drafter(target, draft_model, K)
        # Without drafts every rule is the target's own draw, and ``match`` makes it in one pass over the vocabulary.
        rule, expand = RULES[self.verify if K else "match"], self.config.expand_latents
        return DecodeStep(target, drafter, rule, self.width(K), self.noise, expand, budget=budget)

    def rounds(
        self, leaves: Leaves, state: DecodeState, call: Call, K: int, budget: int | None
    ) -> tuple[DecodeState, CallLogs]:
        """``call.rounds`` rounds of up to K drafts of the rows of the call, and their logs. No row of the call has
        processors or wants log-probabilities. Arguments ``K`` and ``budget`` as for ``step``."""
        new, logs = self._rounds(self.step(leaves, K, budget), with_processors(state, None), call, K)
        return with_processors(new, state.request.processors), logs

    def processing_rounds(self, leaves: Leaves, state: DecodeState, call: Call) -> tuple[DecodeState, CallLogs]:
        """Rounds of up to the most drafts, of rows that may have processors and want log-probabilities. They cost time
        whether the rows do or not."""
        return self._rounds(self._processing_step(leaves), state, call, self.most)

    def draft(self, leaves: Leaves, state: DecodeState, told: Drafting) -> tuple[DecodeState, Proposal]:
        """The first half of a round of the rows of a call: ``DecodeStep.draft``."""
        some = take(state, told.call.rows, told.call.table)
        after, proposal = self.step(leaves, self.most).draft(some, told.forced)
        return dataclasses.replace(state, draft=after.draft), proposal

    def judge(
        self, leaves: Leaves, state: DecodeState, proposal: Proposal, told: Judging
    ) -> tuple[DecodeState, CallLogs]:
        """The second half of that round: ``DecodeStep.judge``. Its rows may have processors and want log-probabilities."""
        some = take(state, told.call.rows, told.call.table)
        some, log = self._processing_step(leaves).judge(some, proposal, told.allowed)
        logs = CallLogs(log.packed(), log.logprobs)
        return put(state, told.call.rows, some), jax.tree.map(lambda x: x[None], logs)

    def _processing_step(self, leaves: Leaves) -> DecodeStep:
        return dataclasses.replace(self.step(leaves, self.most), logprobs_mode=self.config.logprobs_mode)

    def _rounds(self, step: DecodeStep, state: DecodeState, call: Call, K: int) -> tuple[DecodeState, CallLogs]:
        decode = step.decode_plainly if K == 0 < self.most else step.decode
        some, logs = decode(take(state, call.rows, call.table), self.config.rounds, call.rounds)
        return put(state, call.rows, some), logs

    def prefill(self, leaves: Leaves, state: DecodeState, segments: Segments) -> tuple[DecodeState, None]:
        """``DecodeStep.prefill``."""
        return self.step(leaves, self.most).prefill(state, segments), None

    def prefill_with_logprobs(
        self, leaves: Leaves, state: DecodeState, segments: Segments
    ) -> tuple[DecodeState, jax.Array]:
        """``DecodeStep.prefill_with_logprobs``."""
        return self.step(leaves, self.most).prefill_with_logprobs(state, segments)

    def catch_up(self, leaves: Leaves, state: DecodeState, call: Call) -> tuple[DecodeState, None]:
        """The drafter makes up for what a round of the most drafts may have left it."""
        some = self.step(leaves, self.most).catch_up(take(state, call.rows, call.table), self.most + 1)
        return put(state, call.rows, some), None

    def empty_state(self, leaves: Leaves) -> DecodeState:
        """An empty batch; not for a trace."""
        step = self.step(leaves, self.most)
        dtype, rows = DTYPES[self.config.dtype], self.config.num_rows

        def make() -> DecodeState:
            return init_state(self.config, step.target, step.drafter, dtype, rows, self.vocab_size, self.estimates)

        return make() if self.spread is None else self.spread.made(make)


class PackedProgram(Program):
    """A program that is told what to do in one array on the host.

    Args:
      name: what messages and profiles call it.
      function: takes what every program takes, and a pytree like ``example``.
      example: what does nothing to an idle batch.
      options: XLA's.
      donate: the place of the state.

    Attributes:
      packing: how the pytree lies in the array.
      idle: ``example``, packed.
    """

    def __init__(self, name: str, function: Callable, example: Any, options=None, donate: int = WEIGHTS_THEN_STATE):
        self.packing = packing = Packing.of(example)
        self.idle = packing.pack(example)
        super().__init__(lambda *args: function(*args[:-1], packing.unpack(args[-1])), donate, options, name)


class Programs:
    """Every program of an engine; each takes the state and returns it with something else, or with None.

    Attributes:
      prefill: n -> (leaves, state, segments), ``DecodeStep.prefill`` of n segments.
      prefill_with_logprobs: the same for one number of segments; returns their log-probabilities beside the state.
      admit: (rows, entries), ``state.admit``, which takes and returns only the part of the state that has rows.
      catch_up: (leaves, state, call), for the drafter before a smaller K.
      decode: (b, K, R) -> (leaves, state, call), rounds of b rows with up to K drafts, of which the target reads R tokens
        in all, or every one if R is None; returns their ``CallLogs`` beside the state.
      processing_decode: b -> the same with up to the most drafts, for calls in which a row wants its logits processed or
        log-probabilities.
      draft: b -> (leaves, state, told), the first half of a round of constrained requests; returns their ``Proposal``.
      judge: b -> (leaves, state, proposal, told), the second half; returns the ``CallLogs`` of one round.
      judge_shape: for how many positions of a row ``judge`` is told what may come, and V.
      save: (state, row, pages), ``state.save``; returns the copy beside the state. Its arguments are not packed.
      restore: (state, row, pages, saved), ``state.restore``. Its arguments are not packed.
      most_entries: how many requests ``admit`` can take.
      most_moved: how many pages ``save`` and ``restore`` move.
    """

    def __init__(self, builder: StepBuilder, target_leaves: Sequence[jax.Array], draft_lengths: Sequence[int]):
        config, width, spread = builder.config, builder.width(builder.most), builder.spread
        of_models = (lambda function: function) if spread is None else spread.of_models
        self.most_entries, self.most_moved = min(MOST_ENTRIES, config.max_batch), min(MOST_MOVED, config.pages_per_row)
        self.prefill = {
            n: PackedProgram(f"prefill_{n}x{config.chunk}", of_models(builder.prefill), no_segments(config, n))
            for n in config.segment_buckets
        }
        self.prefill_with_logprobs = PackedProgram(
            "prefill_with_logprobs",
            of_models(builder.prefill_with_logprobs),
            no_segments(config, config.logprob_segments),
        )
        nobody = [(config.num_rows, Request(0, [0], SamplingParams(), np.zeros(2, np.uint32)))]
        entries = Entries.of(config, builder.vocab_size, self.most_entries, nobody)
        self.admit = PackedProgram("admit", _admit if spread is None else spread.of_rows(_admit), entries, donate=STATE)
        self.catch_up = PackedProgram(
            "catch_up", of_models(builder.catch_up), Call.of(config, config.max_batch, [], [], 1)
        )
        self.decode: dict[tuple[int, int, int | None], PackedProgram] = {}
        every = ((b, K, R) for b in config.batch_buckets for K in draft_lengths for R in builder.budgets(b, K))
        for b, K, R in every:
            rounds = of_models(functools.partial(builder.rounds, K=K, budget=R))
            name = f"decode_{b}_rows_{K}_drafts" + ("" if R is None else f"_{R}_tokens")
            options = decode_options(target_leaves, R or b * builder.width(K))
            self.decode[b, K, R] = PackedProgram(name, rounds, Call.of(config, b, [], [], 1), options)
        self.processing_decode: dict[int, PackedProgram] = {}
        for b in config.batch_buckets:
            options = decode_options(target_leaves, b * width)
            name = f"decode_{b}_rows_processing"
            self.processing_decode[b] = PackedProgram(
                name, of_models(builder.processing_rounds), Call.of(config, b, [], [], 1), options
            )
        self.draft: dict[int, PackedProgram] = {}
        self.judge: dict[int, PackedProgram] = {}
        self.judge_shape = width, builder.vocab_size
        for b in config.batch_buckets:
            call = Call.of(config, b, [], [], 1)
            drafting, judging = Drafting.of(call, builder.most), Judging(call, every_token(b, *self.judge_shape))
            options = decode_options(target_leaves, b * width)
            self.draft[b] = PackedProgram(f"draft_{b}_rows", of_models(builder.draft), drafting, options)
            self.judge[b] = PackedProgram(f"judge_{b}_rows", of_models(builder.judge), judging, options)
        self.save = Program(_save if spread is None else spread.saving(_save), STATE, name="save")
        self.restore = Program(_restore if spread is None else spread.restoring(_restore), STATE, name="restore")

    def place(self, program: Program) -> int:
        """The number of a program among all, which is the same in every process."""
        return next(place for place, one in enumerate(self) if one is program)

    def __iter__(self) -> Iterator[Program]:
        singles = self.prefill_with_logprobs, self.admit, self.catch_up, self.save, self.restore
        decode = self.decode, self.processing_decode, self.draft, self.judge
        return itertools.chain(self.prefill.values(), singles, *(programs.values() for programs in decode))


def _admit(*args):
    return admit(*args), None


def _save(state: DecodeState, *args):
    return state, save(state, *args)


def _restore(*args):
    return restore(*args), None
