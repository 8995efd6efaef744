"""With every kind of draft head, greedy output equals plain decoding token for token, and the right drafts are
accepted."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from causal_heads import causal_drafts
from engines import CONFIG, GREEDY, MAX_LEN, V, decode, engine, key_of, plain_greedy, ragged_prompts, target, tokens_of
from heads import HEADS, before_serving, compile_fast, head_engine, trained_head

from jspec.engine.engine import Engine
from jspec.models import build_head, flat_params
from jspec.sampling.params import SamplingParams

PROMPTS = (
    ragged_prompts()
)  # more prompts than rows, some of several chunks; all texts go on to the last slot of the cache
RULES = ("match", "rejection", "block")
INVARIANT = dataclasses.replace(CONFIG, width=7)
long = pytest.mark.long
K = 4


def counted(progresses) -> tuple[int, int]:
    """The number of accepted drafts, and the number of drafts."""
    accepted, drafted = (sum(sum(getattr(p, name)) for p in progresses) for name in ("accepted", "drafted"))
    return accepted, drafted


def an_engine(name: str, verify: str) -> Engine:
    if verify == "match":
        return head_engine(name, K, "match", INVARIANT, draft_sampling="coupled")
    return head_engine(name, K, verify)


def marks(i: int, j: int) -> tuple:
    """``make test`` has one rule for each kind of head, so that it compiles one engine of each: ``rejection`` for every
    second kind, and ``match`` or ``block`` for the others."""
    if (i + j) % 2 == 0:
        return (long,)
    return () if i % 2 == 0 or j == (0 if i % 4 == 1 else 2) else (pytest.mark.nightly,)


EVERY = [pytest.param(name, rule, marks=marks(i, j)) for i, name in enumerate(HEADS) for j, rule in enumerate(RULES)]
COUPLED = [pytest.param(name, marks=marks(i, 0)) for i, name in enumerate(HEADS)]


@pytest.mark.parametrize(("name", "verify"), EVERY)
def test_speculative_equals_plain(name, verify):
    with_head = an_engine(name, verify)
    progresses = decode(with_head, PROMPTS)
    assert tokens_of(progresses) == plain_greedy(target(), PROMPTS)
    accepted, drafted = counted(progresses)
    assert 0.1 * drafted < accepted < drafted

    params = [GREEDY if i % 2 else SamplingParams(temperature=1.0, max_tokens=9 + i) for i in range(len(PROMPTS))]
    mixed = decode(with_head, PROMPTS, params)
    assert tokens_of(mixed)[1::2] == tokens_of(progresses)[1::2]
    assert tokens_of(mixed)[::2] != [tokens[: 9 + i] for i, tokens in enumerate(tokens_of(progresses))][::2]
    assert with_head.num_compilations == 3


@pytest.mark.parametrize(("name", "verify"), EVERY)
def test_every_round_accepts_the_drafts_of_a_pass_without_cache(name, verify):
    """The rounds run in the engine, with chunked prompts, pages that change owners, and rows that come and go."""
    progresses = decode(an_engine(name, verify), PROMPTS)
    texts, lengths, drafted, accepted = [], [], [], []
    for progress in progresses:
        text = [*progress.request.prompt, *progress.tokens]
        length = len(progress.request.prompt)
        for num_drafted, num_accepted in zip(progress.drafted, progress.accepted, strict=True):
            texts.append(text + [0] * (MAX_LEN + K - len(text)))
            lengths.append(length)
            drafted.append(num_drafted)
            accepted.append(num_accepted)
            length += num_accepted + 1
        assert length == len(text)
    head = before_serving(HEADS[name], trained_head(HEADS[name]))
    text, length = jnp.array(texts, jnp.int32), jnp.array(lengths, jnp.int32)
    by_hand = compile_fast(lambda text, length: causal_drafts(HEADS[name], head, target(), text, length, K).logits)
    logits = by_hand(text, length)
    following = np.take_along_axis(np.array(texts), np.array(lengths)[:, None] + np.arange(K), axis=1)
    right = (np.argmax(logits, axis=-1) == following) & (np.arange(K) < np.array(drafted)[:, None])
    assert np.sum(np.cumprod(right, axis=1), axis=1).tolist() == accepted


@pytest.mark.parametrize("name", COUPLED)
def test_text_of_match_with_coupled_drafts_does_not_depend_on_the_drafter(name):
    """A key gives one text with any drafter and with none, in any row and batch, if the target's pass has one width."""
    keys = [key_of(seed) for seed in range(len(PROMPTS))]
    params = [
        SamplingParams(temperature=(0.5, 1.0, 0.0, 0.8)[i % 4], top_k=i, max_tokens=40) for i in range(len(PROMPTS))
    ]
    coupled = an_engine(name, "match")
    drafted = decode(coupled, PROMPTS, params, keys)
    assert tokens_of(drafted) == tokens_of(decode(engine(None, 1, "match", config=INVARIANT), PROMPTS, params, keys))
    accepted, tried = counted(drafted)
    assert 0 < accepted < tried

    backwards = decode(coupled, PROMPTS[::-1], params[::-1], keys[::-1])  # other rows, pages and neighbours
    assert tokens_of(backwards)[::-1] == tokens_of(drafted)
    alone = decode(coupled, PROMPTS[5:6], params[5:6], keys[5:6])
    assert tokens_of(alone) == tokens_of(drafted)[5:6]
    assert alone[0].accepted == drafted[5].accepted


@pytest.mark.parametrize(("name", "verify"), EVERY)
def test_a_key_gives_one_text_in_any_order(name, verify):
    """A key gives one text also if the requests come in another order, so that it has another row and other pages."""
    sampled, keys = SamplingParams(temperature=0.9, max_tokens=20), [key_of(seed) for seed in range(len(PROMPTS))]
    drafted = decode(an_engine(name, verify), PROMPTS, sampled, keys)
    backwards = decode(an_engine(name, verify), PROMPTS[::-1], sampled, keys[::-1])[::-1]
    assert tokens_of(backwards) == tokens_of(drafted)
    assert [p.accepted for p in backwards] == [p.accepted for p in drafted]
    others = decode(an_engine(name, verify), PROMPTS, sampled, keys[::-1])
    assert tokens_of(others) != tokens_of(drafted)


@pytest.mark.long
def test_greedy_text_in_a_batch_of_one_row():
    single = dataclasses.replace(CONFIG, max_batch=1)
    progresses = decode(head_engine("p-eagle", K, "block", single), PROMPTS)
    assert tokens_of(progresses) == plain_greedy(target(), PROMPTS)
    everyone = decode(head_engine("p-eagle", K, "rejection"), PROMPTS)
    assert [p.accepted for p in progresses] == [p.accepted for p in everyone]


def test_a_broken_head_does_not_change_the_text():
    """If a draft head computes NaN, the drafts before it count, and the target goes on by itself.

    Here the embeddings of half of the tokens are NaN in one stage of an MLP speculator.
    """
    config = HEADS["mlp"]
    params = flat_params(trained_head(config))
    broken = params | {"embeddings.1": params["embeddings.1"].at[: V // 2].set(jnp.nan)}
    with_head = head_engine("mlp", K, "rejection")
    with_head.replace_draft(build_head(config, broken))
    progresses = decode(with_head, PROMPTS)
    with_head.replace_draft(build_head(config, params))
    assert tokens_of(progresses) == plain_greedy(target(), PROMPTS)
    assert {1, K} <= {drafted for p in progresses for drafted in p.drafted}
