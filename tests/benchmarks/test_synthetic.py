"""Synthetic acceptance: the given rates, under every rule and limit, and its refusal for serving."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import CONFIG, drafting, target
from lossless.statistics import p_value
from tiny import tiny_checkpoint

import jspec
from benchmarks.rounds.synthetic import rule_of
from jspec.config import VERIFY_RULES, Speculation
from jspec.llm import LLM
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import RULES, Proposal

B, K, V = 4096, 3, 7
RATES = (0.8, 0.3, 0.6)


def warp_of(temperature) -> Warp:
    return Warp(temperature, jnp.zeros(B, jnp.int32), jnp.ones(B), jnp.zeros(B))


@functools.cache
def batch(temperature: float = 1.0):
    return jax.jit(_batch)(temperature)


def _batch(temperature):
    """Logits of a target and what an unrelated draft proposes to it, all K drafts valid in every row."""
    keys = jax.random.split(jax.random.key(0), 3)
    logits = 2 * jax.random.normal(keys[0], (B, K + 1, V))
    noise = RoundNoise(jax.random.key_data(jax.random.split(keys[1], B)), jnp.full(B, 9, jnp.int32))
    index = jnp.broadcast_to(jnp.arange(K, dtype=jnp.int32), (B, K))
    warp = warp_of(jnp.full(B, temperature))
    distribution, tokens = make_distribution(2 * jax.random.normal(keys[2], (B, K, V)), warp, noise.draft_keys(index))
    return (
        logits,
        warp,
        Proposal(tokens, jnp.full(B, K, jnp.int32), distribution, jnp.broadcast_to(warp.greedy[:, None], (B, K))),
        noise,
    )


def apply_rule(verify: str, rates, logits, warp, proposal, noise):
    return jax.jit(rule_of(Speculation(K, verify, synthetic_acceptance=rates)))(logits, warp, proposal, noise)


def distribution_of_accepted(rates) -> np.ndarray:
    """Probability of 0 .. K accepted drafts."""
    reached = np.cumprod([1.0, *rates])
    return reached - np.append(reached[1:], 0.0)


@pytest.mark.parametrize("verify", VERIFY_RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rates", [RATES, 0.7], ids=str)
def test_acceptance_has_the_given_rates(verify, temperature, rates):
    result = apply_rule(verify, rates, *batch(temperature))
    accepted = np.bincount(result.accepted, minlength=K + 1)
    expected = distribution_of_accepted(rates if isinstance(rates, tuple) else (rates,) * K)
    assert p_value(accepted, expected) > 1e-6, (accepted / B, expected)
    own = np.bincount(jax.jit(RULES[verify])(*batch(temperature)).accepted, minlength=K + 1)
    assert p_value(own, expected) < 1e-6  # the rule itself would have decided otherwise
    assert np.all((result.token >= 0) & (result.token < V))
    assert np.all(result.ok)


@pytest.mark.parametrize("verify", VERIFY_RULES)
def test_places_past_a_short_tuple_accept_nothing(verify):
    assert np.all(apply_rule(verify, (1.0,), *batch()).accepted == 1)
    assert np.all(apply_rule(verify, 0.0, *batch()).accepted == 0)


@pytest.mark.parametrize("verify", VERIFY_RULES)
def test_never_past_the_valid_drafts_or_a_row_that_is_no_distribution(verify):
    logits, warp, proposal, noise = batch()
    row, count, broken = np.arange(B), np.arange(B) % (K + 1), np.arange(B) // 4 % (K + 1)
    logits = logits.at[row, broken].set(jnp.nan)
    result = apply_rule(
        verify, 1.0, logits, warp, dataclasses.replace(proposal, count=jnp.asarray(count, jnp.int32)), noise
    )
    np.testing.assert_array_equal(result.accepted, np.minimum(count, broken))
    np.testing.assert_array_equal(result.ok, count < broken)


@pytest.mark.parametrize("verify", VERIFY_RULES)
def test_each_kind_has_its_own_rates(verify):
    """The last word of a request's key says of which kind it is."""
    *rest, noise = batch()
    kinds = (1.0,), (0.0, 1.0), (1.0, 1.0, 1.0)
    accepted = apply_rule(verify, kinds, *rest, noise).accepted
    np.testing.assert_array_equal(accepted, np.array([1, 0, 3])[np.asarray(noise.key_data)[:, 1] % 3])


