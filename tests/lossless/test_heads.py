"""Whole steps with every kind of head: the joint distribution of completions over many rounds, the acceptance of every
round."""

import dataclasses
import itertools
from unittest import mock

import jax.numpy as jnp
import pytest

from jspec.drafting import assistant
from jspec.drafting.block import Block
from jspec.models.kv_cache import PagedView
from jspec.sampling import verify
from lossless.checks import FIRST, assert_acceptance, p_values
from lossless.head_program import OF_LLAMA, HeadOracle, HeadProgram
from lossless.losslessness import Losslessness, Run, runs_of
from lossless.statistics import LEVEL
from lossless.steps import play

RULES, DRAWN = ("match", "rejection", "block"), ("sample", "argmax", "auto")
FACTORS = ("head", "verify", "draft_sampling")
QUICK = (
    HeadProgram("rejection", "p-eagle", "auto"),
    HeadProgram("match", "pard", "coupled"),
    HeadProgram("rejection", "dspark"),
    HeadProgram("block", "dflash2"),
    HeadProgram("rejection", "xpress"),
    HeadProgram("rejection", "eagle-small"),
    HeadProgram("rejection", "lilicorr"),
)
NIGHTLY = (
    HeadProgram("block", "mlp", draft_temperature=1.4),
    HeadProgram("rejection", "eagle"),
    HeadProgram("match", "medusa", "argmax"),
    HeadProgram("block", "dflash"),
    HeadProgram("block", "mlp-small", "auto"),
    HeadProgram("rejection", "mtp-small"),
    HeadProgram("block", "domino"),
    HeadProgram("rejection", "assistant"),
)
PAIRS = (
    *(HeadProgram("match", head, "coupled") for head in OF_LLAMA),
    *(HeadProgram(rule, head, DRAWN[(i + j) % 3]) for i, head in enumerate(OF_LLAMA) for j, rule in enumerate(RULES)),
)


class HeadLosslessness(Losslessness):
    tables, oracle = None, HeadOracle


class TestSteps(HeadLosslessness):
    runs = (*runs_of(QUICK, NIGHTLY, 8_000), *(Run(program, 200_000, "long") for program in PAIRS))
    seed = 71


def test_heads_rules_and_draft_sampling_are_covered_pairwise():
    for a, b in itertools.combinations(FACTORS, 2):
        covered = {(getattr(program, a), getattr(program, b)) for program in PAIRS}
        levels = ({getattr(program, name) for program in PAIRS} for name in (a, b))
        missing = set(itertools.product(*levels)) - covered
        assert missing == ({("rejection", "coupled"), ("block", "coupled")} if a == "verify" else set())


@dataclasses.dataclass(frozen=True)
class SeesTooMuch(HeadProgram):
    """A program whose assistant sees the slot of the newest token, which the target has not read."""

    def drafter(self, target, head):
        drafter = super().drafter(target, head)

        @dataclasses.dataclass(frozen=True)
        class Late(type(drafter)):
            def propose(self, state, context):
                view = lambda table, positions, valid: PagedView(table, positions + 1, valid)  # noqa: E731
                with mock.patch.object(assistant, "PagedView", view):
                    return super().propose(state, context)

        return Late(**{field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)})


@pytest.mark.nightly
def test_keys_of_a_refused_draft_are_detected():
    """By the drafts that are accepted: the text is the target's, whatever is drafted."""
    program = SeesTooMuch("rejection", "assistant")
    played = HeadLosslessness.with_oracles(program, play(program, None, 8_000, seed=74))
    sampled = [pair for pair in played if pair[0].ask.warp.temperature]
    assert min(p_values(sampled, FIRST)) > LEVEL
    with pytest.raises(AssertionError, match="accepted drafts"):
        assert_acceptance(*sampled[0])


def dropping(rule):
    """A rule whose residual is zero outside the head's vocabulary, where it should be all of p."""
    residual_sample = verify.residual_sample

    def faulty(logits, warp, proposal, noise):
        unknown = proposal.distribution.draft_ids < 0

        def draw(residual, masses, at, *how):
            del masses
            refused = (at < residual.valid) & ~residual.point_mass[:, 0]  # the same for all drafts of a row
            logits = jnp.where(refused[:, None, None] & unknown[None, None], -jnp.inf, residual.p.logits)
            residual = residual._replace(p=residual.p._replace(logits=logits))
            return residual_sample(residual, verify.residual_masses(residual), at, *how)

        with mock.patch.object(verify, "residual_sample", draw):
            return rule(logits, warp, proposal, noise)

    return faulty


def projecting(rule):
    """A rule that compares with p on the head's vocabulary, renormalised."""

    def faulty(logits, warp, proposal, noise):
        unknown = proposal.distribution.draft_ids < 0
        drafted = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] < proposal.count[:, None]
        return rule(jnp.where(unknown[None, None] & drafted[:, :, None], -jnp.inf, logits), warp, proposal, noise)

    return faulty


