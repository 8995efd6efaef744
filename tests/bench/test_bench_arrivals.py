"""Times at which requests are sent, against their distributions."""

import math

import numpy as np
import pytest
from scipy import stats

from jspec.bench.arrivals import send_times


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 8.0])
def test_gaps_have_a_gamma_distribution(burstiness):
    count, rate = 4000, 20.0
    gaps = np.diff(send_times(count, rate, burstiness, seed=3), prepend=0.0)
    distribution = stats.gamma(burstiness, scale=1 / (rate * burstiness))
    assert stats.kstest(gaps, distribution.cdf).pvalue > 0.001
    assert stats.kstest(gaps, stats.gamma(2 * burstiness, scale=1 / (2 * rate * burstiness)).cdf).pvalue < 1e-6


def test_burstiness_of_one_is_a_poisson_process():
    times = np.array(send_times(6000, 30.0, seed=1))
    counts = np.bincount(times.astype(int), minlength=200)[:200]
    assert counts.mean() == pytest.approx(30, rel=0.01)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.35)


def test_times_have_the_rate_and_follow_the_seed():
    times = send_times(50, 4.0, 0.5, seed=7)
    assert times[-1] == pytest.approx(12.5)
    assert times == sorted(times)
    assert times == send_times(50, 4.0, 0.5, seed=7)
    assert times != send_times(50, 4.0, 0.5, seed=8)


def test_infinite_rate_sends_all_at_once():
    assert send_times(3, math.inf) == [0.0, 0.0, 0.0]
    assert send_times(0, 1.0) == []


@pytest.mark.parametrize(("rate", "burstiness", "name"), [(0, 1, "request_rate"), (-1, 1, "request_rate")])
def test_bad_rate_is_refused(rate, burstiness, name):
    with pytest.raises(ValueError, match=f"{name}="):
        send_times(1, rate, burstiness)


@pytest.mark.parametrize("burstiness", [0, -1, math.inf, math.nan])
def test_bad_burstiness_is_refused(burstiness):
    with pytest.raises(ValueError, match="burstiness="):
        send_times(1, 1.0, burstiness)
