"""Draft models that differ from their target: in vocabulary, positions, temperature, or by NaN logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import (
    CONFIG,
    MAX_LEN,
    Bigram,
    V,
    bigram,
    decode,
    draft,
    drafting,
    engine,
    plain_greedy,
    ragged_prompts,
    successor_table,
    tokens_of,
)

from jspec.config import Speculation
from jspec.drafting.base import Context
from jspec.drafting.draft_model import DraftModel
from jspec.engine.decoding import Decoding
from jspec.engine.engine import Engine
from jspec.models import build, flat_params
from jspec.sampling.distribution import Warp, make_distribution
from jspec.sampling.params import SamplingParams
from jspec.sampling.processors import Processing
from jspec.sampling.streams import RoundNoise

K, B = 4, 5


def table_engine(target: Bigram, draft: Bigram, **speculation) -> Engine:
    settings = Speculation(K, **speculation)
    make_drafter = drafting("draft_model", settings, target.config.vocab_size)
    return Engine(target, draft, Decoding(make_drafter, settings.verify), dataclasses.replace(CONFIG, rounds=8))


def successors(first: int, n: int, wrong=()) -> list[int]:
    tokens = [first]
    for _ in range(n):
        tokens.append((tokens[-1] + (2 if tokens[-1] in wrong else 1)) % V)
    return tokens[1:]


@functools.partial(jax.jit, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
def propose(draft: Bigram, speculation: Speculation, temperature, stop_token, min_length):
    one = jnp.ones(B, jnp.float32)
    tokens, length = jnp.tile(jnp.arange(8, dtype=jnp.int32)[None], (B, 1)), jnp.full(B, 3, jnp.int32)
    stops = jnp.full((B, 1), stop_token, jnp.int32), jnp.full(B, min_length, jnp.int32)
    context = Context(
        tokens=tokens,
        length=length,
        previous=jnp.full(B, 2, jnp.int32),
        features=None,
        live=jnp.ones(B, bool),
        room=jnp.full(B, K, jnp.int32),
        table=jnp.ones((B, 1), jnp.int32),
        warp=Warp(temperature, jnp.zeros(B, jnp.int32), one, 0 * one),
        processing=Processing(None, *stops, tokens, length),
        noise=RoundNoise(jnp.stack([jnp.arange(B, dtype=jnp.uint32)] * 2, axis=1), jnp.full(B, 3, jnp.int32)),
    )
    return DraftModel(draft, V, speculation).propose((), context)[1]


def proposal_of(draft: Bigram, temperature, stop_token=-1, min_length=0, **speculation):
    """The proposal of the draft model after the text 0 1 2, with one row for each temperature."""
    settings = Speculation(K, **speculation)
    return propose(draft, settings, jnp.array(temperature, jnp.float32), jnp.int32(stop_token), jnp.int32(min_length))


@pytest.mark.parametrize(("verify", "draft_vocab"), [("rejection", 20), ("block", 20), ("match", 35)])
def test_greedy_text_with_a_narrower_or_wider_draft_vocabulary(verify, draft_vocab):
    """Tokens that the draft model lacks are never drafted, and tokens that the target lacks are never emitted."""
    table = 40.0 * np.eye(draft_vocab)[(np.arange(draft_vocab) + 1) % draft_vocab]
    if draft_vocab > V:
        table[:, V:] += 100  # the draft model prefers tokens that the target does not have
    mixed = table_engine(bigram(successor_table()), bigram(table), verify=verify)
    prompts = [[3], [15], [27]]
    progresses = decode(mixed, prompts)
    assert tokens_of(progresses) == [successors(first, MAX_LEN - 1) for [first] in prompts]
    drafted, accepted = sum(sum(p.drafted) for p in progresses), sum(sum(p.accepted) for p in progresses)
    assert 0.3 * drafted < accepted
    assert (accepted < drafted) == (draft_vocab < V)

    sampled = decode(mixed, prompts, SamplingParams(temperature=30.0, max_tokens=30))
    assert all(0 <= token < V for tokens in tokens_of(sampled) for token in tokens)
    assert max(max(tokens) for tokens in tokens_of(sampled)) >= 20


def test_no_draft_past_the_draft_models_positions():
    """Draft i is drawn by the pass that reads position length - 1 + i. Here the draft model has positions 0 .. 19."""
    short = table_engine(bigram(successor_table()), bigram(successor_table(), max_position=20))
    prompts = [[3], list(range(10)), list(range(25))]
    progresses = decode(short, prompts)
    assert tokens_of(progresses) == [successors(prompt[-1], MAX_LEN - len(prompt)) for prompt in prompts]
    for prompt, progress in zip(prompts, progresses, strict=True):
        length, expected = len(prompt), []
        while length < MAX_LEN:
            expected.append(max(min(K, 20 - (length - 1)), 0) if length < MAX_LEN - 1 else 0)
            length += expected[-1] + 1
        assert progress.drafted == progress.accepted == expected


def test_draft_model_with_fewer_positions_stops_drafting_past_them():
    shorter = build(dataclasses.replace(draft().config, max_position=18), flat_params(draft()))
    prompts = ragged_prompts()
    progresses = decode(engine("draft_model", 2, "rejection", models=(draft(), shorter)), prompts)
    assert tokens_of(progresses) == plain_greedy(draft(), prompts)
    assert [sum(p.drafted) > 0 for p in progresses] == [len(prompt) <= 18 for prompt in prompts]
    assert progresses[0].drafted[-1] == 0


def test_auto_takes_argmax_below_and_samples_above():
    model = bigram(np.zeros((V, V)))
    temperatures = [0.0, 0.3, 0.49, 0.5, 1.5]
    mixed = proposal_of(model, temperatures, draft_sampling="auto", argmax_below=0.5)
    assert mixed.point_mass.all(axis=1).tolist() == [True, True, True, False, False]
    assert proposal_of(model, temperatures, draft_sampling="argmax").point_mass.all(axis=1).tolist() == [True] * 5
    assert (
        proposal_of(model, temperatures, draft_sampling="sample").point_mass.all(axis=1).tolist()
        == [True] + [False] * 4
    )


def test_argmax_drafts_are_the_likeliest_and_sampled_ones_vary():
    model = bigram(successor_table() / 20)
    point = proposal_of(model, [1.0] * B, draft_sampling="argmax").tokens.tolist()
    assert point == [[3, 4, 5, 6]] * B
    drawn = proposal_of(model, [1.0] * B, draft_sampling="sample").tokens.tolist()
    assert len(set(map(tuple, drawn))) == B


def test_draft_temperature_replaces_the_requests():
    model = bigram(successor_table())
    temperatures = [0.0, 0.5, 1.0, 2.0, 4.0]
    hot = proposal_of(model, temperatures, draft_sampling="sample", draft_temperature=4.0)
    assert hot.point_mass.all(axis=1).tolist() == [False] * B
    np.testing.assert_allclose(hot.distribution.warped.scale, 0.25, rtol=1e-6)
    cold = proposal_of(model, temperatures, draft_sampling="sample", draft_temperature=0)
    assert cold.point_mass.all(axis=1).tolist() == [True] * B
    own = proposal_of(model, temperatures, draft_sampling="sample")
    np.testing.assert_allclose(own.distribution.warped.scale[:, 0], [1, 2, 1, 0.5, 0.25], rtol=1e-6)


def test_coupled_drafts_equal_the_targets_own_draws():
    model = bigram(np.zeros((V, V)))
    coupled = proposal_of(model, [1.0] * B, verify="match", draft_sampling="coupled").tokens
    noise = RoundNoise(jnp.stack([jnp.arange(B, dtype=jnp.uint32)] * 2, axis=1), jnp.full(B, 3, jnp.int32))
    one = jnp.ones(B, jnp.float32)
    keys = noise.sample_keys(jnp.tile(jnp.arange(K, dtype=jnp.int32)[None], (B, 1)))
    _, drawn = make_distribution(jnp.zeros((B, K, V)), Warp(one, jnp.zeros(B, jnp.int32), one, 0 * one), keys)
    assert coupled.tolist() == drawn.tolist()
    independent = proposal_of(model, [1.0] * B, draft_sampling="sample").tokens
    assert not np.any(np.all(coupled == independent, axis=1))


def test_drafts_end_at_a_row_without_a_distribution():
    table = successor_table()
    table[4] = np.nan  # 3 and 4 are proposed; what follows 4 is unknown
    assert proposal_of(bigram(table), [0.0, 1.0] + [1.0] * 3, draft_sampling="sample").count.tolist() == [2] * B
    table[2] = np.nan
    assert proposal_of(bigram(table), [0.0, 1.0] + [1.0] * 3, draft_sampling="sample").count.tolist() == [0] * B


def test_stop_tokens_are_not_drafted_before_min_tokens():
    model = bigram(40.0 * np.eye(V)[np.full(V, 9)] + np.eye(V)[np.full(V, 5)])  # 9 always, else 5
    drafted = proposal_of(model, [0.0] + [1.0] * 4, stop_token=9, min_length=5, draft_sampling="sample")
    assert drafted.tokens[0].tolist() == [5, 5, 9, 9]  # positions 3 and 4 are early
    assert 9 not in drafted.tokens[:, :2].ravel().tolist()
    assert jnp.all(drafted.distribution.log_prob(jnp.full((B, K), 9, jnp.int32))[:, :2] == -jnp.inf)


def test_all_drafts_of_an_equal_model_are_accepted_under_min_tokens():
    """Stop tokens are forbidden to the draft model too. If not, rounds before min_tokens would lose their drafts."""
    model = bigram(3.0 * np.eye(V)[np.full(V, 9)])
    params = SamplingParams(temperature=1.0, max_tokens=30, min_tokens=20, stop_token_ids=[9])
    same = table_engine(model, model, draft_sampling="sample")
    for progress in decode(same, [[1], [2], [3], [4]], params, stop_tokens=(9,)):
        assert progress.accepted == progress.drafted
        assert 9 not in progress.tokens[:20]
