"""The programs that an engine runs on the device, each a function of flat weights and the state of the batch.

A program takes flat leaves in place of modules, because calling a jitted function on an NNX module costs milliseconds. It
merges the modules inside of its trace.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jspec.config import EngineConfig
from jspec.drafting.base import FixedDrafts
from jspec.engine.decoding import Decoding
from jspec.engine.multihost.shard_map import ProgramSharding
from jspec.engine.request import Request
from jspec.engine.runner.compile import Program, decode_options
from jspec.engine.runner.host_packing import HostPacking
from jspec.engine.runner.saved import restore, restore_states, save, save_states
from jspec.engine.runner.state import AdmitInputs, DecodeState, admit, init_state, put, put_rows, take, with_processors
from jspec.engine.runner.step import DecodeStep, VerifyPass
from jspec.engine.runner.step_io import Call, CallLogs, GrammarInputs, PrefillInputs, VerifyInputs, empty_prefill
from jspec.models.params import DTYPES
from jspec.pallas.collectives.peers import Peers
from jspec.sampling.params import SamplingParams
from jspec.sampling.verify import RULES, Proposal

Leaves = tuple[list[jax.Array], list[jax.Array]]  # the arrays of the target, and those of the draft model
# The first arguments of a program; the number is the place of the state, which the last kind neither takes nor returns.
WEIGHTS_THEN_STATE, STATE, OUTCOME = 1, 0, None
MOST_ADMITTED = 8  # requests that one program admits
MOST_MOVED = 16  # pages that one program moves between device and host


@dataclasses.dataclass(frozen=True)
class StepBuilder:
    """Builds a ``DecodeStep`` from flat leaves, inside a trace; its other methods are the functions of the programs.

    Attributes:
      merge_target, merge_draft: merge the leaves of the target, and of the draft model, into modules.
      decoding: how rounds draft and verify.
      config: sizes of batch, cache and programs.
      most: K, the most drafts of a round: the drafter's own number.
      vocab_size: V of the target.
      sharding: how programs run on several devices; None on one.
      estimates: whether any verification budget is a number, so that the state has acceptance statistics.
    """

    merge_target: Callable[[Sequence[jax.Array]], Any]
    merge_draft: Callable[[Sequence[jax.Array]], Any]
    decoding: Decoding
    config: EngineConfig
    most: int
    vocab_size: int
    sharding: ProgramSharding | None = None
    estimates: bool = False

    def width(self, K: int) -> int:
        """How many query tokens the target reads for each row in a round of K drafts."""
        return self.config.width or K + 1

    def step(self, leaves: Leaves, K: int, budget: int | None = None, peers: Peers | None = None) -> DecodeStep:
        """For rounds of K drafts, of which the target reads up to ``budget`` tokens in all, None for every one.

        With K = 0 the drafter is the one of the most drafts, which catches up later. Models in shards are added up by
        ``peers``.
        """
        target, draft_model = self.merge_target(leaves[0]), self.merge_draft(leaves[1])
        for model in (target, draft_model):
            if peers is not None and getattr(model, "shards", None) is not None:
                model.peers = peers
        own = K in (0, self.most)
        drafter = self.decoding.make_drafter(target, draft_model, *(() if own else (K,)))
        # Without drafts every rule is the target's own draw, and ``match`` makes it in one pass over the vocabulary.
        rule, expand = RULES[self.decoding.rule if K else "match"], self.config.expand_latents
        return DecodeStep(target, drafter, rule, self.width(K), self.decoding.noise, expand, budget=budget)

    def rounds(
        self,
        leaves: Leaves,
        state: DecodeState,
        call: Call,
        K: int,
        budget: int | None,
        peers: Peers | None = None,
    ) -> tuple[DecodeState, CallLogs]:
        """``call.rounds`` rounds of up to K drafts of the rows of the call, and their logs.

        No row of the call has processors or wants log-probabilities. Arguments ``K``, ``budget`` and
        ``peers`` as for ``step``.
        """
        new, logs = self._rounds(self.step(leaves, K, budget, peers), with_processors(state, None), call, K)
        return with_processors(new, state.request.processors), logs

    def processing_rounds(
        self, leaves: Leaves, state: DecodeState, call: Call, peers: Peers | None = None
    ) -> tuple[DecodeState, CallLogs]:
        """Rounds of up to the most drafts, of rows that may have processors and want log-probabilities.

        These cost time even where no row does.
        """
        return self._rounds(self._processing_step(leaves, peers), state, call, self.most)

    def draft(
        self, leaves: Leaves, state: DecodeState, call: Call, processing: bool, peers: Peers | None = None
    ) -> tuple[DecodeState, Proposal]:
        """The first part of a round of the rows of a call: ``DecodeStep.draft``.

        Args:
          leaves, state, call, peers: as for ``rounds``.
          processing: whether one of the rows may have processors, or want log-probabilities.
        """
        rows = take(state if processing else with_processors(state, None), call.rows, call.table)
        after, proposal = self.step(leaves, self.most, peers=peers).draft(rows)
        draft_rows = put_rows(state.draft_rows, call.rows, after.draft_rows)
        return dataclasses.replace(state, draft=after.draft, draft_rows=draft_rows), proposal

    def grammar(self, outcome: jax.Array, inputs: GrammarInputs) -> jax.Array:
        """The tokens that may come in every row of the largest call, uint32 ``[max_batch, width, ceil(V / 32)]``.

        Of ``outcome``, which is the state's, only the devices matter: they are those of the result.
        """
        del outcome
        return inputs.of_all_rows(self.config.max_batch)

    def verify_pass(
        self,
        leaves: Leaves,
        state: DecodeState,
        proposal: Proposal,
        inputs: VerifyInputs,
        peers: Peers | None = None,
    ) -> tuple[DecodeState, VerifyPass]:
        """``DecodeStep.verify_pass`` of the same rows, whose jump-forward tokens become their first drafts."""
        rows = take(state, inputs.call.rows, inputs.call.table)
        step = self.step(leaves, self.most, peers=peers)
        after, verified = step.verify_pass(rows, inputs.jump_forward.put_into(proposal, step.room(rows)))
        if state.recurrent is not None:
            recurrent = put_rows(state.recurrent, inputs.call.rows, after.recurrent)
            state = dataclasses.replace(state, recurrent=recurrent)
        return dataclasses.replace(state, cache=after.cache), verified

    def finish(
        self,
        leaves: Leaves,
        state: DecodeState,
        verified: VerifyPass,
        allowed: jax.Array,
        call: Call,
        processing: bool,
        peers: Peers | None = None,
    ) -> tuple[DecodeState, CallLogs]:
        """``DecodeStep.finish`` of the same rows; ``processing`` as for ``draft``."""
        plain = functools.partial(self.step, K=self.most)
        step = (self._processing_step if processing else plain)(leaves, peers=peers)
        batch = state if processing else with_processors(state, None)
        rows, log = step.finish(take(batch, call.rows, call.table), verified, allowed[: len(call.rows)])
        logs = jax.tree.map(lambda x: x[None], CallLogs(log.packed(), log.logprobs))
        return with_processors(put(batch, call.rows, rows), state.request.processors), logs

    def _processing_step(self, leaves: Leaves, peers: Peers | None) -> DecodeStep:
        step = self.step(leaves, self.most, peers=peers)
        return dataclasses.replace(step, logprobs_mode=self.config.logprobs_mode)

    def _rounds(self, step: DecodeStep, state: DecodeState, call: Call, K: int) -> tuple[DecodeState, CallLogs]:
        decode = step.decode_plainly if K == 0 < self.most else step.decode
        rows, logs = decode(take(state, call.rows, call.table), self.config.rounds, call.rounds)
        return put(state, call.rows, rows), logs

    def prefill(
        self, leaves: Leaves, state: DecodeState, inputs: PrefillInputs, peers: Peers | None = None
    ) -> tuple[DecodeState, None]:
        """``DecodeStep.prefill``."""
        return self.step(leaves, self.most, peers=peers).prefill(state, inputs), None

    def prefill_with_logprobs(
        self, leaves: Leaves, state: DecodeState, inputs: PrefillInputs, peers: Peers | None = None
    ) -> tuple[DecodeState, jax.Array]:
        """``DecodeStep.prefill_with_logprobs``."""
        return self.step(leaves, self.most, peers=peers).prefill_with_logprobs(state, inputs)

    def catch_up(
        self, leaves: Leaves, state: DecodeState, call: Call, peers: Peers | None = None
    ) -> tuple[DecodeState, None]:
        """The drafter reads the tokens that a round of the most drafts may have left unread."""
        rows = self.step(leaves, self.most, peers=peers).catch_up(take(state, call.rows, call.table), self.most + 1)
        return put(state, call.rows, rows), None

    def empty_state(self, leaves: Leaves) -> DecodeState:
        """An empty batch; not for a trace."""
        step = self.step(leaves, self.most)
        dtype, rows = DTYPES[self.config.dtype], self.config.num_rows

        def make() -> DecodeState:
            how = {"vocab_size": self.vocab_size, "estimates": self.estimates, "width": self.width(self.most)}
            return init_state(self.config, step.target, step.drafter, dtype, rows, **how)

        return make() if self.sharding is None else self.sharding.create(make)


class PackedProgram(Program):
    """A program whose inputs are one packed array on the host.

    Args:
      name: its name in messages and profiles.
      function: takes the common arguments of programs, and a pytree like ``example``.
      example: inputs that leave an idle batch as it is.
      options: XLA's.
      donate: the place of the state; ``OUTCOME`` for a program that does without.

    Attributes:
      packing: how the pytree lies in the array.
      idle: ``example``, packed.
    """

    def __init__(
        self, name: str, function: Callable, example: Any, options=None, donate: int | None = WEIGHTS_THEN_STATE
    ):
        self.packing = packing = HostPacking.of(example)
        self.idle = packing.pack(example)
        super().__init__(lambda *args: function(*args[:-1], packing.unpack(args[-1])), donate, options, name)


class Programs:
    """Every program of an engine; each takes the state and returns it with a result, which may be None, but for ``grammar``.

    Attributes:
      prefill: n -> (leaves, state, inputs), ``DecodeStep.prefill`` of n chunks.
      prefill_with_logprobs: the same for one number of chunks; returns their log-probabilities beside the state.
      admit: (rows, inputs), ``state.admit``, which takes and returns only the part of the state that has rows.
      catch_up: (leaves, state, call), for the drafter before a smaller K.
      decode: (b, K, R) -> (leaves, state, call), rounds of b rows with up to K drafts, of which the target reads R tokens
        in all, or every one if R is None; returns their ``CallLogs`` beside the state.
      processing_decode: b -> the same with up to the most drafts, for calls in which a row wants its logits processed or
        log-probabilities.
      draft: (b, processing) -> (leaves, state, call), the first part of a round of b rows; returns their ``Proposal``.
        Without ``processing``, no row may have processors or want log-probabilities.
      verify_pass: b -> (leaves, state, proposal, inputs), the target's part of that round; returns a ``VerifyPass``.
      grammar: m -> (outcome, inputs), ``StepBuilder.grammar`` of m rows that a grammar restricts.
      finish: (b, processing) -> (leaves, state, verified, allowed, call), its end; returns the ``CallLogs`` of one round.
      verify_shape: how many positions of a row ``GrammarInputs.allowed`` has, and V.
      save: (state, row, pages), ``saved.save``; returns the copy beside the state. Its arguments are not packed.
      restore: (state, row, pages, saved), ``saved.restore``. Its arguments are not packed.
      save_states, restore_states: (state, row) and (state, row, saved), ``saved.save_states`` and ``saved.restore_states``.
        Their arguments are not packed. They do nothing where the target has no recurrent states.
      most_admitted: how many requests ``admit`` takes.
      most_moved: how many pages ``save`` and ``restore`` move.
    """

    def __init__(self, builder: StepBuilder, target_leaves: Sequence[jax.Array], draft_lengths: Sequence[int]):
        config, sharding, largest = builder.config, builder.sharding, builder.most
        self.most_admitted = min(MOST_ADMITTED, config.max_batch)
        self.most_moved = min(MOST_MOVED, config.pages_per_row)
        self.verify_shape = builder.width(largest), builder.vocab_size

        def on_devices(function: Callable) -> Callable:
            return function if sharding is None else sharding.model_program(function)

        def replicated(function: Callable) -> Callable:
            return function if sharding is None else sharding.replicated(function)

        def decoding(name: str, function: Callable, example: Any, tokens: int) -> PackedProgram:
            """A part of a round, in which the target reads ``tokens`` tokens of all rows."""
            return PackedProgram(name, on_devices(function), example, decode_options(target_leaves, tokens))

        self.prefill = {
            n: PackedProgram(f"prefill_{n}x{config.chunk}", on_devices(builder.prefill), empty_prefill(config, n))
            for n in config.chunk_buckets
        }
        chunks, with_logprobs = empty_prefill(config, config.logprob_chunks), on_devices(builder.prefill_with_logprobs)
        self.prefill_with_logprobs = PackedProgram("prefill_with_logprobs", with_logprobs, chunks)
        no_request = [(config.num_rows, Request(0, [0], SamplingParams(), np.zeros(2, np.uint32)))]
        inputs = AdmitInputs.of(config, builder.vocab_size, self.most_admitted, no_request)
        self.admit = PackedProgram("admit", replicated(_without_result(admit)), inputs, donate=STATE)
        every_row = Call.of(config, config.max_batch, [], [], 1)
        self.catch_up = PackedProgram("catch_up", on_devices(builder.catch_up), every_row)
        self.decode: dict[tuple[int, int, int | None], PackedProgram] = {}
        self.processing_decode: dict[int, PackedProgram] = {}
        self.draft: dict[tuple[int, bool], PackedProgram] = {}
        self.grammar: dict[int, PackedProgram] = {}
        self.verify_pass: dict[int, PackedProgram] = {}
        self.finish: dict[tuple[int, bool], PackedProgram] = {}
        for b in config.batch_buckets:
            call, rows, tokens = Call.of(config, b, [], [], 1), f"{b}_rows", b * builder.width(largest)
            for K in draft_lengths:
                for R in builder.decoding.budgets(b, K):
                    name = f"decode_{rows}_{K}_drafts" + ("" if R is None else f"_{R}_tokens")
                    rounds = functools.partial(builder.rounds, K=K, budget=R)
                    self.decode[b, K, R] = decoding(name, rounds, call, R or b * builder.width(K))
            processing_rounds = builder.processing_rounds
            self.processing_decode[b] = decoding(f"decode_{rows}_processing", processing_rounds, call, tokens)
            for processing in (False, True):
                name = rows + "_processing" * processing
                draft, finish = (functools.partial(f, processing=processing) for f in (builder.draft, builder.finish))
                self.draft[b, processing] = decoding(f"draft_{name}", draft, call, tokens)
                self.finish[b, processing] = decoding(f"finish_{name}", finish, call, tokens)
            allowed = GrammarInputs.empty(b, *self.verify_shape)
            self.grammar[b] = PackedProgram(f"grammar_{rows}", replicated(builder.grammar), allowed, donate=OUTCOME)
            drafts = VerifyInputs(call, FixedDrafts.of(b, largest))
            self.verify_pass[b] = decoding(f"verify_pass_{rows}", builder.verify_pass, drafts, tokens)

        def copying(name: str, function: Callable) -> Program:
            return Program(function if sharding is None else sharding.copy_program(name, function), STATE, name=name)

        self.save = copying("save", _beside_state(save))
        self.restore = copying("restore", _without_result(restore))
        self.save_states = copying("save_states", _beside_state(save_states))
        self.restore_states = copying("restore_states", _without_result(restore_states))

    def index(self, program: Program) -> int:
        """The index of a program among all, which is the same in every process."""
        return next(index for index, other in enumerate(self) if other is program)

    def __iter__(self) -> Iterator[Program]:
        singles = self.prefill_with_logprobs, self.admit, self.catch_up, self.save, self.restore
        singles += self.save_states, self.restore_states
        decode = self.decode, self.processing_decode, self.draft, self.verify_pass, self.grammar, self.finish
        return itertools.chain(self.prefill.values(), singles, *(programs.values() for programs in decode))


def _without_result(function: Callable) -> Callable:
    """``(state, *args) -> (new state, None)``."""
    return lambda *args: (function(*args), None)


def _beside_state(function: Callable) -> Callable:
    """``(state, *args) -> (state, result)``."""
    return lambda state, *args: (state, function(state, *args))
