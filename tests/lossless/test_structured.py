"""Requests whose tokens a grammar restricts, among others: their texts have the distribution of masked sampling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from disturbances import attribute

from jspec.engine.step import DecodeStep
from lossless import served
from lossless.distributions import Grammar, Options, Warp
from lossless.judge import assert_acceptance, assert_texts, assert_texts_together
from lossless.oracle import Oracle
from lossless.statistics import LEVEL, p_value
from lossless.steps import Ask, Program
from lossless.table_model import V, random_tables

QUICK, LONG = 4_000, 100_000  # texts of all asks; rounds are looked at that came 100 times
TABLES = random_tables(0)
# State 2 leaves one token. That of state 1 is a guess, which the target may not follow.
GRAMMAR = Grammar(following=((1, 0, -1, 2), (-1, -1, 0, 1), (0, -1, -1, -1)), forced=(-1, 2, 0))
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
    (Program("match", draft_sampling="coupled", draft_positions=served.SLOTS, slots=served.SLOTS), False),
    (Program("rejection", "ngram", slots=served.SLOTS), False),
    (Program("match", "none", slots=served.SLOTS), False),
)


@functools.cache
def engine_of(program: Program, reproducible: bool):
    return served.engine(program, TABLES, reproducible)


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param((*program, QUICK), marks=[] if i < 1 else pytest.mark.long)
            for i, program in enumerate(PROGRAMS)
        ),
        *(pytest.param((*program, LONG), marks=pytest.mark.long) for program in PROGRAMS),
    ],
    ids=lambda param: f"{param[0].verify}-{param[0].method}-{param[2]}",
)
def played(request):
    program, reproducible, samples = request.param
    tallies = served.play(engine_of(program, reproducible), samples, seed=91, asks=ASKS)
    return [(Oracle(program, ask, TABLES), tally) for ask, tally in zip(ASKS, tallies, strict=True)]


def test_joint_distribution_of_completions(played):
    for oracle, tally in played:
        assert_texts(oracle, tally)
    assert_texts_together(played)


def test_acceptance_of_every_round(played):
    for oracle, tally in played:
        assert_acceptance(oracle, tally)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SameNoise(PROGRAMS[0][0].noise):
    """The noise of a program that is not taken for another one."""


def test_drafts_that_are_cut_off_where_the_grammar_refuses_one_are_seen():
    """Instead of being rejected. The token there is then drawn from all of p, and not from what the drafter left of it."""
    judge = DecodeStep.judge

    def cut(self, state, proposal, allowed=None):
        flags = allowed[:, : proposal.tokens.shape[1], 0]
        refused = (flags >> proposal.tokens.astype(jnp.uint32)) & 1 == 0
        first = jnp.min(jnp.where(refused, jnp.arange(refused.shape[1])[None], refused.shape[1]), axis=1)
        return judge(self, state, dataclasses.replace(proposal, count=jnp.minimum(proposal.count, first)), allowed)

    def smallest(program: Program) -> float:
        tallies = served.play(engine_of(program, False), 6_000, seed=92, asks=ASKS)
        views = [tally.texts.sum(axis=(3, 4, 5)).ravel() for tally in tallies[:2]]
        expected = [Oracle(program, ask, TABLES).texts.sum(axis=(3, 4, 5)).ravel() for ask in ASKS[:2]]
        return min(p_value(*pair) for pair in zip(views, expected, strict=True))

    program = dataclasses.replace(PROGRAMS[0][0], noise=SameNoise)
    with attribute(DecodeStep, "judge", cut):
        assert smallest(program) < LEVEL
