"""Requests that change logits before the temperature does: each has its own distribution, in one batch with all others."""

import pytest
from disturbances import attribute

from jspec.sampling.processors import Processing
from lossless import served, steps
from lossless.checks import p_values
from lossless.distributions import Options, Warp
from lossless.losslessness import Losslessness, Run, ServedLosslessness, runs_of
from lossless.statistics import LEVEL
from lossless.steps import Ask, Program, SameNoise
from lossless.table_model import TABLES, V

QUICK, LONG = 8_000, 200_000  # texts of every ask
REDUCED = (3, 0, 2)  # a draft vocabulary, in this order
PENALTIES = Options(repetition_penalty=1.6, frequency_penalty=0.5, presence_penalty=0.4)
ASKS = (
    Ask((1,), Warp(), options=PENALTIES),
    Ask((2, 0, 1), Warp(1.3, top_k=3), options=Options(repetition_penalty=0.7, logit_bias=((3, 1.5), (0, -0.5)))),
    Ask(
        (3, 1), Warp(0.6, top_p=0.9), (2,), min_tokens=2, options=Options(frequency_penalty=-0.8, presence_penalty=0.3)
    ),
    Ask((3, 3), Warp(0.9), options=Options(bad_words=((2,), (1, 3), (0, 0, 1)))),
    Ask((0, 2), Warp(0.8), options=Options(allowed_token_ids=(0, 1, 3), repetition_penalty=1.3)),
    Ask((3, 1), Warp(0.6, top_p=0.9, min_p=0.05), (2,), min_tokens=2),
    Ask((0, 2), Warp(0.0), share=1, options=PENALTIES),
)
PROGRAMS = (
    Program("rejection"),
    Program("block", draft_positions=6, draft_vocab=V - 1),
    Program("match", draft_sampling="coupled", draft_tokens=REDUCED),
    Program("rejection", draft_tokens=REDUCED),
    Program("match", draft_sampling="coupled"),
    Program("rejection", "ngram"),
    Program("match", "none"),
)
SERVED = Program("rejection", draft_positions=served.SLOTS, slots=served.SLOTS)


class TestSteps(Losslessness):
    asks, seed = ASKS, 81
    runs = (
        *runs_of(PROGRAMS[:1] + PROGRAMS[2:3], PROGRAMS[1:2] + PROGRAMS[3:], QUICK),
        *(Run(program, LONG, "long") for program in PROGRAMS),
    )


class TestServed(ServedLosslessness):
    asks, seed = ASKS, 82
    runs = (Run(SERVED, 8_000, reproducible=True), Run(SERVED, LONG, "long"))


def fault_p_values(program: Program) -> list[float]:
    """Of the asks whose penalties or bad words depend on the completion."""
    played = TestSteps.with_oracles(program, steps.play(program, TABLES, 20_000, seed=83, asks=ASKS))
    return p_values([played[i] for i in (0, 2, 3)])


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["rejection", pytest.param("match", marks=pytest.mark.long)])
def test_drafts_that_do_not_count_as_text_are_detected(rule):
    """The verify pass leaves the drafts before a token out of its penalties and bad words."""
    apply = Processing.apply

    def without_drafts(self, logits, drafts=None, first=0, vocabulary=None):
        del drafts
        return apply(self, logits, None, first, vocabulary)

    with attribute(Processing, "apply", without_drafts):
        assert max(fault_p_values(Program(rule, noise=SameNoise))) < LEVEL
    assert min(fault_p_values(Program(rule))) >= LEVEL


@pytest.mark.parametrize(
    "program", [Program("rejection"), Program("rejection", draft_tokens=REDUCED)], ids=["", "reduced"]
)
def test_rows_without_options_do_not_depend_on_others(program):
    alone = [Ask(ask.prompt, ask.warp, share=ask.share) for ask in ASKS]
    alone[5] = ASKS[5]
    among, by_itself = (steps.play(program, TABLES, 4_000, seed=84, asks=asks)[5] for asks in (ASKS, alone))
    assert (among.texts == by_itself.texts).all()
    assert (among.rounds == by_itself.rounds).all()
