"""Texts of the engine have the target's joint distribution, under any disturbance.

All asks together, the checks of three tokens detect a bias of 5% in total variation with 20,000 texts, and of 1.7% with
200,000 (``statistics.smallest_tv``).
"""

from disturbances import attribute

from lossless import served
from lossless.checks import p_value_together
from lossless.losslessness import Run, ServedLosslessness, engine_of
from lossless.served import ASKS, SLOTS
from lossless.statistics import LEVEL
from lossless.steps import Program
from lossless.table_model import V

RUNS_FOR_LONG = True  # so that XLA optimises: conftest.py
QUICK, FEW, LONG = 5_000, 8_000, 200_000
REJECTION = Program("rejection", draft_positions=SLOTS, slots=SLOTS)
PROGRAMS = (
    REJECTION,
    Program("block", draft_positions=9, draft_vocab=V - 1, slots=SLOTS),
    Program("match", draft_sampling="coupled", draft_positions=SLOTS, slots=SLOTS),
    Program("rejection", "ngram", slots=SLOTS),
    Program("rejection", lookup=True, draft_positions=SLOTS, slots=SLOTS),
    Program("match", "none", slots=SLOTS),
)


class TestServed(ServedLosslessness):
    asks, seed = ASKS, 71
    runs = (
        Run(REJECTION, QUICK),
        Run(PROGRAMS[1], FEW, "nightly", reproducible=True),
        *(Run(program, LONG, "long", exact) for program in PROGRAMS for exact in (True, False)),
    )

    def test_every_event_of_an_engine_occurs(self, run, played):
        engine = engine_of(run.program, run.reproducible)
        assert engine.metrics().num_cached_tokens > sum(tally.texts.sum() for _, tally in played)
        assert all(program.compiled for program in engine.runner.batch.programs.decode.values())


def test_swapped_pages_in_another_order_are_detected():
    engine = engine_of(REJECTION)
    swap_in = engine.runner._swaps.swap_in

    def p_value() -> float:
        return p_value_together(TestServed.with_oracles(REJECTION, served.play(engine, 2_500, seed=72)))

    with attribute(engine.runner._swaps, "swap_in", lambda move: swap_in(move._replace(pages=move.pages[::-1]))):
        assert p_value() < LEVEL
    engine.scheduler.pages.forget_prefixes()
    assert p_value() >= LEVEL
