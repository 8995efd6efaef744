"""Requests whose tokens a grammar or a thinking budget restricts, among others: their texts are those of masked sampling."""

import dataclasses

import jax.numpy as jnp
import pytest
from disturbances import attribute

from jspec.engine.runner.split_rounds import SplitRounds
from jspec.engine.runner.step import DecodeStep
from jspec.text.thinking import BudgetConstraint
from lossless import served
from lossless.budgets import budget
from lossless.checks import FIRST, p_values
from lossless.distributions import Grammar, Options, Warp
from lossless.losslessness import Run, ServedLosslessness, engine_of
from lossless.statistics import LEVEL
from lossless.steps import Ask, Program, SameNoise
from lossless.table_model import V

RUNS_FOR_LONG = True  # so that XLA optimises: conftest.py
QUICK, LONG = 4_000, 100_000  # texts of all asks; rounds are looked at that came 100 times
# State 2 leaves one token. That of state 1 is a guess, which the target may not follow.
GRAMMAR = Grammar(following=((1, 0, -1, 2), (-1, -1, 0, 1), (0, -1, -1, -1)), jump_forward=(-1, 2, 0))
PENALTIES = {"repetition_penalty": 1.6, "frequency_penalty": 0.5}
ASKS = (
    Ask((1,), Warp(), options=Options(grammar=GRAMMAR)),
    Ask((2, 0, 1, 3, 1, 0, 2), Warp(1.3), options=Options(grammar=GRAMMAR)),  # to the last slot of the cache
    Ask((2, 0, 1), Warp(0.8), stop_tokens=(2,), options=Options(grammar=GRAMMAR, **PENALTIES)),
    Ask((2, 0, 3, 3, 1, 0, 2), Warp(0.8)),
    Ask((0, 2, 1, 3), Warp(0.0), share=1, options=Options(grammar=GRAMMAR)),
)
PROGRAMS = (
    (Program("rejection", draft_positions=served.SLOTS, slots=served.SLOTS), False),
    (Program("block", draft_positions=9, draft_vocab=V - 1, slots=served.SLOTS), True),
    (Program("block", draft_positions=9, draft_tokens=(3, 0, 2), slots=served.SLOTS), True),
    (Program("match", draft_sampling="coupled", draft_positions=served.SLOTS, slots=served.SLOTS), False),
    (Program("rejection", "ngram", slots=served.SLOTS), False),
    (Program("block", lookup=True, draft_positions=served.SLOTS, slots=served.SLOTS), True),
    (Program("match", "none", slots=served.SLOTS), False),
)


THINKING = (
    Ask((1,), Warp(), options=Options(grammar=budget((0, 2), (3,), 2, True))),
    Ask((2, 0, 1, 3, 1), Warp(1.3), options=Options(grammar=budget((1,), (2, 3), 1, False))),
    Ask((2, 0, 1), Warp(0.8), options=Options(grammar=budget((1,), (3,), 1, True), **PENALTIES)),
    Ask((2, 0, 3, 3, 1, 0, 2), Warp(0.8)),
)


class TestServed(ServedLosslessness):
    asks, seed = ASKS, 91
    preemptions = 0.4  # since a request whose drafts wait is spared every second time
    runs = (
        Run(PROGRAMS[0][0], QUICK, reproducible=True),  # free requests beside constrained ones share their program
        Run(PROGRAMS[0][0], QUICK, "nightly"),
        *(Run(program, QUICK, "nightly", exact) for program, exact in PROGRAMS[3:5]),
        *(Run(program, LONG, "long", exact) for program, exact in PROGRAMS),
    )


@pytest.mark.nightly
def test_drafts_cut_off_where_the_grammar_rejects_one_are_detected():
    """Instead of being rejected. The token there is then drawn from all of p, and not from what the drafter left of it."""
    verify = DecodeStep.verify

    def cut(self, state, proposal, allowed=None):
        flags = allowed[:, : proposal.tokens.shape[1], 0]
        refused = (flags >> proposal.tokens.astype(jnp.uint32)) & 1 == 0
        first = jnp.min(jnp.where(refused, jnp.arange(refused.shape[1])[None], refused.shape[1]), axis=1)
        return verify(self, state, dataclasses.replace(proposal, count=jnp.minimum(proposal.count, first)), allowed)

    program = dataclasses.replace(PROGRAMS[0][0], noise=SameNoise)
    with attribute(DecodeStep, "verify", cut):
        tallies = served.play(engine_of(program, True), 6_000, seed=92, asks=ASKS)
    assert min(p_values(TestServed.with_oracles(program, tallies)[:2], FIRST)) < LEVEL


def test_a_walk_along_drafts_that_were_replaced_is_detected():
    """The drafter's own, where jump-forward tokens have taken their place."""
    walk = SplitRounds._walk

    def along_its_own(self, rows, proposal, jump_forward):
        return walk(self, rows, proposal, [[] for _ in jump_forward])

    program = PROGRAMS[0][0]  # whose engine is there: the fault is in no program
    with attribute(SplitRounds, "_walk", along_its_own):
        tallies = served.play(engine_of(program, True), 2_500, seed=93, asks=ASKS)
    assert min(p_values(TestServed.with_oracles(program, tallies)[:3], FIRST)) < LEVEL


class TestThinkingBudgets(ServedLosslessness):
    asks, seed = THINKING, 95
    runs = (
        Run(PROGRAMS[0][0], QUICK, reproducible=True),  # whose engine is there
        *TestServed.runs[1:],
    )
    preemptions = TestServed.preemptions


@pytest.mark.nightly
def test_a_budget_that_is_counted_by_rounds_is_detected():
    """The marker comes at the first position of a round alone, as where a server looks at the text between rounds."""
    allow = BudgetConstraint.allow

    def at_rounds(self, drafts, flags):
        allow(self, [], flags)

    program = PROGRAMS[0][0]  # whose engine is there: the fault is in no program
    with attribute(BudgetConstraint, "allow", at_rounds):
        tallies = served.play(engine_of(program, True), 2_500, seed=96, asks=THINKING)
    assert min(p_values(TestThinkingBudgets.with_oracles(program, tallies)[:2], FIRST)) < LEVEL
