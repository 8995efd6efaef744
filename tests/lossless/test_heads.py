"""Whole steps with every kind of head: the joint distribution of completions over many rounds, the acceptance of every
round."""

import itertools
from unittest import mock

import jax.numpy as jnp
import pytest

from jspec.sampling import verify
from lossless.head_program import HEADS, HeadOracle, HeadProgram
from lossless.judge import assert_acceptance, assert_eventful, assert_texts, assert_texts_together
from lossless.statistics import LEVEL, p_value
from lossless.steps import ASKS, N, play

RULES, DRAWN = ("match", "rejection", "block"), ("sample", "argmax", "auto")
FACTORS = ("head", "verify", "draft_sampling")
QUICK = (
    HeadProgram("rejection", "eagle"),
    HeadProgram("rejection", "p-eagle", "auto"),
    HeadProgram("match", "pard", "coupled"),
    HeadProgram("block", "mlp", draft_temperature=1.4),
    HeadProgram("match", "medusa", "argmax"),
)
PAIRS = (
    *(HeadProgram("match", head, "coupled") for head in HEADS),
    *(HeadProgram(rule, head, DRAWN[(i + j) % 3]) for i, head in enumerate(HEADS) for j, rule in enumerate(RULES)),
)


@pytest.fixture(
    scope="module",
    params=[
        *((program, 20_000) for program in QUICK),
        *(pytest.param((program, 200_000), marks=pytest.mark.long) for program in PAIRS),
    ],
    ids=lambda param: f"{param[0].verify}-{param[0].head}-{param[0].draft_sampling}-{param[1]}",
)
def played(request):
    program, samples = request.param
    tallies = play(program, None, samples, seed=71)
    return samples, [(HeadOracle(program, ask, None), tally) for ask, tally in zip(ASKS, tallies, strict=True)]


def test_joint_distribution_of_completions(played):
    for oracle, tally in played[1]:
        assert_texts(oracle, tally)
    assert_texts_together(played[1])


def test_acceptance_of_every_round(played):
    for oracle, tally in played[1]:
        assert_acceptance(oracle, tally)


def test_something_was_drafted_accepted_rejected_and_recovered(played):
    samples, asks = played
    for oracle, tally in asks:
        if oracle.ask.warp.temperature:
            assert_eventful(oracle, tally, recovered=samples // 200)


def test_heads_rules_and_ways_of_drawing_are_covered_pairwise():
    for a, b in itertools.combinations(FACTORS, 2):
        covered = {(getattr(program, a), getattr(program, b)) for program in PAIRS}
        levels = ({getattr(program, name) for program in PAIRS} for name in (a, b))
        missing = set(itertools.product(*levels)) - covered
        assert missing == ({("rejection", "coupled"), ("block", "coupled")} if a == "verify" else set())


def dropping(rule):
    """A rule whose residual is zero outside the head's vocabulary, where it should be all of p."""
    residual_draw = verify.residual_draw

    def faulty(logits, warp, proposal, noise):
        unknown = jnp.isneginf(proposal.distribution.warped.logits[:, :1])

        def draw(residual, masses, at, *how):
            del masses
            refused = (at < residual.valid) & ~residual.point_mass[:, 0]  # the same for all drafts of a row
            logits = jnp.where(refused[:, None, None] & unknown, -jnp.inf, residual.p.logits)
            residual = residual._replace(p=residual.p._replace(logits=logits))
            return residual_draw(residual, verify.residual_masses(residual), at, *how)

        with mock.patch.object(verify, "residual_draw", draw):
            return rule(logits, warp, proposal, noise)

    return faulty


def projecting(rule):
    """A rule that compares with p on the head's vocabulary, renormalised."""

    def faulty(logits, warp, proposal, noise):
        unknown = jnp.isneginf(proposal.distribution.warped.logits[:, :1])
        drafted = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] < proposal.count[:, None]
        return rule(jnp.where(unknown & drafted[:, :, None], -jnp.inf, logits), warp, proposal, noise)

    return faulty


class TestReducedVocabulary:
    """The EAGLE-3 head knows half of the tokens, and they are not the likeliest."""

    SAMPLES = 20_000

    def play(self, program):
        tallies = play(program, None, self.SAMPLES, seed=72)
        return [(HeadOracle(program, ask, None), tally) for ask, tally in zip(ASKS, tallies, strict=True)]

    @pytest.mark.parametrize("rule", ["rejection", "block"])
    def test_it_is_lossless(self, rule):
        for oracle, tally in self.play(HeadProgram(rule, "eagle3")):
            assert_texts(oracle, tally)
            assert_acceptance(oracle, tally)
            if oracle.ask.warp.temperature:
                assert_eventful(oracle, tally, recovered=self.SAMPLES // 200)
                _, draft = oracle.drafts((*oracle.ask.prompt, 1))
                unknown = draft((*oracle.ask.prompt, 1)) == 0
                assert oracle.target((*oracle.ask.prompt, 1))[unknown].sum() > 0.4

    @pytest.mark.parametrize("fault", [dropping, pytest.param(projecting, marks=pytest.mark.long)])
    def test_a_target_cut_to_the_heads_vocabulary_is_seen(self, fault):
        for oracle, tally in self.play(HeadProgram("rejection", "eagle3", fault=fault)):
            if oracle.ask.warp.temperature:
                texts = (tally.texts, oracle.texts)
                assert p_value(*(x.sum(axis=tuple(range(3, N))).ravel() for x in texts)) < LEVEL
