"""Requests that want fewer drafts than the engine makes: each keeps its distribution, in one batch with all others."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from disturbances import attribute

from jspec.engine.runner.step import DecodeStep
from jspec.sampling.verify import RULES
from lossless import served, steps
from lossless.checks import p_values
from lossless.distributions import Warp
from lossless.losslessness import Losslessness, Run, ServedLosslessness, runs_of
from lossless.statistics import LEVEL
from lossless.steps import Ask, Program, SameNoise
from lossless.table_model import TABLES, V

QUICK, LONG = 8_000, 200_000  # texts of every ask
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
SERVED = Program("rejection", draft_positions=served.SLOTS, slots=served.SLOTS)


class TestSteps(Losslessness):
    asks, seed = ASKS, 91
    runs = (*runs_of(PROGRAMS[:1], PROGRAMS[1:2], QUICK), *(Run(program, LONG, "long") for program in PROGRAMS))


class TestServed(ServedLosslessness):
    asks, seed = ASKS, 92
    runs = (Run(SERVED, 5_000, reproducible=True), Run(SERVED, LONG, "long"))


def test_texts_of_coupled_drafts_do_not_depend_on_the_cap():
    program, warp = PROGRAMS[2], Warp(0.9)
    texts = [
        steps.play(program, TABLES, 4_000, seed=93, asks=[Ask((3, 1), warp, max_drafts=most)])[0].texts
        for most in (None, 1, 0)
    ]
    assert np.count_nonzero(texts[0]) > 100
    assert all((one == texts[0]).all() for one in texts)


def fault_p_values(program: Program) -> list[float]:
    """Of the asks with some drafts, but fewer than there are, and of the one without a cap."""
    played = TestSteps.with_oracles(program, steps.play(program, TABLES, 15_000, seed=94, asks=ASKS))
    return p_values([played[i] for i in (0, 2, 3)])


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.long)])
def test_drafts_past_the_cap_that_count_as_rejected_are_detected(rule):
    """The token after the last counted draft is then drawn as a recovered token, which avoids the draft in its place."""
    propose = DecodeStep._propose

    def propose_all(self, state, *rest):
        free = dataclasses.replace(state.request, max_drafts=jnp.full_like(state.request.max_drafts, steps.K))
        return propose(self, dataclasses.replace(state, request=free), *rest)

    def apply_rule(self, state, processing, logits, proposal):
        def refused(accepted, count, noise):
            return jnp.minimum(accepted, state.request.max_drafts)

        rule_of = functools.partial(RULES[rule], decide=refused)
        return rule_of(processing.apply(logits, proposal.tokens), state.request.warp, proposal, self._noise(state))

    with attribute(DecodeStep, "_propose", propose_all), attribute(DecodeStep, "_apply_rule", apply_rule):
        *capped, free = fault_p_values(Program(rule, noise=SameNoise))
    assert max(capped) < LEVEL
    assert free >= LEVEL
    assert min(fault_p_values(Program(rule))) >= LEVEL
