"""Selection of drafts under a budget: the likeliest, each row's first, with any ties and padding."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.engine.adaptive.controller import MEMORY
from jspec.engine.adaptive.draft_selection import BINS, AcceptanceStats, no_stats, select_drafts
from jspec.sampling.confidence import confidence_of
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.verify import Proposal

B, K = 5, 4
SELECT, WITH_ROUND = jax.jit(select_drafts), jax.jit(AcceptanceStats.with_round)
ACCEPTANCE = jax.jit(AcceptanceStats.acceptance)


def by_hand(acceptance, count, spare):
    """The same, one draft after another in the order of their worth."""
    survival = np.cumprod(acceptance, axis=1, dtype=np.float32)
    there = [(-survival[b, i], i, b) for b in range(len(count)) for i in range(count[b])]
    verified = np.zeros(len(count), int)
    for _, _, b in sorted(there)[: max(spare, 0)]:
        verified[b] += 1
    return verified


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spare", [0, 1, 7, 12, B * K, 100])
def test_the_likeliest_drafts_are_verified(seed, spare):
    rng = np.random.default_rng(seed)
    acceptance = rng.choice([0.01, 0.3, 0.5, 0.9, 0.99], (B, K)).astype(np.float32)  # with ties
    count = rng.integers(0, K + 1, B)
    verified = np.asarray(SELECT(acceptance, count, np.int32(spare)))
    np.testing.assert_array_equal(verified, by_hand(acceptance, count, spare))
    assert verified.sum() == min(spare, count.sum())


def test_selection_of_a_draft_depends_on_no_later_draft():
    """Whether draft i is verified is the same for every acceptance of the drafts behind it in its row."""
    rng, levels = np.random.default_rng(1), [0.01, 0.5, 0.99]
    acceptance, count = rng.random((3, 3)).astype(np.float32), np.array([3, 3, 3])
    for i, spare in itertools.product(range(3), range(1, 9)):
        selections = set()
        for later in itertools.product(levels, repeat=2 - i):
            changed = acceptance.copy()
            changed[1, i + 1 :] = later
            selections.add(int(SELECT(changed, count, np.int32(spare))[1]) > i)
        assert len(selections) == 1


def stats_after(rounds, confidence=0.5, rows=1):
    """The statistics of a row after rounds, each a pair of drafts verified and accepted."""
    stats = no_stats(rows, K)
    sure, live = np.full((rows, K), confidence, np.float32), np.ones(rows, bool)
    for count, accepted in rounds:
        stats = WITH_ROUND(stats, sure, np.full(rows, count), np.full(rows, accepted), live)
    return stats


def test_without_statistics_confidence_decides():
    sure = (jnp.arange(K, dtype=jnp.float32)[None] + 0.5) / BINS
    np.testing.assert_allclose(ACCEPTANCE(no_stats(1, K), sure), sure, rtol=1e-5)


def test_statistics_learn_a_place_of_rejected_drafts():
    stats = stats_after([(4, 2)] * 200)
    acceptance = ACCEPTANCE(stats, np.full((1, K), 0.5))[0]
    assert acceptance[0] > 0.9 < acceptance[1]
    assert acceptance[2] < 0.1
    assert abs(float(acceptance[3]) - float(acceptance[2])) < 0.05  # never verified: as the place before it
    np.testing.assert_allclose(stats.of_request[0, 0, :3], 1 / (1 - np.exp(-1 / MEMORY)), rtol=0.05)
    assert float(stats.of_request[0, 0, 3]) == 0


def test_confidence_is_calibrated_over_all_requests():
    stats, rng = no_stats(8, K), np.random.default_rng(2)
    for _ in range(200):
        sure = rng.choice([0.2, 0.9], (8, K)).astype(np.float32)
        stands = rng.random((8, K)) < np.where(sure > 0.5, 0.95, 0.3)  # confidences that are too low
        accepted = np.cumprod(stands, axis=1).sum(axis=1)
        stats = WITH_ROUND(stats, sure, np.full(8, K), accepted, np.ones(8, bool))
    acceptance = stats.acceptance(jnp.broadcast_to(jnp.array([0.2, 0.9, 0.2, 0.9]), (8, K))).mean(axis=0)
    assert acceptance[1] > 0.85
    assert acceptance[0] < 0.5


def test_idle_rows_do_not_change_statistics():
    stats = stats_after([(4, 2)] * 5)
    after = WITH_ROUND(stats, np.full((1, K), 0.5), np.array([0]), np.array([-1]), np.zeros(1, bool))
    jax.tree.map(np.testing.assert_array_equal, stats, after)


def test_nan_confidence_is_in_the_lowest_bin():
    stats = no_stats(1, K)
    odd = np.array([[np.nan, np.inf, -np.inf, 2.0]], np.float32)
    assert np.isfinite(ACCEPTANCE(stats, odd)).all()
    after = WITH_ROUND(stats, odd, np.array([4]), np.array([4]), np.ones(1, bool))
    assert np.isfinite(after.of_confidence).all()
    assert after.of_confidence[1].sum() == 4


def test_all_drafts_are_verified_within_the_budget():
    stats = no_stats(2, K)
    after = WITH_ROUND(stats, np.full((2, 2), 0.5), np.array([2, 1]), np.array([2, 0]), np.ones(2, bool))
    np.testing.assert_array_equal(after.of_request[:, 0], [[1, 1, 0, 0], [1, 0, 0, 0]])
    assert after.acceptance(jnp.full((2, 2), 0.5)).shape == (2, 2)


def test_confidence_of_a_drawn_draft_is_the_largest_probability():
    logits = jax.random.normal(jax.random.key(3), (2, K, 9))
    warp = Warp(jnp.array([0.7, 0.0]), jnp.array([3, 0]), jnp.array([0.9, 1.0]), jnp.zeros(2))
    distribution, _ = jax.jit(make_distribution)(logits, warp)
    proposal = Proposal(jnp.zeros((2, K), jnp.int32), jnp.full(2, K), distribution, jnp.zeros((2, K), bool))
    largest = jnp.exp(distribution.log_probs).max(axis=-1)
    np.testing.assert_allclose(jax.jit(confidence_of)(proposal), largest, rtol=1e-5)
    assert (confidence_of(dataclasses.replace(proposal, distribution=None)) == 0.5).all()
    said = jnp.full((2, K), 0.25)
    assert (confidence_of(dataclasses.replace(proposal, confidence=said)) == 0.25).all()