@pytest.mark.parametrize("rates", [(), ((),), ((0.5,), 0.5), ((0.5, 1.5),), ((0.5,) * (K + 1),)], ids=str)
def test_invalid_kinds_are_refused(rates):
    with pytest.raises(ValueError, match=r"synthetic_acceptance=.*expected None, a number in 0\.\.1"):
        Speculation(K, synthetic_acceptance=rates)


def test_the_token_comes_from_the_rule():
    """After a refusal the residual's, which is no token that the draft likes better; after all drafts the bonus
    draw."""
    logits, warp, proposal, noise = batch()
    result = apply_rule("rejection", RATES, logits, warp, proposal, noise)
    offsets = np.tile(np.arange(K + 1, dtype=np.int32), (B, 1))
    distribution, sampled = jax.jit(lambda: make_distribution(logits, warp, noise.sample_keys(offsets)))()
    every = np.asarray(result.accepted) == K
    assert 0 < np.sum(every) < B
    np.testing.assert_array_equal(np.asarray(result.token)[every], np.asarray(sampled)[every, K])
    tokens = jnp.broadcast_to(result.token[:, None], (B, K + 1))
    p, q = distribution.log_prob(tokens), proposal.distribution.log_prob(tokens[:, :K])
    gap = jnp.take_along_axis(p[:, :K] - q, jnp.minimum(result.accepted, K - 1)[:, None], axis=1)[:, 0]
    assert np.all(np.asarray(gap)[~every] > 0)


def test_the_same_seed_accepts_the_same_drafts():
    first, again = (apply_rule("rejection", 0.5, *batch()) for _ in range(2))
    np.testing.assert_array_equal(first.accepted, again.accepted)
    *rest, noise = batch()
    later = apply_rule("rejection", 0.5, *rest, dataclasses.replace(noise, length=noise.length + 1))
    assert np.any(first.accepted != later.accepted)


@pytest.mark.parametrize("verify", VERIFY_RULES)
def test_the_rules_work_is_still_computed(verify):
    """Nothing that the rule computes for its own decision is left out of the compiled program."""

    def cost(rule) -> dict:
        return jax.jit(rule).lower(*batch()).compile().cost_analysis()

    synthetic, own = cost(rule_of(Speculation(K, verify, synthetic_acceptance=0.7))), cost(RULES[verify])
    # Fusions repeat an operation or two in one program and not in the other.
    assert all(synthetic[what] >= 0.99 * own[what] for what in ("flops", "transcendentals"))


def test_without_synthetic_acceptance_the_rule_is_unchanged():
    assert all(rule_of(Speculation(K, verify)) is RULES[verify] for verify in VERIFY_RULES)


def test_synthetic_acceptance_is_refused_for_serving(tmp_path):
    speculation = Speculation(synthetic_acceptance=0.7)
    folder = tiny_checkpoint(tmp_path / "target")
    words = "synthetic_acceptance=0.7 accepts drafts by chance.*would not have the target's distribution.*benchmarks/"
    with pytest.raises(ValueError, match=words):
        jspec.load(folder, "ngram", speculation=speculation)
    with pytest.raises(ValueError, match=words):
        jspec.generate(folder, [1, 2], draft="ngram", synthetic_acceptance=0.7)
    with pytest.raises(ValueError, match=words):
        LLM(target(), None, drafting("ngram", speculation), "ngram", None, speculation, CONFIG)
