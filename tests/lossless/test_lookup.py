"""Prompt lookup beside drafters: whole steps with draft heads of every kind, and a fault that looks innocent.

``test_engine.py``, ``test_served.py``, ``test_structured.py`` and ``test_adaptive.py`` have lookup beside a draft model.
"""

import dataclasses

import jax.numpy as jnp
import pytest

from jspec.drafting.lookup import WithLookup
from lossless.checks import p_values
from lossless.head_program import HeadOracle, HeadProgram
from lossless.losslessness import Losslessness, Run, runs_of
from lossless.statistics import LEVEL
from lossless.steps import Program, play
from lossless.table_model import TABLES

QUICK = (HeadProgram("rejection", "eagle", lookup=True), HeadProgram("block", "dspark", lookup=True))
LONG = (
    *QUICK,
    HeadProgram("match", "eagle3", "coupled", lookup=True),
    HeadProgram("rejection", "p-eagle", "auto", lookup=True),
    HeadProgram("block", "pard", lookup=True),
    HeadProgram("rejection", "mlp", draft_temperature=1.4, lookup=True),
    HeadProgram("rejection", "medusa", "argmax", lookup=True),
    HeadProgram("block", "mtp", "auto", lookup=True),
    HeadProgram("rejection", "dflash", lookup=True),
    HeadProgram("rejection", "dspark-rnn", lookup=True),
)


class TestHeads(Losslessness):
    tables, oracle = None, HeadOracle
    runs = (*runs_of(QUICK[:1], QUICK[1:], 8_000), *(Run(program, 200_000, "long") for program in LONG))
    seed = 81


@dataclasses.dataclass(frozen=True)
class Afterthought(WithLookup):
    """Looks up only where the drafter's own first draft, which has been drawn by then, is another token."""

    def propose(self, state, context):
        after, own = self.drafter.propose(state, context)
        _, looked_up = super().propose(state, context)
        agree = (own.tokens[:, 0] == looked_up.tokens[:, 0])[:, None]
        tokens = jnp.where(agree, own.tokens, looked_up.tokens)
        point_mass = jnp.where(agree, own.point_mass, looked_up.point_mass)
        return after, dataclasses.replace(own, tokens=tokens, point_mass=point_mass)


class AfterthoughtProgram(Program):
    def drafter(self, target, model, drafts=2):
        return Afterthought(**vars(super().drafter(target, model, drafts)))


@pytest.mark.nightly
@pytest.mark.parametrize("sound", [False, True])
@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.long)])
def test_lookup_that_depends_on_the_drafters_draft_is_detected(rule, sound):
    program = (Program if sound else AfterthoughtProgram)(rule, lookup=True)
    pairs = zip(Losslessness.asks, play(program, TABLES, 40_000, seed=82), strict=True)
    *sampled, greedy = p_values([(Losslessness.oracle(program, ask, TABLES), tally) for ask, tally in pairs])
    assert greedy == 1.0
    assert min(sampled) >= LEVEL if sound else max(sampled) < LEVEL
