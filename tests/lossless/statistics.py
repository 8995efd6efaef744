"""Exact p-values, and the one level at which every check of this suite decides.

ALPHA is for the whole suite: each check decides at ALPHA / CHECKS (Bonferroni), and a run that makes more checks than
CHECKS fails, so the bound stays honest. Seeds are fixed; nothing here is flaky.
"""

from pathlib import Path

import numpy as np
from scipy import optimize, stats

ALPHA = 1e-6
CHECKS = 2_000
LEVEL = ALPHA / CHECKS
LEAST_EXPECTED = 10.0  # of a cell of the chi-square test; smaller cells are pooled

made: Path | None = None  # a byte for every check of the run, whichever process makes it; conftest.py says where


def _count():
    """Count one more check, and fail if there are too many."""
    assert made is not None
    with made.open("ab") as file:
        file.write(b".")
        file.flush()
        assert file.tell() <= CHECKS, f"more than {CHECKS} checks: raise CHECKS, which lowers LEVEL"


def assert_follows(counts, probabilities, what: str):
    """Counts are draws from these distributions. Arguments as for ``p_value``."""
    _count()
    p = p_value(counts, probabilities)
    assert p >= LEVEL, f"{what}: p = {p:.3g} is below {LEVEL:.3g}"


def assert_rate(successes: int, trials: int, probability: float, what: str):
    """``successes`` of ``trials`` has exactly this probability, by the two-sided binomial test."""
    _count()
    assert trials > 0, f"{what}: nothing was tried"
    p = stats.binomtest(int(successes), int(trials), min(max(probability, 0.0), 1.0)).pvalue
    rate = successes / trials
    assert p >= LEVEL, f"{what}: {rate:.6f} of {trials}, predicted {probability:.6f}, p = {p:.3g} below {LEVEL:.3g}"


def assert_not_vacuous(drafted: int, accepted: int):
    """Something was drafted, something accepted and something rejected."""
    assert 0 < accepted < drafted, f"{drafted} drafted, {accepted} accepted"


def p_value(counts, probabilities) -> float:
    """Pearson's chi-square test of goodness of fit.

    Args:
      counts: ``[cells]``, or ``[groups, cells]`` of independent multinomials of their own sizes.
      probabilities: the distribution of each group, of the same shape.

    Returns:
      the p-value; 0 if a cell of probability 0 was hit. With nothing left to test after pooling it is 1.
    """
    counts, distributions = (
        np.atleast_2d(np.asarray(counts, np.float64)),
        np.atleast_2d(np.asarray(probabilities, np.float64)),
    )
    assert counts.shape == distributions.shape, (counts.shape, distributions.shape)
    np.testing.assert_allclose(distributions.sum(axis=1), 1.0, atol=1e-9)
    if counts[distributions <= 0].any():
        return 0.0
    statistic, freedom = 0.0, 0
    for observed, distribution in zip(counts, distributions, strict=True):
        observed, expected = _pool(observed, distribution * observed.sum())
        statistic += np.sum((observed - expected) ** 2 / expected)
        freedom += len(expected) - 1
    return float(stats.chi2.sf(statistic, freedom)) if freedom else 1.0


def _pool(observed, expected):
    """Join the cells of least expectation until every cell has at least ``LEAST_EXPECTED``; drop what cannot."""
    order = np.argsort(expected)
    observed, expected = observed[order], expected[order]
    possible = expected > 0
    observed, expected = observed[possible], expected[possible]
    pooled = int(np.sum(expected < LEAST_EXPECTED))
    while 0 < pooled < len(expected) and expected[:pooled].sum() < LEAST_EXPECTED:
        pooled += 1
    if pooled == 0:
        return observed, expected
    join = lambda x: np.concatenate([[x[:pooled].sum()], x[pooled:]])  # noqa: E731
    observed, expected = join(observed), join(expected)
    large = expected >= LEAST_EXPECTED
    return observed[large], expected[large]


def count_pairs(row, column, shape: tuple[int, int]) -> np.ndarray:
    """How often each (row, column) occurs: int arrays ``[n], [n] -> shape``."""
    return np.bincount(row * shape[1] + column, minlength=shape[0] * shape[1]).reshape(shape)


def smallest_tv(samples: int, cells: int, groups: int = 1, power: float = 0.9) -> float:
    """Total variation that a check at LEVEL sees with this power, if the bias is one relative error, up or down, in all
    cells: half of that error.

    Args:
      samples: of each group.
      cells: of each group.
      groups: distributions that are checked together, all of them biased alike.
      power: probability of seeing the bias.
    """
    freedom = groups * (cells - 1)
    threshold = stats.chi2.isf(LEVEL, freedom)
    excess = optimize.brentq(lambda nc: stats.ncx2.sf(threshold, freedom, nc) - power, 1.0, 1e4)
    return float(np.sqrt(excess / (groups * samples)) / 2)
