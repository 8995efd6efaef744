"""What every way of running has to show, in one class. A file of tests says what it runs, and inherits the tests.

What is particular to a way of running (its faults, put in on purpose, and what must have happened) stays in its file.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from jspec.engine.engine import Engine
from lossless import served, steps
from lossless.checks import assert_acceptance, assert_eventful, assert_texts, assert_texts_together
from lossless.oracle import Oracle
from lossless.steps import Ask, Program
from lossless.table_model import TABLES, V


@dataclasses.dataclass(frozen=True)
class Run:
    """A program that is played, by every test of a ``Losslessness`` class.

    Attributes:
      program: a ``Program``, or something that has its methods.
      samples: at least so many texts of every ask; those of all asks together where an engine serves them.
      tier: ``test``, ``nightly`` or ``long``: which ``make`` plays it.
      reproducible: how an engine serves it; nothing to those that play whole steps.
    """

    program: Any
    samples: int
    tier: str = "test"
    reproducible: bool = False

    def __str__(self):
        how = self.program
        words = [how.verify, how.method, how.draft_sampling]
        words += [how.architecture.removesuffix("ForCausalLM")] if hasattr(how, "architecture") else []
        words += ["lookup"] * getattr(how, "lookup", False)
        words += ["narrow"] * (getattr(how, "draft_vocab", V) < V) + ["reproducible"] * self.reproducible
        words += ["reduced"] * (getattr(how, "draft_tokens", None) is not None)
        return "-".join([*words, str(self.samples)])


def runs_of(test: Sequence[Any], nightly: Sequence[Any], samples: int) -> tuple[Run, ...]:
    """Programs that ``make test`` plays, and those that ``make nightly`` does, with so many texts."""
    return *(Run(program, samples) for program in test), *(Run(program, samples, "nightly") for program in nightly)


class Losslessness:
    """The joint distribution of texts over many rounds, and the acceptance of every round, as the oracle has them.

    A subclass declares what it runs; ``conftest.py`` has the fixture ``played``, by which tests of its own get at the same
    texts.

    Attributes:
      runs: what is played, in either tier.
      seed: of the texts.
      asks: the kinds of requests, mixed in every batch.
      tables: logits of target and draft.
      oracle: says what an ask of a program should lead to.
      recovered: the share of an ask's texts that has at least two rounds after a rejection.
    """

    runs: ClassVar[Sequence[Run]]
    seed: ClassVar[int]
    asks: ClassVar[Sequence[Ask]] = steps.ASKS
    tables: ClassVar[Any] = TABLES
    oracle: ClassVar[type[Oracle]] = Oracle
    recovered: ClassVar[float] = 0.005

    @classmethod
    def play(cls, run: Run) -> list[Any]:
        """A tally for each of the asks."""
        return steps.play(run.program, cls.tables, run.samples, cls.seed, cls.asks)

    @classmethod
    def with_oracles(cls, program, tallies) -> list[tuple[Oracle, Any]]:
        """The tallies of a program, each behind the oracle that knows what it should be."""
        return [(cls.oracle(program, ask, cls.tables), tally) for ask, tally in zip(cls.asks, tallies, strict=True)]

    def pytest_generate_tests(self, metafunc):
        if "run" in metafunc.fixturenames:
            params = [
                pytest.param(run, marks=() if run.tier == "test" else getattr(pytest.mark, run.tier))
                for run in self.runs
            ]
            metafunc.parametrize("run", params, ids=str, scope="class")

    def test_joint_distribution_of_completions(self, played):
        for oracle, tally in played:
            assert_texts(oracle, tally)
        assert_texts_together(played)

    def test_acceptance_of_every_round(self, played):
        """A round has as many drafts as it may, and accepts as many as it should."""
        for oracle, tally in played:
            assert_acceptance(oracle, tally)

    def test_every_event_of_a_round_occurs(self, played):
        for oracle, tally in played:
            if oracle.program.method == "none" or oracle.ask.max_drafts == 0:
                assert tally.rounds[:, 1:].sum() == 0, "drafts that nobody wanted"
            elif oracle.ask.warp.temperature:
                assert_eventful(oracle, tally, recovered=self.recovered * tally.texts.sum())


@functools.cache
def engine_of(program: Program, reproducible: bool = False) -> Engine:
    """An engine of the table models, compiled once for all tests of a file."""
    return served.engine(program, TABLES, reproducible)


class ServedLosslessness(Losslessness):
    """``Losslessness`` of texts as users get them, under all disturbances of ``served.play``.

    Attributes:
      preemptions: how many of them there are for every call, at least.
    """

    preemptions: ClassVar[float] = 1.0

    @classmethod
    def play(cls, run: Run) -> list[Any]:
        return served.play(engine_of(run.program, run.reproducible), run.samples, cls.seed, cls.asks)

    def test_requests_were_preempted_all_the_time(self, run, played):
        del played
        metrics = engine_of(run.program, run.reproducible).metrics()
        assert metrics.num_preemptions > self.preemptions * metrics.num_calls
