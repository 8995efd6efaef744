"""Greedy speculative output equals the target's own, token for token."""

import dataclasses

import pytest
from engines import GREEDY, MAX_LEN, V, decode, engine, plain_greedy, ragged_prompts, target, tokens_of

PROMPTS = ragged_prompts()  # more than rows; all go on to the last slot of the cache
REPETITIVE = [[5, 6, 7] * 4, [3], [8, 8, 8, 8], [1, 2, 3, 4, 1, 2]]
long = pytest.mark.long
HOT = {"draft_sampling": "sample", "draft_temperature": 1.5}  # the draft's temperature is its own affair
BESIDE = {"lookup": True, "ngram_min": 2}


@pytest.mark.parametrize(
    ("method", "K", "verify", "how"),
    [
        ("draft_model", 1, "block", {}),
        ("draft_model", 3, "rejection", HOT),
        ("draft_model", 4, "block", {}),
        ("draft_model", 8, "match", {}),
        ("ngram", 1, "rejection", {}),
        ("ngram", 3, "match", {}),
        ("ngram", 4, "block", {}),
        ("ngram", 8, "rejection", {}),
        ("draft_model", 4, "rejection", BESIDE),
        pytest.param("draft_model", 8, "block", HOT | BESIDE, marks=long),
        pytest.param("draft_model", 3, "match", {"draft_sampling": "coupled"} | BESIDE, marks=long),
        pytest.param("draft_model", 2, "match", {}, marks=long),
        pytest.param("draft_model", 5, "rejection", {}, marks=long),
        pytest.param("draft_model", 6, "block", HOT, marks=long),
        pytest.param("draft_model", 7, "rejection", {}, marks=long),
        pytest.param("ngram", 2, "block", {}, marks=long),
        pytest.param("ngram", 5, "match", {}, marks=long),
        pytest.param("ngram", 6, "rejection", {}, marks=long),
        pytest.param("ngram", 7, "block", {}, marks=long),
    ],
)
def test_speculative_equals_plain(method, K, verify, how):
    prompts = PROMPTS + REPETITIVE
    progresses = decode(engine(method, K, verify, **how), prompts)
    assert tokens_of(progresses) == plain_greedy(target(), prompts)
    assert all(len(p.request.prompt) + len(p.tokens) == MAX_LEN for p in progresses)
    accepted, drafted = (sum(sum(getattr(p, name)) for p in progresses) for name in ("accepted", "drafted"))
    assert 0 < accepted < drafted


def test_plain_engine_equals_a_pass_without_cache():
    assert tokens_of(decode(engine(None, 4, "rejection"), PROMPTS)) == plain_greedy(target(), PROMPTS)


def test_max_tokens_is_exact():
    """Also where it ends inside a block, or with the last slot."""
    limits = [1, 2, 3, 4, 5, 6, 7, 30]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in limits]
    progresses = decode(engine("draft_model", 4, "block"), PROMPTS, params)
    room = [min(n, MAX_LEN - len(prompt)) for n, prompt in zip(limits, PROMPTS, strict=True)]
    expected = [tokens[:n] for tokens, n in zip(plain_greedy(target(), PROMPTS), room, strict=True)]
    assert tokens_of(progresses) == expected


def test_greedy_beside_sampled():
    """A greedy row does not notice that its neighbours sample."""
    sampled = dataclasses.replace(GREEDY, temperature=1.0, top_k=V // 2)
    params = [GREEDY if i % 2 else sampled for i in range(len(PROMPTS))]
    progresses = decode(engine("draft_model", 4, "block"), PROMPTS, params)
    greedy = plain_greedy(target(), PROMPTS)
    assert tokens_of(progresses)[1::2] == greedy[1::2]
    assert tokens_of(progresses)[::2] != greedy[::2]
