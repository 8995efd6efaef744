"""Drafts from logits over a draft vocabulary: their tokens and distributions."""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lossless.table_model import TableConfig

from jspec.config import Speculation
from jspec.drafting.base import Context, FixedDrafts
from jspec.drafting.draft_model import DraftModel
from jspec.drafting.drawing import Drawing
from jspec.models.heads.draft_vocabulary import tokens_of
from jspec.pallas.sampling.warped_logits import over_vocabulary
from jspec.sampling.distribution import Distribution, Warp, make_distribution
from jspec.sampling.draft_vocabulary import DraftVocabulary
from jspec.sampling.params import SamplingParams
from jspec.sampling.processors import Processing, Processors
from jspec.sampling.streams import RoundNoise
from jspec.sampling.verify import Proposal

B, J, V = 4, 3, 11
TOKENS = [9, 2, 4, 7, 0]  # the draft vocabulary, in no order
IDS = jnp.array([4, -1, 1, -1, 2, -1, -1, 3, -1, 0, -1], jnp.int32)
VOCABULARY = DraftVocabulary(IDS, jnp.array(TOKENS, jnp.int32))
LOGITS = jax.random.normal(jax.random.key(0), (B, J, len(TOKENS)))
WARP = Warp(
    jnp.array([1.0, 0.7, 1.3, 0.0]),
    jnp.array([0, 3, 0, 0]),
    jnp.array([1.0, 1.0, 0.8, 1.0]),
    jnp.array([0.0, 0, 0.1, 0]),
)


MAKE = jax.jit(make_distribution)


def processing(params=None, stop=-1, min_length=0) -> Processing:
    """What all rows want: those of ``params``, and no token ``stop`` before ``min_length``."""
    some = None
    if params is not None:
        one = Processors.of(params, 2, V)
        some = jax.tree.map(lambda x: jnp.asarray(np.tile(np.asarray(x)[None], (B, *[1] * np.ndim(x)))), one)
    stops, lengths = np.tile(np.array([stop, -1], np.int32), (B, 1)), np.full(B, min_length, np.int32)
    arrays = stops, lengths, np.full((B, 8), 4, np.int32), np.full(B, 5, np.int32)
    return Processing(some, *map(jax.device_put, arrays))


def draw(
    how: Any = "sample", wants=None, fixed=None, vocabulary: DraftVocabulary | None = VOCABULARY, logits=LOGITS, seed=1
):
    """``Drawing.draw`` of all drafts at once, and their proposal."""
    return _drawn(how, wants or processing(), fixed, vocabulary, logits, seed)


@functools.partial(jax.jit, static_argnums=0)
def _drawn(how, wants, fixed, vocabulary, logits, seed):
    noise = RoundNoise(jax.random.key_data(jax.random.split(jax.random.key(seed), B)), jnp.full(B, 5, jnp.int32))
    parts = dict.fromkeys(("tokens", "length", "previous", "features", "live", "room", "table"))
    context = Context(**parts, warp=WARP, processing=wants, noise=noise, fixed=fixed)  # pyright: ignore[reportArgumentType]
    drawing = Drawing(Speculation(J, "match", how), context, "eagle", vocabulary)
    distribution, tokens = drawing.draw(logits, 0)
    return distribution, tokens, drawing.proposal(distribution, tokens, jnp.full(B, J, jnp.int32))


@jax.jit
def log_probs(distribution: Distribution):
    """Of every token, ``[B, J, V]``, and asked one token after another, ``[V, B, J]``."""
    each = [distribution.log_prob(jnp.full((B, J), token, jnp.int32)) for token in range(V)]
    return distribution.log_probs, jnp.stack(each)


