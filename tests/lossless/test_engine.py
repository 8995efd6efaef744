"""Whole steps: the joint law of completions over many rounds, and the acceptance of every round."""

import numpy as np
import pytest

from lossless.oracle import Oracle
from lossless.statistics import assert_follows, assert_not_vacuous
from lossless.steps import ASKS, K, N, Program, Tally, V, decoded, play
from lossless.table_model import random_tables

SAMPLES = 200_000
VIEWS = ((0, 1, 2), (3, 4, 5), (1, 3, 5), tuple(range(N)))  # tokens whose joint law is compared
PROGRAMS = (
    Program("match"),
    Program("match", draft_sampling="coupled"),
    Program("match", draft_sampling="coupled", draft_vocab=V - 1),
    Program("rejection"),
    Program("rejection", draft_sampling="argmax", draft_positions=6),
    Program("rejection", draft_sampling="auto"),  # argmax for the third ask, sampled for the others
    Program("block", draft_positions=6, draft_vocab=V - 1),
    Program("block", draft_sampling="auto", draft_temperature=1.4),
    Program("match", "ngram"),
    Program("rejection", "ngram"),
    Program("block", "ngram"),
    Program("match", "none"),
    Program("rejection", "none"),
    Program("block", "none"),
)
TABLES = random_tables(0)


def describe(program: Program) -> str:
    name = f"{program.verify}-{program.method}"
    if program.method != "draft_model":
        return name
    return f"{name}-{program.draft_sampling}-{'narrow' if program.draft_vocab < V else 'wide'}"


@pytest.fixture(scope="module", params=PROGRAMS, ids=describe)
def played(request) -> list[tuple[Oracle, Tally]]:
    tallies = play(request.param, TABLES, SAMPLES, seed=21)
    return [(Oracle(request.param, ask, TABLES), tally) for ask, tally in zip(ASKS, tallies, strict=True)]


def test_joint_law_of_completions(played):
    for oracle, tally in played:
        for view in VIEWS:
            others = tuple(i for i in range(N) if i not in view)
            counts, probabilities = tally.texts.sum(axis=others), oracle.texts.sum(axis=others)
            assert_follows(counts.ravel(), probabilities.ravel(), f"tokens {view} of {oracle.ask}")


def test_acceptance_of_every_round(played):
    """Given the text when it began, a round accepts j drafts with exactly the predicted probability."""
    for oracle, tally in played:
        counts, probabilities = [], []
        for code in np.flatnonzero(tally.rounds.sum(axis=(1, 2)) >= 100):
            history = oracle.ask.prompt + decoded(code)
            count, _ = oracle.drafts(history)
            assert tally.rounds[code].sum() == tally.rounds[code, count].sum(), f"not {count} drafts after {history}"
            counts.append(tally.rounds[code, count])
            probabilities.append(oracle.accepted(history))
        assert_follows(counts, probabilities, f"accepted drafts of {oracle.ask}")


def test_something_was_drafted_accepted_rejected_and_recovered(played):
    for oracle, tally in played:
        drafted, accepted = (np.sum(tally.rounds.sum(axis=0) * number) for number in np.indices((K + 1, K + 1)))
        if oracle.program.method == "none":
            assert drafted == 0
        elif oracle.ask.warp.temperature:
            assert_not_vacuous(drafted, accepted)
            assert tally.recovered > 1000, "texts with two rounds after a rejection"


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_drafts_that_break_off_leave_the_texts_law(rule):
    """A draft row that is no law ends the row's drafts, and whether it is one depends on the drafts before."""
    draft = TABLES[1].copy()
    draft[::3, 0] = np.nan
    program = Program(rule)
    for ask, tally in zip(ASKS, play(program, (TABLES[0], draft), SAMPLES, seed=22), strict=True):
        texts = Oracle(program, ask, TABLES).texts
        for first in (0, 3):
            others = tuple(i for i in range(N) if not first <= i < first + 3)
            assert_follows(
                tally.texts.sum(others).ravel(), texts.sum(others).ravel(), f"3 tokens from {first} of {ask}"
            )
        if ask.warp.temperature:
            assert (tally.rounds.sum(axis=(0, 2)) > 0).all(), "rounds of 0, 1 and 2 drafts"