def unmapped(rule):
    """A rule that takes the id of a token for the index of its logit in the head's vocabulary."""

    def faulty(logits, warp, proposal, noise):
        distribution = dataclasses.replace(proposal.distribution, draft_ids=None)
        return rule(logits, warp, dataclasses.replace(proposal, distribution=distribution), noise)

    return faulty


def unmapped_residual(rule):
    """A rule that does so in its residual alone."""
    residual_of = verify._residual

    def faulty(*args):
        with mock.patch.object(verify, "_residual", lambda *args: residual_of(*args)._replace(draft_ids=None)):
            return rule(*args)

    return faulty


class TestReducedVocabulary(HeadLosslessness):
    """The EAGLE-3 head knows half of the tokens, and they are not the likeliest."""

    runs = runs_of(
        [HeadProgram("rejection", "eagle3")], [HeadProgram(rule, "eagle3") for rule in ("match", "block")], 8_000
    )
    seed = 72

    def test_the_head_lacks_likely_tokens(self, played):
        for oracle, _ in played:
            if oracle.ask.warp.temperature:
                _, draft = oracle.drafts((*oracle.ask.prompt, 1))
                unknown = draft((*oracle.ask.prompt, 1)) == 0
                assert oracle.target((*oracle.ask.prompt, 1))[unknown].sum() > 0.4

    @pytest.mark.nightly
    @pytest.mark.parametrize("fault", [dropping, pytest.param(projecting, marks=pytest.mark.long)])
    def test_a_target_cut_to_the_heads_vocabulary_is_detected(self, fault):
        assert max(self.p_values(fault)) < LEVEL

    @pytest.mark.parametrize("fault", [unmapped, unmapped_residual])
    def test_a_token_mistaken_for_its_index_is_detected(self, fault):
        assert min(self.p_values(fault)) < LEVEL

    def p_values(self, fault) -> list[float]:
        """Of the asks that sample."""
        run = Run(HeadProgram("rejection", "eagle3", fault=fault), 8_000)
        sampled = [pair for pair in self.with_oracles(run.program, self.play(run)) if pair[0].ask.warp.temperature]
        return p_values(sampled, FIRST)


@dataclasses.dataclass(frozen=True)
class Forgetful(Block):
    """Draws drafts that depend on each other, and says that they do not: q is that of the slots alone."""

    def _in_sequence(self, drawing, slots, anchor, room):
        proposal = super()._in_sequence(drawing, slots, anchor, room)
        distribution, _ = drawing.draw(slots.logits, 0)
        return dataclasses.replace(proposal, distribution=distribution)


@dataclasses.dataclass(frozen=True)
class ForgetfulProgram(HeadProgram):
    def drafter(self, target, head):
        return Forgetful(**vars(super().drafter(target, head)))


@dataclasses.dataclass(frozen=True)
class Pretending(Block):
    """Proposes the likeliest tokens, and says that they were drawn from what the DFlash head says of them."""

    def _refined(self, drawing, inputs, logits, context, room):
        proposal = super()._refined(drawing, inputs, logits, context, room)
        distribution, _ = drawing.draw(logits, 0)
        none = jnp.zeros_like(proposal.point_mass)
        return dataclasses.replace(proposal, distribution=distribution, point_mass=none)


@dataclasses.dataclass(frozen=True)
class PretendingProgram(HeadProgram):
    def drafter(self, target, head):
        return Pretending(**vars(super().drafter(target, head)))


def test_likeliest_tokens_that_are_verified_as_if_they_were_drawn_are_detected():
    run = Run(PretendingProgram("rejection", "xpress"), 8_000)
    played = HeadLosslessness.with_oracles(run.program, play(run.program, None, run.samples, seed=75))
    assert min(p_values([pair for pair in played if pair[0].ask.warp.temperature], FIRST)) < LEVEL


class TestDraftsThatDependOnEachOther(HeadLosslessness):
    """A DSpark head whose drafts each know the one before."""

    runs = tuple(Run(HeadProgram(rule, "dspark-rnn"), 8_000) for rule in ("block",))
    seed = 73

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("rule", "head"),
        [
            ("rejection", "dspark-rnn"),
            ("rejection", "domino"),
            ("rejection", "lilicorr"),
            pytest.param("block", "dspark-rnn", marks=pytest.mark.long),
        ],
    )
    def test_a_distribution_that_ignores_the_previous_draft_is_detected(self, rule, head):
        run = Run(ForgetfulProgram(rule, head), 8_000)
        sampled = [pair for pair in self.with_oracles(run.program, self.play(run)) if pair[0].ask.warp.temperature]
        assert min(p_values(sampled, FIRST)) < LEVEL
