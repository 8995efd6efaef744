"""Whole steps that draft trees: the joint distribution of completions, and that they are the texts of the target alone."""

import dataclasses

import numpy as np
import pytest

from jspec.config import Speculation, TreeShape
from jspec.drafting.methods import drafter_for
from jspec.drafting.plain import NoDrafts
from lossless.checks import assert_acceptance
from lossless.head_program import FOUR_BITS, HEADS, LLAMA, ROUNDED, TARGETS, HeadOracle, HeadProgram
from lossless.losslessness import Losslessness, Run, runs_of
from lossless.steps import ASKS, K, S, decoded, play


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
