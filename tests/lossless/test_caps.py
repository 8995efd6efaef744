"""Requests that want fewer drafts than the engine makes: each keeps its distribution, in one batch with all others."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from disturbances import attribute

from jspec.engine.step import DecodeStep
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES
from lossless import served, steps
from lossless.distributions import Warp
from lossless.judge import assert_acceptance, assert_eventful, assert_texts, assert_texts_together
from lossless.oracle import Oracle
from lossless.statistics import LEVEL, p_value
from lossless.steps import Ask, Program
from lossless.table_model import V, random_tables

QUICK, LONG = 20_000, 200_000  # texts of every ask
TABLES = random_tables(0)
ASKS = (
    Ask((1,), Warp(), max_drafts=1),
    Ask((2, 0, 1), Warp(1.3, top_k=3), max_drafts=0),  # to the last slot of the cache
    Ask((3, 1), Warp(0.6, top_p=0.9, min_p=0.05), (2,), min_tokens=2, max_drafts=1),
    Ask((3, 1), Warp(0.9)),
    Ask((2, 3), Warp(0.8), max_drafts=2),
    Ask((0, 2), Warp(0.0), share=1, max_drafts=1),
)
PROGRAMS = (
    Program("rejection"),
    Program("block", draft_positions=6, draft_vocab=V - 1),
    Program("match", draft_sampling="coupled"),
    Program("rejection", "ngram"),
)


@pytest.fixture(
    scope="module",
    params=[
        *((program, QUICK) for program in PROGRAMS[:2]),
        *(pytest.param((program, LONG), marks=pytest.mark.long) for program in PROGRAMS),
    ],
    ids=lambda param: f"{param[0].verify}-{param[0].method}-{param[1]}",
)
def played(request):
    program, samples = request.param
    tallies = steps.play(program, TABLES, samples, seed=91, asks=ASKS)
    return [(Oracle(program, ask, TABLES), tally) for ask, tally in zip(ASKS, tallies, strict=True)]


def test_joint_distribution_of_completions(played):
    for oracle, tally in played:
        assert_texts(oracle, tally)
    assert_texts_together(played)


def test_every_round_has_as_many_drafts_as_it_may_and_accepts_what_it_should(played):
    for oracle, tally in played:
        assert_acceptance(oracle, tally)


def test_something_was_drafted_accepted_rejected_and_recovered(played):
    for oracle, tally in played:
        if oracle.program.method == "draft_model" and oracle.ask.warp.temperature and oracle.ask.max_drafts != 0:
            assert_eventful(oracle, tally, recovered=150)


SERVED = Program("rejection", draft_positions=served.SLOTS, slots=served.SLOTS)


@pytest.mark.parametrize("samples", [5_000, pytest.param(LONG, marks=pytest.mark.long)])
def test_texts_as_users_get_them(samples):
    engine = served.engine(SERVED, TABLES, reproducible=False)
    tallies = served.play(engine, samples, seed=92, asks=ASKS)
    pairs = [(Oracle(SERVED, ask, TABLES), tally) for ask, tally in zip(ASKS, tallies, strict=True)]
    for oracle, tally in pairs:
        assert_texts(oracle, tally)
        assert_acceptance(oracle, tally)
    assert_texts_together(pairs)
    assert engine.metrics().num_preemptions > engine.metrics().num_calls


def test_texts_of_coupled_drafts_do_not_depend_on_the_cap():
    program, warp = PROGRAMS[2], Warp(0.9)
    texts = [
        steps.play(program, TABLES, 4_000, seed=93, asks=[Ask((3, 1), warp, max_drafts=most)])[0].texts
        for most in (None, 1, 0)
    ]
    assert np.count_nonzero(texts[0]) > 100
    assert all((one == texts[0]).all() for one in texts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SameNoise(RoundNoise):
    """The noise of a program that is not taken for another one, whose trace JAX would reuse."""


def p_values(program: Program) -> list[float]:
    """Of the last three tokens of the asks with some drafts, but fewer than there are, and of the one without a cap."""
    tallies = steps.play(program, TABLES, 15_000, seed=94, asks=ASKS)
    pairs = [(Oracle(program, ASKS[i], TABLES), tallies[i]) for i in (0, 2, 3)]
    return [
        p_value(tally.texts.sum(axis=(0, 1, 2)).ravel(), oracle.texts.sum(axis=(0, 1, 2)).ravel())
        for oracle, tally in pairs
    ]


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.long)])
def test_drafts_behind_the_cap_that_count_as_refused_are_seen(rule):
    """The token after the last draft that may stand is then drawn as a correction, which shuns the draft in its place."""
    propose = DecodeStep._propose

    def propose_all(self, state, *rest):
        free = dataclasses.replace(state.request, max_drafts=jnp.full_like(state.request.max_drafts, steps.K))
        return propose(self, dataclasses.replace(state, request=free), *rest)

    def verdict(self, state, processing, logits, proposal):
        def refused(accepted, count, noise):
            return jnp.minimum(accepted, state.request.max_drafts)

        rule_of = functools.partial(RULES[rule], decide=refused)
        return rule_of(processing.apply(logits, proposal.tokens), state.request.warp, proposal, self._noise(state))

    with attribute(DecodeStep, "_propose", propose_all), attribute(DecodeStep, "_verdict", verdict):
        *capped, free = p_values(Program(rule, noise=SameNoise))
    assert max(capped) < LEVEL
    assert free >= LEVEL
    assert min(p_values(Program(rule))) >= LEVEL
