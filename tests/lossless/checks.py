"""Checks that compare what a program did with what it should do."""

from collections.abc import Sequence

import numpy as np

from lossless.oracle import Oracle
from lossless.statistics import assert_follows, assert_not_vacuous, p_value
from lossless.steps import K, N, Tally, decoded

FIRST, LAST = (0, 1, 2), (3, 4, 5)
VIEWS = (FIRST, LAST, (1, 3, 5), tuple(range(N)))  # tokens whose joint distribution is compared


def marginal(texts: np.ndarray, view: Sequence[int]) -> np.ndarray:
    """Counts or probabilities of some tokens of the texts: ``[V + 1] * N`` -> ``[(V + 1) ** len(view)]``."""
    return texts.sum(axis=tuple(i for i in range(N) if i not in view)).ravel()


def assert_texts(oracle: Oracle, tally: Tally, views=VIEWS):
    """The joint distribution of completions, by marginals over some of their tokens."""
    for view in views:
        assert_follows(marginal(tally.texts, view), marginal(oracle.texts, view), f"tokens {view} of {oracle.ask}")


def assert_texts_together(played: Sequence[tuple[Oracle, Tally]], views=VIEWS):
    """``assert_texts`` of all kinds of requests in one check, which sees a smaller bias if they share it."""
    for view in views:
        counts = [marginal(tally.texts, view) for _, tally in played]
        assert_follows(counts, [marginal(oracle.texts, view) for oracle, _ in played], f"tokens {view} of all asks")


def p_values(played: Sequence[tuple[Oracle, Tally]], view=LAST) -> list[float]:
    """Of some tokens of the texts of each ask: what a test asks that puts in a fault."""
    return [p_value(marginal(tally.texts, view), marginal(oracle.texts, view)) for oracle, tally in played]


def p_value_together(played: Sequence[tuple[Oracle, Tally]], view=LAST) -> float:
    """Of some tokens of the texts of all asks, in one test."""
    return p_value(
        [marginal(tally.texts, view) for _, tally in played], [marginal(oracle.texts, view) for oracle, _ in played]
    )


def assert_acceptance(oracle: Oracle, tally: Tally):
    """Given the text when it began, a round has i drafts and accepts j of them with exactly the predicted probability."""
    counts, probabilities = [], []
    often = np.flatnonzero(tally.rounds.sum(axis=(1, 2)) >= 100)
    assert len(often), f"no round of {oracle.ask} came 100 times: play more texts"
    for code in often:
        history = oracle.ask.prompt + decoded(code)
        expected = oracle.rounds(history)
        drafted = np.flatnonzero(expected.sum(axis=1))
        assert tally.rounds[code].sum() == tally.rounds[code, drafted].sum(), f"not {drafted} drafts after {history}"
        counts.append(tally.rounds[code].ravel())
        probabilities.append(expected.ravel())
    assert_follows(counts, probabilities, f"accepted drafts of {oracle.ask}")


def assert_eventful(oracle: Oracle, tally: Tally, recovered: float):
    """Drafts were accepted, drafts were rejected, and so many texts had at least two rounds after a rejection."""
    drafted, accepted = (np.sum(tally.rounds.sum(axis=0) * number) for number in np.indices((K + 1, K + 1)))
    assert_not_vacuous(drafted, accepted)
    assert tally.recovered > recovered, f"{tally.recovered} texts with two rounds after a rejection"
