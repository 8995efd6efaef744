"""Where completions end, and what they then say: stop tokens, stop strings, limits, broken numbers.

The models are tables over letters: the alphabet in order, drafted for by one that errs after some of them.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import EOS, LETTERS, Letters, V, bigram, successor_table, table_llm
from tokenizer_families import FAMILIES

import jspec
from jspec.sampling.params import SamplingParams
from jspec.sampling.stops import first_stop, forbid_early_stops


@pytest.fixture(scope="module")
def llm():
    """Drafts that are always right: blocks of five."""
    model = bigram(successor_table(), eos_token_ids=(EOS,))
    return table_llm(model, model, Letters())


@pytest.fixture(scope="module")
def eager():
    """A model that wants to end, or to write "j", wherever it is; its draft even more so."""
    wishes = np.zeros((V, V))
    wishes[:, EOS], wishes[:, 9] = 31, 30
    return table_llm(bigram(wishes, eos_token_ids=(EOS,)), bigram(2 * wishes), Letters())


def greedy(llm, prompt="a", **settings) -> jspec.Result:
    return jspec.generate(llm, prompt, SamplingParams(**{"temperature": 0, "max_tokens": 20, **settings}))


def test_a_stop_token_ends_at_every_place_of_a_round(llm):
    params = [SamplingParams(temperature=0, max_tokens=30, stop_token_ids=[1 + i]) for i in range(12)]
    for i, result in enumerate(jspec.generate(llm, ["a"] * 12, params)):
        assert result.token_ids == list(range(1, 2 + i))
        assert (result.text, result.finish_reason, result.stop_reason) == (LETTERS[1 : 1 + i], "stop", 1 + i)
        assert result.stats.num_steps == 1 + i // 5
        assert result.accepted == [j % 5 != 4 for j in range(i + 1)]


@pytest.mark.parametrize(
    ("settings", "text", "tokens", "finish_reason", "stop_reason"),
    [
        ({}, "vwxyz", 6, "stop", None),
        ({"ignore_eos": True}, "vwxyzabcdefghijkl", 20, "length", None),
        ({"max_tokens": 5}, "vwxyz", 5, "length", None),
        ({"max_tokens": 6}, "vwxyz", 6, "stop", None),
        ({"stop_token_ids": [24, 22]}, "v", 2, "stop", 22),
        ({"stop_token_ids": [EOS]}, "vwxyz", 6, "stop", EOS),
        ({"ignore_eos": True, "stop_token_ids": [EOS]}, "vwxyz", 6, "stop", EOS),
        ({"ignore_eos": True, "stop_token_ids": [0]}, "vwxyz", 9, "stop", 0),
        ({"stop": "yz"}, "vwx", 5, "stop", "yz"),
        ({"stop": "z", "stop_token_ids": [24]}, "vwx", 4, "stop", 24),
        ({"stop": "x", "stop_token_ids": [24]}, "vw", 3, "stop", "x"),
        ({"stop": "nothing"}, "vwxyz", 6, "stop", None),
        ({"stop": "x", "max_tokens": 3}, "vw", 3, "stop", "x"),
        ({"stop_token_ids": [23], "max_tokens": 3}, "vw", 3, "stop", 23),
    ],
)
def test_finish_and_stop_reason(llm, settings, text, tokens, finish_reason, stop_reason):
    result = greedy(llm, "u", **settings)
    assert (result.text, result.finish_reason, result.stop_reason) == (text, finish_reason, stop_reason)
    assert result.token_ids == [(21 + i) % V for i in range(tokens)]
    assert len(result.accepted) == tokens


def test_several_stop_strings_the_earliest_wins(llm):
    assert greedy(llm, stop=["ij", "fgh", "ghi"]).text == "bcde"
    assert greedy(llm, stop=["hij", "gh"]).stop_reason == "gh"
    assert greedy(llm, stop=["fg", "fgh", "g"]).text == "bcde"


def test_stop_strings_are_searched_in_new_text_only(llm):
    assert greedy(llm, "abc", stop=["bc", "cd"], max_tokens=4).text == "defg"


def test_rounds_past_a_stop_string_do_not_count(llm):
    """The device ran up to eight rounds of five tokens before the host saw "gh"."""
    result = greedy(llm, stop="gh")
    assert result.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert result.text == "bcdef"
    assert result.accepted == [True] * 4 + [False] + [True] * 2
    assert (result.stats.num_steps, result.stats.num_draft_tokens, result.stats.num_accepted_draft_tokens) == (2, 8, 8)
    assert result.stats.acceptance_histogram == (0, 0, 0, 0, 2)


@pytest.mark.parametrize(
    ("min_tokens", "settings", "tokens"),
    [
        (0, {"stop_token_ids": [3]}, [1, 2, 3]),
        (2, {"stop_token_ids": [3]}, [1, 2, 3]),
        (3, {"stop_token_ids": [3]}, [1, 2, 0, 1, 2, 3]),  # the third token must be another one
        (3, {"stop": ["d", "g"]}, [1, 2, 3, 4, 5, 6]),
        (3, {"stop": ["de", "gh"]}, [1, 2, 3, 4]),
        (4, {"stop": ["de", "gh"]}, [1, 2, 3, 4, 5, 6, 7]),  # "de" is complete with the fourth token
    ],
)
def test_stop_before_min_tokens_does_not_end(llm, min_tokens, settings, tokens):
    result = greedy(llm, min_tokens=min_tokens, **settings)
    assert (result.token_ids, result.finish_reason) == (tokens, "stop")


def test_no_stop_token_before_min_tokens_however_likely(eager):
    """They have probability 0 there, also in the draft, and are as likely as ever at the next position."""
    params = SamplingParams(temperature=1.0, max_tokens=25, min_tokens=11, stop_token_ids=[9])
    for result in jspec.generate(eager, ["a"] * 30, params, key=jax.random.key(0)):
        assert not {9, EOS} & set(result.token_ids[:11])
        assert len(result.token_ids) == 12
        assert result.token_ids[11] in (9, EOS)
        assert (result.finish_reason, result.stop_reason) == ("stop", 9 if result.token_ids[11] == 9 else None)


def test_ignored_eos_may_come_before_min_tokens(eager):
    result = greedy(eager, ignore_eos=True, min_tokens=5, max_tokens=8)
    assert result.token_ids == [EOS] * 8
    assert (result.text, result.finish_reason) == ("", "length")


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
def test_non_finite_logits_end_a_request_with_its_earlier_tokens(verify):
    """The draft goes on past the token after which the target has no distribution, and nothing after it is accepted."""
    table = successor_table()
    table[6] = np.nan
    model, draft = bigram(table, eos_token_ids=(EOS,)), bigram(successor_table())
    broken = table_llm(model, draft, Letters(), verify=verify, draft_sampling="sample")
    for temperature in (0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=9, seed=0)
        ending, at_once, whole = jspec.generate(broken, ["a", "g", "h"], params)
        assert (ending.text, ending.token_ids, ending.finish_reason) == ("bcdefg", [1, 2, 3, 4, 5, 6], "error")
        assert ending.stop_reason == "the target's logits at position 7 are not finite"
        assert (at_once.text, at_once.token_ids, at_once.finish_reason) == ("", [], "error")
        assert (whole.text, whole.finish_reason) == ("ijklmnopq", "length")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"allowed_token_ids": [EOS], "min_tokens": 2},
            "min_tokens=2: expected a value that allows a token at place 0 of the completion, where allowed_token_ids and "
            f"min_tokens together allow no token; the others allow token {EOS} there; change min_tokens, or leave one of",
        ),
        (
            {"allowed_token_ids": [3], "bad_words": "d", "min_tokens": 2},  # of which the last one has no part in it
            "bad_words=['d']: expected a value that allows a token at place 0 of the completion, where allowed_token_ids "
            "and bad_words together allow no token; the others allow token 3 there; change bad_words, or leave one of",
        ),
    ],
)
def test_options_that_leave_no_token_at_first_are_refused(llm, options, said):
    compiled = llm.engine.num_compilations
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        greedy(llm, max_tokens=4, **options)
    assert llm.engine.num_compilations == compiled


def test_options_that_leave_no_token_later_end_a_request_with_its_earlier_tokens(llm):
    """After b the words b b and b c may not come, of which c is the likeliest token; beside d, it could."""
    for allowed, words in (([1, 2], ["bb", "bc"]), ([1], ["bb"])):
        result = greedy(llm, max_tokens=4, allowed_token_ids=allowed, bad_words=words)
        assert (result.token_ids, result.finish_reason) == ([1], "error")
        assert result.stop_reason.startswith(
            f"NoTokenAllowed: bad_words={words}: expected a value that allows a token at place 1 of the completion"
        )
    free = greedy(llm, max_tokens=3, allowed_token_ids=[1, 2, 3], bad_words=["bb", "bc"])
    assert (free.token_ids[:2], free.finish_reason) == ([1, 3], "length")


def test_stop_conditions_that_cannot_work_are_refused(llm):
    with pytest.raises(ValueError, match=f"stop_token_ids has token id {V}: expected 0..{V - 1}"):
        greedy(llm, stop_token_ids=[V])
    without = table_llm(bigram(successor_table()))
    with pytest.raises(ValueError, match="stop=\\('x',\\) is text, but the checkpoint has no tokenizer"):
        greedy(without, [1], stop="x")
    with pytest.raises(ValueError, match="prompt 0 is text, but the checkpoint has no tokenizer"):
        greedy(without, "x")
    assert without.engine.num_compilations == 0


def test_stop_tokens_are_forbidden_until_min_length():
    logits = jnp.zeros((2, 3, 5))
    positions = jnp.array([[4, 5, 6], [4, 5, 6]])
    out = forbid_early_stops(logits, positions, jnp.array([[1, 3, -1], [4, -1, -1]]), jnp.array([6, 5]))
    expected = np.zeros((2, 3, 5))
    expected[0, :2, [1, 3]] = expected[1, 0, 4] = -np.inf
    np.testing.assert_array_equal(out, expected)


def test_first_stop_finds_the_first_stop_token():
    tokens = jnp.array([[1, 2, 3], [3, 3, 1], [-2, -2, -2], [-1, 0, 0]])
    stops = jnp.array([[3, 2, -1], [3, -1, -1], [1, 2, 3], [7, 8, 9]])
    assert first_stop(tokens, stops).tolist() == [1, 0, 3, 3]


def test_the_space_before_a_completion_can_stop_it():
    """Decoders of the Llama-2 kind drop it when they are given the completion alone."""
    family = FAMILIES["sentencepiece"]()
    prompt, whole = family.encode("x"), family.encode("x the cat")
    table = np.zeros((family.size, family.size), np.float32)
    for token, following in itertools.pairwise(whole):
        table[token, following] = 40
    copying = table_llm(bigram(table), tokenizer=family)
    for most, text in ((1, " the"), (2, " the cat")):
        assert greedy(copying, "x", max_tokens=most).text == text
    assert greedy(copying, prompt, max_tokens=2, stop=" the").token_ids == whole[2:3]
    assert greedy(copying, prompt, max_tokens=2, stop=" the").text == ""
