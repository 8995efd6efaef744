"""Verification budgets leave the distribution of texts unchanged if a draft does not affect its own selection; the suite
detects where one does.
"""

import dataclasses
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafting.block import Block
from jspec.engine.adaptive.draft_selection import select_drafts
from jspec.engine.runner import step
from lossless.checks import FIRST, p_values
from lossless.head_program import HeadOracle, HeadProgram
from lossless.losslessness import Losslessness, Run, runs_of
from lossless.statistics import LEVEL
from lossless.steps import CONFIG, Program, decoded, play
from lossless.table_model import TABLES

RUNS_FOR_LONG = True  # so that XLA optimises: conftest.py
BUDGET = CONFIG.max_batch * 13 // 8  # of all rows: at first 5 of 16 drafts, and more of them as texts end
QUICK = (
    Run(Program("rejection", budget=BUDGET), 8_000),
    Run(Program("block", budget=BUDGET), 24_000, "nightly"),
    Run(Program("match", draft_sampling="coupled", budget=BUDGET), 12_000, "nightly"),
)
LONG = (
    Program("rejection", budget=BUDGET),
    Program("rejection", draft_sampling="auto", budget=BUDGET),
    Program("block", budget=BUDGET),
    Program("rejection", draft_temperature=0.5, budget=BUDGET),
    Program("block", "ngram", budget=BUDGET),
    Program("rejection", lookup=True, budget=BUDGET),
)


class TestBudget(Losslessness):
    runs = (*QUICK, *(Run(program, 200_000, "long") for program in LONG))
    seed = 53
    least = 0.02  # share of the rounds that verify each number of drafts

    def test_acceptance_of_every_round(self, played):
        """No round verifies more drafts than there are. How many it does depends on these drafts, so that what it accepts
        has no distribution that is known from the text alone."""
        for oracle, tally in played:
            for code in np.flatnonzero(tally.rounds.sum(axis=(1, 2))):
                most, _ = oracle.drafts(oracle.ask.prompt + decoded(code))
                assert tally.rounds[code, most + 1 :].sum() == 0

    def test_every_event_of_a_round_occurs(self, played):
        """And rounds of every size came after the same text, because others had the rest of the budget."""
        super().test_every_event_of_a_round_occurs(played)
        for oracle, tally in played:
            if oracle.ask.warp.temperature and oracle.program.method != "ngram":
                verified = tally.rounds.sum(axis=(0, 2)) / tally.rounds.sum()
                assert verified.min() > self.least, verified


HEADS = (HeadProgram("rejection", "dspark-sure", budget=BUDGET), HeadProgram("block", "eagle", budget=BUDGET))
LONG_HEADS = (
    *HEADS,
    HeadProgram("block", "dspark-sure", "auto", budget=BUDGET),
    HeadProgram("rejection", "dflash", budget=BUDGET),
    HeadProgram("rejection", "medusa", budget=BUDGET),
    HeadProgram("match", "eagle3", "coupled", budget=BUDGET),
    HeadProgram("rejection", "eagle", lookup=True, budget=BUDGET),
)


class TestBudgetOfHeads(TestBudget):
    """Confidence heads among them."""

    tables, oracle = None, HeadOracle
    runs = (*runs_of(HEADS[:1], HEADS[1:], 12_000), *(Run(program, 200_000, "long") for program in LONG_HEADS))
    seed = 55
    least = 0.005  # a DFlash head has few rows whose second draft is worth a place


def of_the_draft_itself(drafter, proposal, hidden, anchor):
    """As a confidence head might say that is given the draft of a slot in place of the draft before it."""
    del drafter, hidden, anchor
    return dataclasses.replace(proposal, confidence=jnp.where(proposal.tokens % 2 == 0, 0.9, 0.1))


@dataclasses.dataclass(frozen=True)
class OffByOne(HeadProgram):
    """A program that is not taken for the one without the fault."""


@pytest.mark.nightly
@pytest.mark.parametrize("sound", [False, True])
def test_confidence_that_depends_on_its_own_draft_is_detected(sound):
    program = (HeadProgram if sound else OffByOne)("rejection", "dspark-sure", budget=BUDGET)
    kept = Block._with_confidence
    with mock.patch.object(Block, "_with_confidence", kept if sound else of_the_draft_itself):
        *sampled, _ = p_values(TestBudgetOfHeads.with_oracles(program, play(program, None, 8_000, seed=56)), FIRST)
    assert (min(sampled) >= LEVEL) == sound


def drawn(proposal):
    """The probability of each draft itself, in place of what is known before it is drawn."""
    assert proposal.distribution is not None
    return jnp.exp(proposal.distribution.log_prob(proposal.tokens))


def whole_rows(acceptance, count, spare):
    """Drafts ranked by what their whole row is worth: draft 0 by the confidence in draft 1, which follows from draft 0."""
    together = jnp.broadcast_to(jnp.min(acceptance, axis=1, keepdims=True), acceptance.shape)
    return select_drafts(together, count, spare)


@dataclasses.dataclass(frozen=True)
class Peeking(Program):
    """A program that is not taken for another one, whose trace JAX would reuse where a fault is put in."""

    fault: str = "none"


FAULTS = {"drawn": {"confidence_of": drawn}, "whole rows": {"select_drafts": whole_rows}}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.long)])
def test_selection_that_depends_on_its_own_draft_is_detected(rule, fault):
    program = Peeking(rule, budget=BUDGET, fault=fault)
    with mock.patch.multiple(step, **FAULTS[fault]):
        *sampled, greedy = p_values(TestBudget.with_oracles(program, play(program, TABLES, 8_000, seed=54)), FIRST)
    assert min(sampled) < LEVEL  # which TestBudget's, the same program without the fault, are not
    assert greedy == 1.0
