"""Whole steps: the joint distribution of completions over many rounds, and the acceptance of every round."""

import numpy as np
import pytest

from lossless.judge import VIEWS, assert_acceptance, assert_eventful, assert_texts, assert_texts_together
from lossless.oracle import Oracle
from lossless.steps import ASKS, Program, Tally, V, play
from lossless.table_model import random_tables

QUICK, LONG = 100_000, 200_000  # texts of every ask
PROGRAMS = (
    Program("match"),
    Program("match", draft_sampling="coupled"),
    Program("rejection"),
    Program("rejection", draft_sampling="argmax", draft_positions=6),
    Program("rejection", draft_sampling="auto"),  # argmax for the third ask, sampled for the others
    Program("block", draft_positions=6, draft_vocab=V - 1),
    Program("block", draft_sampling="auto", draft_temperature=1.4),
    Program("rejection", "ngram"),
    Program("block", "ngram"),
    Program("rejection", "ngram_corpus"),
    Program("match", "none"),
)
OTHERS = (
    Program("match", draft_sampling="coupled", draft_vocab=V - 1),
    Program("match", "ngram"),
    Program("rejection", "none"),
    Program("block", "none"),
)
TABLES = random_tables(0)


def describe(program: Program) -> str:
    name = f"{program.verify}-{program.method}"
    if program.method != "draft_model":
        return name
    return f"{name}-{program.draft_sampling}-{'narrow' if program.draft_vocab < V else 'wide'}"


@pytest.fixture(
    scope="module",
    params=[
        *((program, QUICK) for program in PROGRAMS),
        *(pytest.param((program, LONG), marks=pytest.mark.long) for program in (*PROGRAMS, *OTHERS)),
    ],
    ids=lambda param: f"{describe(param[0])}-{param[1]}",
)
def played(request) -> list[tuple[Oracle, Tally]]:
    program, samples = request.param
    tallies = play(program, TABLES, samples, seed=21)
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
        if oracle.program.method == "none":
            assert tally.rounds[:, 1:].sum() == 0
        elif oracle.ask.warp.temperature:
            assert_eventful(oracle, tally, recovered=1000)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_drafts_that_break_off_leave_the_texts_distribution(rule):
    """A draft row that is no distribution ends the row's drafts, and whether it is one depends on the drafts before."""
    draft = TABLES[1].copy()
    draft[::3, 0] = np.nan
    program = Program(rule)
    for ask, tally in zip(ASKS, play(program, (TABLES[0], draft), 60_000, seed=22), strict=True):
        assert_texts(Oracle(program, ask, TABLES), tally, VIEWS[:2])
        if ask.warp.temperature:
            assert (tally.rounds.sum(axis=(0, 2)) > 0).all(), "rounds of 0, 1 and 2 drafts"
