"""Whole steps: the joint distribution of completions over many rounds, and the acceptance of every round."""

import numpy as np
import pytest

from lossless.checks import VIEWS, assert_texts
from lossless.losslessness import Losslessness, Run, runs_of
from lossless.oracle import Oracle
from lossless.steps import ASKS, Program, play
from lossless.table_model import TABLES, V

QUICK, LONG = 20_000, 200_000  # texts of every ask
PROGRAMS = (
    Program("match", draft_sampling="coupled"),
    Program("rejection", draft_sampling="auto"),  # argmax for the third ask, sampled for the others
    Program("block", draft_positions=6, draft_vocab=V - 1),
    Program("match", "none"),
)
NIGHTLY = (
    Program("rejection", draft_tokens=(3, 0, 2)),
    Program("block", "ngram"),
    Program("rejection", lookup=True),
    Program("match"),
    Program("rejection"),
    Program("rejection", draft_sampling="argmax", draft_positions=6),
    Program("block", draft_sampling="auto", draft_temperature=1.4),
    *(Program(rule, draft_tokens=(3, 0, 2)) for rule in ("match", "block")),
    Program("rejection", "ngram"),
    Program("rejection", "ngram_corpus"),
    Program("block", lookup=True, draft_positions=6, draft_vocab=V - 1),
    Program("match", draft_sampling="coupled", lookup=True),
)
LONG_ONLY = (
    Program("match", draft_sampling="argmax", lookup=True),
    Program("rejection", draft_sampling="auto", draft_temperature=1.4, lookup=True),
    Program("block", lookup=True),
    Program("match", draft_sampling="coupled", draft_vocab=V - 1),
    Program("match", draft_sampling="coupled", draft_tokens=(3, 0, 2)),
    Program("block", lookup=True, draft_positions=6, draft_tokens=(3, 0, 2)),
    Program("match", "ngram"),
    Program("rejection", "none"),
    Program("block", "none"),
)


class TestSteps(Losslessness):
    runs = (
        *runs_of(PROGRAMS, NIGHTLY, QUICK),
        *(Run(program, LONG, "long") for program in (*PROGRAMS, *NIGHTLY, *LONG_ONLY)),
    )
    seed = 21
    recovered = 0.01


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_drafts_that_break_off_do_not_change_the_distribution(rule):
    """A draft row that is no distribution ends the row's drafts, and whether it is one depends on the drafts before."""
    draft = TABLES[1].copy()
    draft[::3, 0] = np.nan
    program = Program(rule)
    for ask, tally in zip(ASKS, play(program, (TABLES[0], draft), 12_000, seed=22), strict=True):
        assert_texts(Oracle(program, ask, TABLES), tally, VIEWS[:2])
        if ask.warp.temperature:
            assert (tally.rounds.sum(axis=(0, 2)) > 0).all(), "rounds of 0, 1 and 2 drafts"
