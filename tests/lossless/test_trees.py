"""Whole steps that draft trees: the joint distribution of completions, and that they are the texts of the target alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from disturbances import attribute

from jspec.config import Speculation, TreeShape
from jspec.drafting.methods import drafter_for
from jspec.drafting.plain import NoDrafts
from jspec.drafting.tree import EagleTree
from jspec.sampling.processors import Processing
from lossless.checks import assert_acceptance, p_values
from lossless.distributions import Options, Warp
from lossless.head_program import FOUR_BITS, HEADS, LLAMA, ROUNDED, TARGETS, HeadOracle, HeadProgram
from lossless.losslessness import Losslessness, Run, runs_of
from lossless.statistics import LEVEL
from lossless.steps import ASKS, NO_OPTIONS, Ask, K, S, decoded, play


@dataclasses.dataclass(frozen=True)
class TreeProgram(HeadProgram):
    """A program that drafts trees; None for the target alone."""

    verify: str = "match"
    head: str = "eagle"
    draft_sampling: str = "coupled"
    tree: TreeShape | None = None

    @property
    def method(self) -> str:
        return "none" if self.tree is None else "-".join(map(str, (self.head, *dataclasses.astuple(self.tree))))

    def drafter(self, target, head):
        if self.tree is None:
            return NoDrafts()
        return drafter_for(HEADS[self.head], TARGETS[self.architecture], Speculation(tree=self.tree))(target, head)


def of_shape(nodes: int, branch: int, head: str = "eagle", architecture: str = LLAMA) -> TreeProgram:
    return TreeProgram(head=head, architecture=architecture, tree=TreeShape(nodes, K, branch))


QUICK = (of_shape(6, 2),)
NIGHTLY = (
    of_shape(3, 1),
    of_shape(7, 3),
    of_shape(21, 4),  # every text that there is, where there is room
    of_shape(9, 4, "eagle3"),  # which knows two tokens of four
    of_shape(7, 3, "eagle-small"),
    of_shape(6, 2, architecture="GptOssForCausalLM"),
    of_shape(7, 4, architecture="Gemma3ForCausalLM"),
    of_shape(6, 2, architecture=FOUR_BITS),
    of_shape(6, 2, architecture=ROUNDED),
)


class TestTrees(Losslessness):
    runs = (*runs_of(QUICK, NIGHTLY, 5_000), *(Run(program, 200_000, "long") for program in (*QUICK, *NIGHTLY[:4])))
    seed, tables, oracle = 77, None, HeadOracle
    asks = tuple(dataclasses.replace(ask, max_drafts=99) for ask in ASKS)

    def test_acceptance_of_every_round(self, played):
        """A tree of one branch is a chain, whose acceptance is known. One of more branches accepts more."""
        for oracle, tally in played:
            if oracle.program.tree.branch == 1:
                assert_acceptance(oracle, tally)
                continue
            of_chain = accepted = 0.0
            for code in np.flatnonzero(tally.rounds.sum(axis=(1, 2))):
                history = oracle.ask.prompt + decoded(int(code))
                often = tally.rounds[code].sum(axis=0)  # by accepted drafts
                accepted += often @ np.arange(K + 1)
                of_chain += often.sum() * (oracle.rounds(history).sum(axis=0) @ np.arange(K + 1))
                room = min(K, S - 1 - len(history))
                assert often[room + 1 :].sum() == 0, f"more than {room} drafts were accepted after {history}"
            if oracle.ask.warp.temperature:
                assert accepted > 1.02 * of_chain

    def test_texts_are_those_of_the_target_alone(self, run, played):
        """Under the same keys, at every temperature."""
        if run.tier == "long":
            pytest.skip("the distribution is tested")
        alone = dataclasses.replace(run.program, tree=None)
        for (oracle, tally), plain in zip(played, play(alone, None, run.samples, self.seed, self.asks), strict=True):
            assert (tally.texts == plain.texts).all()
            assert plain.rounds[:, 1:].sum() == 0
            if oracle.ask.warp.temperature:
                assert tally.rounds.sum() < plain.rounds.sum()


PENALTIES = Options(repetition_penalty=1.6, frequency_penalty=0.5, presence_penalty=0.4)
WITH_OPTIONS = (
    Ask((1,), Warp(), options=PENALTIES),
    Ask((2, 0, 1), Warp(1.3, top_k=3), options=Options(repetition_penalty=0.7, logit_bias=((3, 1.5), (0, -0.5)))),
    Ask((3, 3), Warp(0.9), (2,), min_tokens=2, options=Options(bad_words=((2,), (1, 3), (0, 0, 1)))),
    Ask((0, 2), Warp(0.0), share=1, options=PENALTIES),
)
FREE = (*TestTrees.asks[:3], TestTrees.asks[0])  # the last ones in the places of others


class TestTreesBesideOptions(TestTrees):
    """Requests whose own tokens decide which may follow draft chains, among others with trees."""

    asks, seed = (*WITH_OPTIONS, *FREE), 78
    runs = (*runs_of(QUICK, NIGHTLY[1:5], 5_000), *(Run(program, 200_000, "long") for program in (*QUICK, NIGHTLY[1])))

    def test_acceptance_of_every_round(self, played):
        for oracle, tally in played[: len(WITH_OPTIONS)]:
            assert_acceptance(oracle, tally)
        super().test_acceptance_of_every_round(played[len(WITH_OPTIONS) :])

    def test_requests_without_options_do_not_depend_on_others(self, run, played):
        if run.tier == "long":
            pytest.skip("the distribution is tested")
        alone = tuple(dataclasses.replace(ask, options=NO_OPTIONS) for ask in self.asks)
        others = play(run.program, None, run.samples, self.seed, alone)
        for (_, tally), other in list(zip(played, others, strict=True))[len(WITH_OPTIONS) :]:
            assert (tally.texts == other.texts).all()
            assert (tally.rounds == other.rounds).all()


def propose_trees_alone(self, state, context):
    return propose(self, state, dataclasses.replace(context, chain=None))


def propose_chains_alone(self, state, context):
    return propose(self, state, dataclasses.replace(context, chain=jnp.ones_like(context.chain)))


def process_without_drafts(self, logits, offsets, chain, first=0):
    return apply_to_tree(self, logits, offsets, jnp.zeros_like(chain) - 1, first)


propose, apply_to_tree = EagleTree.propose, Processing.apply_to_tree
FAULTS = {
    "trees where penalties count along chains": (EagleTree, "propose", propose_trees_alone),
    "drafts that do not count as text": (Processing, "apply_to_tree", process_without_drafts),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_trees_of_requests_with_options_are_detected(fault):
    program = dataclasses.replace(QUICK[0], fault=lambda rule: rule)  # which is traced anew
    with attribute(*FAULTS[fault]):
        tallies = play(program, None, 10_000, 79, TestTreesBesideOptions.asks)
    played = TestTreesBesideOptions.with_oracles(program, tallies)
    assert min(p_values(played[:3])) < LEVEL


@pytest.mark.nightly
def test_chains_for_the_sake_of_others_are_detected():
    """Their texts are right, and come in more rounds."""
    chains, tallies = dataclasses.replace(QUICK[0], fault=lambda rule: rule), []
    for program, proposing in ((QUICK[0], propose), (chains, propose_chains_alone)):
        with attribute(EagleTree, "propose", proposing):
            tallies.append(play(program, None, 5_000, 78, TestTreesBesideOptions.asks)[-1])
    right, wrong = tallies
    assert (right.texts == wrong.texts).all()
    assert (right.rounds != wrong.rounds).any()
