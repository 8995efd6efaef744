"""Requests that change logits before the temperature does: each has its own distribution, in one batch with all others."""

import dataclasses

import jax
import pytest
from disturbances import attribute

from jspec.sampling.processors import Processing
from jspec.sampling.streams import RoundNoise
from lossless import served, steps
from lossless.distributions import Options, Warp
from lossless.judge import assert_acceptance, assert_eventful, assert_texts, assert_texts_together
from lossless.oracle import Oracle
from lossless.statistics import LEVEL, p_value
from lossless.steps import Ask, Program
from lossless.table_model import V, random_tables

QUICK, LONG = 20_000, 200_000  # texts of every ask
TABLES = random_tables(0)
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
    Program("match", draft_sampling="coupled"),
    Program("rejection", "ngram"),
    Program("match", "none"),
)


@pytest.fixture(
    scope="module",
    params=[
        *((program, QUICK) for program in PROGRAMS),
        *(pytest.param((program, LONG), marks=pytest.mark.long) for program in PROGRAMS),
    ],
    ids=lambda param: f"{param[0].verify}-{param[0].method}-{param[1]}",
)
def played(request):
    program, samples = request.param
    tallies = steps.play(program, TABLES, samples, seed=81, asks=ASKS)
    return [(Oracle(program, ask, TABLES), tally) for ask, tally in zip(ASKS, tallies, strict=True)]


def test_joint_distribution_of_completions(played):
    for oracle, tally in played:
        assert_texts(oracle, tally)
    assert_texts_together(played)


def test_acceptance_of_every_round(played):
    for oracle, tally in played:
        assert_acceptance(oracle, tally)


def test_something_was_drafted_accepted_rejected_and_recovered(played):
    for oracle, tally in played:
        if oracle.program.method == "draft_model" and oracle.ask.warp.temperature:
            assert_eventful(oracle, tally, recovered=150)


SERVED = Program("rejection", draft_positions=served.SLOTS, slots=served.SLOTS)


@pytest.mark.parametrize("samples", [8_000, pytest.param(LONG, marks=pytest.mark.long)])
def test_texts_as_users_get_them(samples):
    engine = served.engine(SERVED, TABLES, reproducible=False)
    tallies = served.play(engine, samples, seed=82, asks=ASKS)
    pairs = [(Oracle(SERVED, ask, TABLES), tally) for ask, tally in zip(ASKS, tallies, strict=True)]
    for oracle, tally in pairs:
        assert_texts(oracle, tally)
        assert_acceptance(oracle, tally)
    assert_texts_together(pairs)
    assert engine.metrics().num_preemptions > engine.metrics().num_calls


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SameNoise(RoundNoise):
    """The noise of a program that is not taken for another one."""


def texts_p_values(program: Program, samples: int) -> list[float]:
    """Of the last three tokens of the asks whose penalties or bad words depend on the completion."""
    tallies = steps.play(program, TABLES, samples, seed=83, asks=ASKS)
    first = (0, 1, 2)
    pairs = [(ASKS[i], tallies[i]) for i in (0, 2, 3)]
    return [
        p_value(tally.texts.sum(axis=first).ravel(), Oracle(program, ask, TABLES).texts.sum(axis=first).ravel())
        for ask, tally in pairs
    ]


@pytest.mark.parametrize("rule", ["rejection", pytest.param("match", marks=pytest.mark.long)])
def test_drafts_that_do_not_count_as_text_are_seen(rule):
    """The verify pass leaves the drafts before a token out of its penalties and bad words."""
    apply = Processing.apply

    def without_drafts(self, logits, drafts=None, first=0):
        del drafts
        return apply(self, logits, None, first)

    with attribute(Processing, "apply", without_drafts):
        # A program of its own, or JAX would take the trace of the sound one.
        assert max(texts_p_values(Program(rule, noise=SameNoise), 20_000)) < LEVEL
    assert min(texts_p_values(Program(rule), 20_000)) >= LEVEL


def test_texts_of_rows_that_want_nothing_do_not_depend_on_the_others():
    program, alone = Program("rejection"), [Ask(ask.prompt, ask.warp, share=ask.share) for ask in ASKS]
    alone[5] = ASKS[5]
    among, by_itself = (steps.play(program, TABLES, 4_000, seed=84, asks=asks)[5] for asks in (ASKS, alone))
    assert (among.texts == by_itself.texts).all()
    assert (among.rounds == by_itself.rounds).all()
