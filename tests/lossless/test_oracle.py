"""Tests of the test code: the oracle against literal definitions, the statistics against their promised power."""

import itertools

import numpy as np
import pytest
from scipy import integrate

from lossless.distributions import Warp, agreement, completion_distribution, distribution, round_distribution
from lossless.oracle import prompt_lookup
from lossless.statistics import LEVEL, p_value, smallest_tv

V = 3


def random_model(seed: int):
    return lambda history: np.random.default_rng([seed, *history]).dirichlet(np.ones(V))


def test_oracle_distribution_is_cut_in_order_and_keeps_ties():
    p = np.array([0.4, 0.25, 0.25, 0.07, 0.03])
    logits = np.log(p)
    kept = lambda warp: np.flatnonzero(distribution(logits, warp)).tolist()  # noqa: E731
    assert kept(Warp()) == [0, 1, 2, 3, 4]
    assert kept(Warp(top_k=2)) == [0, 1, 2]  # a tie
    assert kept(Warp(top_p=0.6)) == [0, 1, 2]  # a tie
    assert kept(Warp(min_p=0.1)) == [0, 1, 2, 3]
    assert kept(Warp(top_p=0.92)) == [0, 1, 2, 3]
    assert kept(Warp(top_p=0.92, min_p=0.1)) == [0, 1, 2]  # 0.9 of 0.97 is enough
    assert kept(Warp(temperature=0.0)) == [0]
    np.testing.assert_allclose(distribution(logits, Warp(0.5, top_k=1)), [1, 0, 0, 0, 0])
    np.testing.assert_allclose(distribution(logits, Warp(0.5)), p**2 / np.sum(p**2))


@pytest.mark.parametrize(
    ("rule", "coupled"), [("match", False), ("match", True), ("rejection", False), ("block", False)]
)
def test_a_round_that_goes_on_with_plain_sampling_has_the_targets_distribution(rule, coupled):
    target, draft, K = random_model(1), random_model(2), 3
    joint = np.zeros((V,) * (K + 1))
    for tokens, mass in round_distribution(rule, coupled, target, draft, (), K).items():
        rest = completion_distribution(target, tokens, K + 1 - len(tokens))[(slice(V),) * (K + 1 - len(tokens))]
        joint[tokens] += mass * rest
    np.testing.assert_allclose(joint, completion_distribution(target, (), K + 1)[(slice(V),) * (K + 1)], atol=1e-12)


def test_block_distribution_equals_the_enumeration_of_its_uniforms():
    """Sun et al. (2024) literally: a uniform per prefix, the longest prefix that passes, the scaled residual."""
    target, draft, K = random_model(1), random_model(2), 3
    emitted: dict = {}
    for path in itertools.product(range(V), repeat=K):
        p, q = ([model(path[:i]) for i in range(K + 1)] for model in (target, draft))
        w = [1.0]
        for i in range(K):
            w.append(min(w[i] * p[i][path[i]] / q[i][path[i]], 1.0))
        residual = [np.maximum(w[i] * p[i] - q[i], 0) for i in range(K)]
        mass = [r.sum() for r in residual]
        passes = [1.0, *(mass[i] / (mass[i] + 1 - w[i]) for i in range(1, K)), w[K]]
        drafted = np.prod([q[i][path[i]] for i in range(K)])
        for i in range(K + 1):
            probability = drafted * passes[i] * np.prod([1 - h for h in passes[i + 1 :]])
            after = p[K] if i == K else residual[i] / mass[i] if mass[i] else np.zeros(V)
            for v in range(V):
                emitted[(*path[:i], v)] = emitted.get((*path[:i], v), 0.0) + probability * after[v]
    predicted = round_distribution("block", False, target, draft, (), K)
    for tokens, mass in emitted.items():
        assert predicted.get(tokens, 0.0) == pytest.approx(mass, abs=1e-12)


def test_agreement_of_coupled_noise_by_integration():
    """Token v wins both races iff its exponential arrival is before max(p_j / p_v, q_j / q_v) t for no other j."""
    p, q = random_model(1)(()), random_model(2)(())
    for v in range(V):
        rate = sum(max(p[j] / p[v], q[j] / q[v]) for j in range(V) if j != v)
        both, _ = integrate.quad(lambda t, rate=rate: np.exp(-t) * np.exp(-rate * t), 0, np.inf)
        assert agreement("match", True, p, q)[v] == pytest.approx(both, abs=1e-9)


def test_oracle_prompt_lookup():
    assert prompt_lookup((1, 2, 3), 2) == ()
    assert prompt_lookup((1, 2, 3, 1, 2), 2) == (3, 1)
    assert prompt_lookup((1, 2, 0, 2, 3, 2), 2) == (3, 2)  # the most recent
    assert prompt_lookup((1, 2, 0, 3, 2, 1, 2), 2) == (0, 3)  # the longest
    assert prompt_lookup((0, 1, 1), 2) == (1, 1)  # goes on into its own drafts


def test_p_values_are_uniform_if_true_and_small_if_not():
    rng = np.random.default_rng(0)
    probabilities = np.array([0.5, 0.3, 0.2 - 1e-5, 1e-5, 0.0])
    fair = [p_value(rng.multinomial(10_000, probabilities), probabilities) for _ in range(400)]
    assert np.histogram(fair, bins=4, range=(0, 1))[0].min() > 70
    assert p_value([5000, 3000, 2000, 0, 1], probabilities) == 0.0
    assert p_value([5600, 2400, 2000, 0, 0], probabilities) < LEVEL
    pair = np.stack([probabilities, probabilities[::-1]])
    assert p_value([[5000, 3000, 2000, 0, 0], [0, 0, 2000, 3000, 5000]], pair) > 0.9
    assert p_value([[5000, 3000, 2000, 0, 0], [0, 0, 2000, 2400, 5600]], pair) < LEVEL


@pytest.mark.parametrize(
    ("samples", "cells", "groups", "seen"),
    [
        (100_000, 64, 1, 0.0181),  # one case of a rule
        (100_000, 64, 18, 0.0075),  # all cases of a rule
        (100_000, 125, 1, 0.0203),  # three tokens of one ask of a whole step
        (100_000, 125, 3, 0.0146),  # of all asks
        (3_500_000, 64, 1, 0.00306),  # one case of a rule in the long tier
    ],
)
def test_power_of_the_statistics(samples, cells, groups, seen):
    """The sizes that the suite runs at see these total variations, nine times in ten, at its level."""
    assert 0.97 * seen < smallest_tv(samples, cells, groups) < seen
    rng = np.random.default_rng(1)
    fair = np.full((groups, cells), 1 / cells)
    signs = np.resize([1, -1], cells)
    biased = fair * (1 + 2 * seen * (signs - signs.mean()))
    detected = [p_value(rng.multinomial(samples, biased), fair) < LEVEL for _ in range(100)]
    assert np.sum(detected) > 75
