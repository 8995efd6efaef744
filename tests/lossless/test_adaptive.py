"""K chosen by past acceptance leaves texts and acceptance unchanged; K chosen by a round's own drafts does not, which the
suite detects.
"""

import dataclasses
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.engine.adaptive import controller
from lossless.adaptive import Adapted, play_adaptively
from lossless.checks import FIRST, p_values
from lossless.distributions import round_distribution
from lossless.losslessness import Losslessness, Run
from lossless.statistics import LEVEL, assert_follows, assert_not_vacuous
from lossless.steps import K, Program, decoded, play
from lossless.table_model import TABLES

SECONDS = {0: 1.0, 1: 1.62, 2: 2.05}  # so near to each other that every round changes which is best
QUICK = (Run(Program("rejection"), 20_000), Run(Program("block", draft_sampling="auto"), 60_000, "nightly"))
LONG = (
    Program("rejection"),
    Program("match", draft_sampling="coupled"),
    Program("block"),
    Program("block", draft_sampling="auto"),
    Program("rejection", "ngram"),
    Program("rejection", lookup=True),
)


class TestAdaptiveSteps(Losslessness):
    runs = (*QUICK, *(Run(program, 200_000, "long") for program in LONG))
    seed = 51

    @classmethod
    def play(cls, run: Run) -> list[Adapted]:
        with mock.patch.multiple(controller, GAIN=1.0, FIRST_PAUSE=1, LONGEST_PAUSE=1):  # six rounds are all there is
            return play_adaptively(run.program, cls.tables, run.samples, cls.seed, SECONDS)

    def test_acceptance_of_every_round(self, played):
        """Rounds of K drafts have the acceptance of their theory, for any K of earlier rounds."""
        for oracle, tally in played:
            coupled = oracle.program.draft_sampling == "coupled"
            counts, probabilities = [], []
            for code, chosen in np.argwhere(tally.rounds.sum(axis=(2, 3)) >= 100):
                history = oracle.ask.prompt + decoded(code)
                most, draft = oracle.drafts(history)
                count, distribution = min(most, chosen), np.zeros(K + 1)
                for tokens, mass in round_distribution(
                    oracle.program.verify if chosen else "match", coupled, oracle.target, draft, history, count
                ).items():
                    distribution[len(tokens) - 1] += mass
                assert tally.rounds[code, chosen].sum() == tally.rounds[code, chosen, count].sum()
                counts.append(tally.rounds[code, chosen, count])
                probabilities.append(distribution)
            assert_follows(counts, probabilities, f"accepted drafts of {oracle.ask}")

    def test_every_event_of_a_round_occurs(self, played):
        """And every K was chosen, and changed."""
        for oracle, tally in played:
            if oracle.ask.warp.temperature and oracle.program.method != "ngram":
                share = tally.rounds.sum(axis=(0, 2, 3)) / tally.rounds.sum()
                assert share.min() > 0.05, share
                assert tally.changes > 0.2 * tally.rounds.sum()
                assert_not_vacuous(
                    *(np.sum(tally.rounds.sum(axis=(0, 1)) * number) for number in np.indices((K + 1, K + 1)))
                )


@dataclasses.dataclass(frozen=True)
class Peeking:
    """A drafter that drops its drafts by what it drew: K depends on the round's own drafts."""

    drafter: object

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, state, context):
        state, proposal = self.drafter.propose(state, context)
        count = jnp.where(proposal.tokens[:, 0] == 0, 0, proposal.count)
        return state, dataclasses.replace(proposal, count=count)


class PeekingProgram(Program):
    def drafter(self, target, model, drafts=K):
        return Peeking(super().drafter(target, model, drafts))


@pytest.mark.nightly
@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.long)])
def test_K_that_depends_on_its_own_drafts_is_detected(rule, sound):
    program = (Program if sound else PeekingProgram)(rule)
    *sampled, greedy = p_values(TestAdaptiveSteps.with_oracles(program, play(program, TABLES, 20_000, seed=52)), FIRST)
    assert greedy == 1.0
    assert min(sampled) >= LEVEL if sound else max(sampled) < LEVEL
