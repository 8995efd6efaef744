"""A request's tokens are a function of its key, its prompt and its settings, and of nothing around it."""

import dataclasses

import pytest
from engines import CONFIG, GREEDY, decode, draft, engine, key_of, ragged_prompts, rounded, tokens_of

from jspec.sampling.params import SamplingParams

PROMPTS = ragged_prompts()
PARAMS = [
    SamplingParams(temperature=1.0, max_tokens=20),
    SamplingParams(temperature=0.6, top_k=9, max_tokens=40),
    SamplingParams(temperature=1.3, top_p=0.9, max_tokens=7),
    SamplingParams(temperature=0.9, min_p=0.1, max_tokens=40),
    GREEDY,
    SamplingParams(temperature=2.0, top_k=20, top_p=0.8, min_p=0.02, max_tokens=13),
    SamplingParams(temperature=0.7, max_tokens=40),
    SamplingParams(temperature=1.0, max_tokens=40),
]
KEYS = [key_of(seed) for seed in range(len(PROMPTS))]
HOT = {"draft_sampling": "sample", "draft_temperature": 1.5}
ENGINES = {  # all of them compiled for tests/drafting/test_greedy.py as well
    "block": ("draft_model", 4, "block", {}),
    "rejection": ("draft_model", 3, "rejection", HOT),
    "ngram": ("ngram", 4, "block", {}),
    "plain": (None, 4, "rejection", {}),
}


@pytest.fixture(params=ENGINES)
def decoding(request):
    """A function: the tokens of some of the requests above, decoded together in the given order."""

    def decode_these(order, keys=KEYS) -> dict[int, list[int]]:
        method, K, verify, how = ENGINES[request.param]
        columns = ([PROMPTS[i] for i in order], [PARAMS[i] for i in order], [keys[i] for i in order])
        return dict(zip(order, tokens_of(decode(engine(method, K, verify, **how), *columns)), strict=True))

    return decode_these


def test_same_key_gives_the_same_tokens(decoding):
    everyone = list(range(len(PROMPTS)))
    first = decoding(everyone)
    assert decoding(everyone) == first  # twice
    assert decoding(everyone[::-1]) == first  # in another order: other slots, other pages
    for i in everyone:
        assert decoding([i]) == {i: first[i]}  # without neighbours


def test_other_keys_give_other_tokens(decoding):
    everyone = list(range(len(PROMPTS)))
    first, other = decoding(everyone), decoding(everyone, [key_of(100 + i) for i in everyone])
    assert other[4] == first[4]  # greedy
    assert all(other[i] != first[i] for i in everyone if i not in (4, 7))  # request 7 has room for two tokens only


def test_one_key_gives_one_text_and_two_keys_two(decoding):
    same = decode(engine("draft_model", 4, "block"), [PROMPTS[3]] * 3, PARAMS[0], [KEYS[0], KEYS[0], KEYS[1]])
    assert same[0].tokens == same[1].tokens != same[2].tokens


INVARIANT = dataclasses.replace(CONFIG, width=9)
long = pytest.mark.long


@pytest.mark.parametrize(
    ("method", "K"),
    [
        *(pytest.param("draft_model", K, marks=() if K in (1, 8) else long) for K in range(1, 9)),
        *(pytest.param("ngram", K, marks=() if K == 5 else long) for K in range(1, 9)),
    ],
)
def test_text_of_match_with_coupled_drafts_does_not_depend_on_the_drafter(method, K):
    """One text for a key, whatever drafts and however much, as long as the target reads one width."""
    models = (draft(), rounded(draft()))
    coupled = engine(method, K, "match", models, INVARIANT, draft_sampling="coupled")
    drafted = decode(coupled, PROMPTS, PARAMS, KEYS)
    plain = decode(engine(None, 1, "match", models, INVARIANT), PROMPTS, PARAMS, KEYS)
    assert tokens_of(drafted) == tokens_of(plain)
    accepted, tried = (sum(sum(getattr(p, name)) for p in drafted) for name in ("accepted", "drafted"))
    assert 0 < accepted < tried
