"""The functions of the programs: what each computes of flat weights, the state of the batch and its inputs.

A program takes flat leaves in place of modules, because calling a jitted function on an NNX module costs milliseconds. It
merges the modules inside of its trace.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.config import EngineConfig, TreeShape
from jspec.engine.adaptive.cost_table import RoundShape, budget_of, drafts_of, round_shapes
from jspec.engine.decoding import Decoding
from jspec.engine.round_log import CallLogs
from jspec.engine.runner.compile import one_order_options
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.engine.runner.state import DecodeState, init_state, put, put_rows, take, with_processors
from jspec.engine.runner.step import DecodeStep, VerifyPass
from jspec.engine.runner.step_io import DecodeRows, GrammarInputs, VerifyInputs
from jspec.models.causal import causal_logits
from jspec.models.one_order import one_order
from jspec.models.params import DTYPES
from jspec.pallas.collectives.peers import Peers
from jspec.sampling.tree import Tree
from jspec.sampling.verify import RULES, Proposal

Leaves = tuple[list[jax.Array], list[jax.Array]]  # the arrays of the target, and those of the draft model
Steps = Callable[..., DecodeStep]  # ``StepBuilder.step`` of the leaves and peers that a program has


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
    """

    merge_target: Callable[[Sequence[jax.Array]], Any]
    merge_draft: Callable[[Sequence[jax.Array]], Any]
    decoding: Decoding
    config: EngineConfig
    most: int
    vocab_size: int
    sharding: ProgramSharding | None = None

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Every K of rounds of chains."""
        return tuple(self.decoding.draft_lengths or (self.most,))

    def round_shapes(self, rows: int) -> list[RoundShape]:
        """Every round shape of a program of so many rows: chains in ascending order of K, then trees."""
        chains = round_shapes(self.draft_lengths, self.decoding.budgets, rows) if self.decoding.tree is None else []
        return [*chains, *self.decoding.trees(rows)]

    @property
    def trees(self) -> list[TreeShape]:
        """Every shape of trees that rounds may have."""
        return list(dict.fromkeys(tree for rows in self.config.batch_buckets for tree in self.decoding.trees(rows)))

    @property
    def usual(self) -> RoundShape:
        """Of rounds whose shape is not chosen, as where requests have options or a grammar: trees, if all rounds have them,
        else chains of the most drafts."""
        return self.decoding.tree or self.most

    def width(self, shape: RoundShape) -> int:
        """How many query tokens the target reads for each row in a round in which it reads all drafts."""
        return self.config.width or (shape.nodes if isinstance(shape, TreeShape) else drafts_of(shape) + 1)

    @property
    def restricted(self) -> int:
        """How many positions of a row a grammar may restrict. Where trees are drafted, such a row has a chain."""
        return self.width(self.most) if self.decoding.tree is None else self.most + 1

    def step(self, leaves: Leaves, shape: RoundShape, peers: Peers | None = None) -> DecodeStep:
        """For rounds of a shape.

        With K = 0 the drafter is the one of the most drafts, which catches up later. Models in shards are added up by
        ``peers``.
        """
        target, draft_model = self.merge_target(leaves[0]), self.merge_draft(leaves[1])
        for model in (target, draft_model):
            if peers is not None and getattr(model, "shards", None) is not None:
                model.peers = peers
        drafts = shape if isinstance(shape, TreeShape) else drafts_of(shape)
        own = drafts in (0, self.usual)
        drafter = self.decoding.make_drafter(target, draft_model, *(() if own else (drafts,)))
        # Without drafts every rule is the target's own draw, and ``match`` makes it in one pass over the vocabulary.
        rule, expand = RULES[self.decoding.rule if drafts else "match"], self.config.expand_latents
        width, noise = self.width(shape), self.decoding.noise
        return DecodeStep(target, drafter, rule, width, noise, expand, budget=budget_of(shape))

    def program(self, function: Callable) -> Callable:
        """``(leaves, state, *inputs, peers) -> (state, result)`` of a ``function(steps, state, *inputs)`` of those below."""

        def of_leaves(leaves: Leaves, state: DecodeState, *inputs, peers: Peers | None = None):
            return function(functools.partial(self.step, leaves, peers=peers), state, *inputs)

        return of_leaves if self.sharding is None else self.sharding.model_program(of_leaves)

    def forward(self) -> Callable:
        """The program ``(leaves of the target, int32 tokens [1, n]) -> logits float32 [n, V]`` of one causal pass."""

        def logits(leaves: Sequence[jax.Array], tokens):
            return causal_logits(self.merge_target(leaves), tokens)[0].astype(jnp.float32)

        ordered = one_order(self.config.one_order)
        spread = ordered(logits if self.sharding is None else self.sharding.forward(logits))
        return jax.jit(spread, compiler_options=one_order_options(self.config.one_order))

    def replicated(self, function: Callable) -> Callable:
        """A function of arrays that every device holds whole, over all devices."""
        return function if self.sharding is None else self.sharding.replicated(function)

    def catch_up(self, steps: Steps, state: DecodeState, call: DecodeRows) -> tuple[DecodeState, None]:
        """The drafter reads the tokens that a round of the most drafts may have left unread."""
        rows = steps(self.usual).catch_up(take(state, call.rows, call.table), self.most + 1)
        return put(state, call.rows, rows), None

    def rounds(
        self, steps: Steps, state: DecodeState, call: DecodeRows, shape: RoundShape
    ) -> tuple[DecodeState, CallLogs]:
        """``call.rounds`` rounds of a shape of the rows of the call, and their logs.

        No row of the call has processors or wants log-probabilities.
        """
        new, logs = self._rounds(steps(shape), with_processors(state, None), call, drafts_of(shape))
        return with_processors(new, state.request.processors), logs

    def processing_rounds(self, steps: Steps, state: DecodeState, call: DecodeRows) -> tuple[DecodeState, CallLogs]:
        """Rounds of up to the most drafts, of rows that may have processors and want log-probabilities.

        These cost time even where no row does.
        """
        return self._rounds(self._processing(steps(self.usual)), state, call, self.most)

    def draft(
        self, steps: Steps, state: DecodeState, call: DecodeRows, processing: bool
    ) -> tuple[DecodeState, Proposal | Tree]:
        """The first part of a round of the rows of a call: ``DecodeStep.draft``.

        ``processing`` says whether one of the rows may have processors, or want log-probabilities.
        """
        rows = take(state if processing else with_processors(state, None), call.rows, call.table)
        after, proposal = steps(self.usual).draft(rows)
        draft_rows = put_rows(state.draft_rows, call.rows, after.draft_rows)
        return dataclasses.replace(state, draft=after.draft, draft_rows=draft_rows), proposal

    def verify_pass(
        self, steps: Steps, state: DecodeState, proposal: Proposal | Tree, inputs: VerifyInputs
    ) -> tuple[DecodeState, VerifyPass]:
        """``DecodeStep.verify_pass`` of the same rows, whose jump-forward tokens become their first drafts."""
        rows, step = take(state, inputs.call.rows, inputs.call.table), steps(self.usual)
        after, verified = step.verify_pass(rows, inputs.jump_forward.put_into(proposal, step.room(rows)))
        if state.recurrent is not None:
            recurrent = put_rows(state.recurrent, inputs.call.rows, after.recurrent)
            state = dataclasses.replace(state, recurrent=recurrent)
        return dataclasses.replace(state, cache=after.cache), verified

    def grammar(self, outcome: jax.Array, inputs: GrammarInputs) -> jax.Array:
        """The tokens that may come in every row of the largest call, uint32 ``[max_batch, restricted, ceil(V / 32)]``.

        Of ``outcome``, which is the state's, only the devices matter: they are those of the result.
        """
        del outcome
        return inputs.of_all_rows(self.config.max_batch)

    def finish(
        self,
        steps: Steps,
        state: DecodeState,
        verified: VerifyPass,
        allowed: jax.Array,
        call: DecodeRows,
        processing: bool,
    ) -> tuple[DecodeState, CallLogs]:
        """``DecodeStep.finish`` of the same rows; ``processing`` as for ``draft``."""
        step = self._processing(steps(self.usual)) if processing else steps(self.usual)
        batch = state if processing else with_processors(state, None)
        rows, log = step.finish(take(batch, call.rows, call.table), verified, allowed[: len(call.rows)])
        logs = jax.tree.map(lambda x: x[None], CallLogs(log.packed(), log.logprobs))
        return with_processors(put(batch, call.rows, rows), state.request.processors), logs

    def _processing(self, step: DecodeStep) -> DecodeStep:
        return dataclasses.replace(step, logprobs=True)

    def _rounds(self, step: DecodeStep, state: DecodeState, call: DecodeRows, K: int) -> tuple[DecodeState, CallLogs]:
        decode = step.decode_plainly if K == 0 < self.most else step.decode
        rows, logs = decode(take(state, call.rows, call.table), self.config.rounds, call.rounds)
        return put(state, call.rows, rows), logs

    def empty_state(self, leaves: Leaves) -> DecodeState:
        """An empty batch; not for a trace."""
        step, buckets = self.step(leaves, self.usual), self.config.batch_buckets
        budgeted = any(budget_of(shape) is not None for b in buckets for shape in self.round_shapes(b))

        def make() -> DecodeState:
            return init_state(
                self.config,
                step.target,
                step.drafter,
                DTYPES[self.config.dtype],
                num_rows=self.config.num_rows,
                vocab_size=self.vocab_size,
                estimates=budgeted,  # acceptance statistics, by which the tokens of a budget are shared out
                width=self.width(self.usual),
            )

        return (make if self.sharding is None else self.sharding.creating(make))()
