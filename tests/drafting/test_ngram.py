"""Prompt lookup, compared with a reference implementation of a few lines of Python."""

import functools

import jax
import numpy as np
import pytest
from looked_up import B, K, S, drafts_of, lookup, lookup_context

from jspec.drafting.ngram import NGram


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter: NGram, tokens, length, room):
    return drafter.propose((), lookup_context(tokens, length, room))[1]


def drafts(texts, shortest=1, longest=4, room=K) -> list[list[int]]:
    return drafts_of(functools.partial(propose, NGram(K, shortest, longest)), texts, room)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2, 3, 4]),  # period 4 goes on
        ([7], []),
        ([7, 8, 9], []),
        ([5, 5], [5] * K),
        ([1, 2, 9, 3, 2, 8, 1, 2], [9, 3, 2, 8, 1, 2]),  # the longer match wins over the more recent one
        ([2, 9, 2, 8, 2], [8, 2, 8, 2, 8, 2]),  # of equal ones the most recent wins
        ([1, 2, 3, 1, 2, 3, 1], [2, 3, 1, 2, 3, 1]),
    ],
)
def test_drafts_continue_known_texts(text, expected):
    assert drafts([text]) == [expected]
    assert (lookup(text, 1, 4) or []) == expected  # the reference implementation is right as well


def test_matches_shorter_than_ngram_min_do_not_count():
    texts = [[1, 2, 9, 5, 2], [1, 2, 9, 1, 2], [4, 1, 2, 9, 4, 1, 2]]
    assert drafts(texts, 1, 3) == [[9, 5, 2, 9, 5, 2], [9, 1, 2] * 2, [9, 4, 1, 2, 9, 4]]
    assert drafts(texts, 2, 3) == [[], [9, 1, 2] * 2, [9, 4, 1, 2, 9, 4]]
    assert drafts(texts, 3, 3) == [[], [], [9, 4, 1, 2, 9, 4]]


def test_matches_are_no_longer_than_ngram_max():
    """With one token to look at, the most recent occurrence wins although an earlier one agrees for longer."""
    text = [1, 2, 3, 9, 9, 3, 8, 1, 2, 3]
    assert drafts([text], 1, 3) == [[9, 9, 3, 8, 1, 2]]
    assert drafts([text], 1, 1) == [[8, 1, 2, 3, 8, 1]]


@pytest.mark.parametrize("room", [0, 1, K])
def test_no_more_drafts_than_room(room):
    assert drafts([[1, 2, 1, 2]], room=room) == [[1, 2, 1, 2, 1, 2][:room]]


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 4), (2, 3), (3, 5), (4, 9)])
def test_drafts_equal_the_reference(shortest, longest):
    rng = np.random.default_rng(shortest * 10 + longest)
    found = missed = 0
    for _ in range(30):
        texts = []
        for _ in range(B):
            text = rng.integers(rng.integers(1, 6), size=rng.integers(1, S + 1))
            if rng.random() < 0.3:  # a text that repeats itself, from somewhere on
                text = np.concatenate([text[: len(text) // 3], np.resize(text[-rng.integers(1, 8) :], S)])[:S]
            texts.append(text.tolist())
        expected = [lookup(text, shortest, longest) for text in texts]
        assert drafts(texts, shortest, longest) == [continued or [] for continued in expected]
        found += sum(continued is not None for continued in expected)
        missed += sum(continued is None for continued in expected)
    assert found > 20
    assert missed > 10