def assert_same(narrow: Distribution, wide: Distribution):
    """The probability of every token, and of single ones."""
    for found, wanted in zip(log_probs(narrow), log_probs(wide), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_each_index_maps_to_its_token():
    np.testing.assert_array_equal(tokens_of(IDS, len(TOKENS)), TOKENS)
    np.testing.assert_array_equal(VOCABULARY.indices(jnp.array([0, 1, 9, -1, V, V + 5])), [4, -1, 0, -1, -1, -1])
    np.testing.assert_array_equal(VOCABULARY.narrowed(VOCABULARY.widened(LOGITS)), LOGITS)
    short = VOCABULARY.within(8)
    assert short.ids.shape == (8,)
    np.testing.assert_array_equal(short.indices(jnp.array([7, 9])), [3, -1])


def test_distributions_equal_those_of_logits_over_all_tokens():
    narrow, _, _ = draw()
    wide, _ = MAKE(over_vocabulary(LOGITS, IDS), WARP)
    assert narrow.warped.logits.shape == LOGITS.shape
    assert_same(narrow, wide)


def test_tokens_follow_their_distributions():
    many = jnp.broadcast_to(LOGITS[:1], (B, J, len(TOKENS)))
    drawn = np.concatenate([np.asarray(draw(seed=seed, logits=many)[1][0]) for seed in range(300)])
    expected = np.exp(np.asarray(draw(logits=many)[0].log_probs)[0]).mean(axis=0)
    np.testing.assert_allclose(np.bincount(drawn, minlength=V) / len(drawn), expected, atol=0.06)
    _, tokens, _ = draw()
    np.testing.assert_array_equal(tokens[3], np.take(TOKENS, jnp.argmax(LOGITS[3], axis=-1)))  # greedy


def test_an_early_stop_token_is_found_in_the_draft_vocabulary():
    whole = np.asarray(over_vocabulary(LOGITS, IDS))
    for stop in range(V):
        found, _, _ = draw(wants=processing(stop=stop, min_length=7))
        early = (np.arange(J) < 2)[:, None] & (np.arange(V) == stop)
        wide, _ = MAKE(np.where(early, -np.inf, whole).astype(np.float32), WARP)
        assert_same(found, wide)


def test_processors_apply_to_tokens_not_indices():
    params = SamplingParams(repetition_penalty=1.7, logit_bias={9: 2.0, 3: 5.0}, allowed_token_ids=[9, 2, 3, 4, 0])
    wants = processing(params, stop=2, min_length=6)
    found, tokens, _ = draw(wants=wants)
    wide, _ = MAKE(jax.jit(Processing.apply)(wants, over_vocabulary(LOGITS, IDS)), WARP)
    assert found.warped.logits.shape == LOGITS.shape
    assert_same(found, wide)
    assert set(np.unique(tokens)) <= {9, 2, 4, 0}


def test_a_row_without_processors_ignores_its_neighbours():
    idle = processing(SamplingParams())
    np.testing.assert_array_equal(draw(wants=idle)[1], draw()[1])


def test_coupled_drafts_use_the_noise_of_the_targets_tokens():
    found, tokens, _ = draw("coupled")
    wide, same, _ = draw("coupled", vocabulary=None, logits=over_vocabulary(LOGITS, IDS))
    assert found.draft_ids is None
    np.testing.assert_array_equal(tokens, same)
    assert_same(found, wide)


def test_a_fixed_draft_may_be_outside_of_the_draft_vocabulary():
    fixed = FixedDrafts(jnp.full((B, J), 5, jnp.int32), jnp.array([0, 1, 2, 3], jnp.int32))
    _, tokens, proposal = draw(fixed=fixed)
    tokens = np.asarray(tokens)
    np.testing.assert_array_equal(tokens == 5, np.arange(J) < np.arange(B)[:, None])
    assert proposal.point_mass[tokens == 5].all()
    np.testing.assert_array_equal(proposal.count, [J] * B)


def test_a_token_that_the_target_lacks_is_not_drafted():
    """The draft model knows 11 tokens and the target 9, so token 9 of the draft vocabulary is none of the target's."""
    model: Any = types.SimpleNamespace(
        logits=lambda hidden: hidden, draft_ids=IDS, draft_tokens=VOCABULARY.tokens, config=TableConfig(8, V)
    )
    drafter = DraftModel(model, 9, Speculation(J))
    logits = drafter.logits(LOGITS)
    np.testing.assert_array_equal(np.isneginf(logits), np.broadcast_to(np.array(TOKENS) >= 9, LOGITS.shape))
    found, tokens, _ = draw(vocabulary=drafter.vocabulary, logits=logits)
    assert tokens.max() < 9
    assert found.log_probs.shape == (B, J, 9)
    np.testing.assert_allclose(np.exp(found.log_probs).sum(axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [VOCABULARY, None], ids=["reduced", "whole"])
def test_proposal_by_row_indexes_every_array_with_rows(vocabulary):
    distribution, tokens, _ = draw(vocabulary=vocabulary)
    proposal = Proposal(tokens, jnp.full(B, J, jnp.int32), distribution, jnp.zeros((B, J), bool))
    some = proposal.by_row(lambda x: x[1:3])
    assert some.distribution is not None
    assert all(len(leaf) == 2 for leaf in jax.tree.leaves(dataclasses.replace(some.distribution, draft_ids=None)))
    np.testing.assert_array_equal(some.tokens, tokens[1:3])
    assert (some.distribution.draft_ids is None) == (vocabulary is None)
