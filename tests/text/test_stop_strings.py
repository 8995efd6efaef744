"""Text as it streams: in whatever rounds tokens come, the pieces make up the text, and stop strings never show."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_families import FAMILIES, WORDS

from jspec.text.detokenizer import MAX_HELD, MAX_SETTLED, REPLACEMENT, Detokenizer
from jspec.text.stop_strings import Completion

PIECES = ["a", "b", "ab", "cab", "\n", "", "é"]
CHARACTERS = (*WORDS, "é", "€", "😀", "\n", "  ", " ", " ", " ", REPLACEMENT, "x.")

every_family = pytest.mark.parametrize("name", FAMILIES)
deterministic = settings(max_examples=150, deadline=None, database=None, derandomize=True)


def pieces(tokens) -> str:
    return "".join(PIECES[token] for token in tokens)


def reference(decode, prompt, tokens, strings=(), min_tokens=0) -> tuple[str, str | None, int | None]:
    """The text, the stop string and how many tokens to keep, from a search of all the text after each token."""
    detokenizer = Detokenizer(decode, prompt)
    for count, token in enumerate(tokens, 1):
        settled = len(detokenizer.text)
        detokenizer.add([token])
        text = detokenizer.text
        places = [(start, string) for string in strings for start in range(len(text)) if text.startswith(string, start)]
        found = [(start, string) for start, string in places if start + len(string) > settled]
        if found and count > min_tokens:
            start, string = min(found)
            return text[:start], string, count
    return detokenizer.text + detokenizer.held, None, None


def beginning(text: str, strings) -> str:
    """The longest end of ``text`` that a longer stop string begins with."""
    ends = [text[start:] for start in range(len(text) + 1)]
    return next(end for end in ends if not end or any(s.startswith(end) and s != end for s in strings))


def streamed(completion: Completion, tokens, cuts, strings=()) -> tuple[str, int | None]:
    """What ``take`` gives out, joined, and what ``add`` returned, where ``cuts`` split the tokens into rounds."""
    shown, keep = "", None
    for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        keep = completion.add(tokens[start:stop])
        shown += completion.take()
        if keep is not None:
            assert shown == completion.text
            break
        assert completion.text == shown + beginning(completion.text, strings)  # and no more than that is held back
    completion.end()
    shown += completion.take()
    assert completion.take() == ""
    return shown, keep


def splits(data, count: int) -> list[int]:
    return sorted(data.draw(st.lists(st.integers(0, count), max_size=8), label="cuts"))


@deterministic
@given(data=st.data())
@every_family
def test_streamed_texts_join_to_the_decoded_text(name, data):
    """Characters of several tokens, special tokens and bytes that are no characters among them."""
    family = FAMILIES[name]()
    texts = st.lists(st.sampled_from(CHARACTERS), min_size=1, max_size=12).map(
        lambda words: family.encode("".join(words))
    )
    ids = st.lists(st.one_of(st.integers(0, family.size - 1), st.sampled_from(family.special)), max_size=20)
    parts = data.draw(st.lists(st.one_of(texts, texts, ids), min_size=1, max_size=3), label="tokens")
    tokens = [token for part in parts for token in part]
    begin = data.draw(st.integers(0, len(tokens)), label="prompt")
    prompt, new = tokens[:begin], tokens[begin:]
    whole, _, _ = reference(family.decode, prompt, new)
    substrings = st.tuples(st.integers(0, len(whole)), st.integers(1, 6)).map(lambda at: whole[at[0] : sum(at)])
    words = st.sampled_from(["at", " x", "é", REPLACEMENT, "the cat", "\n"])
    strings = data.draw(
        st.lists(st.one_of(substrings.filter(bool) if whole else words, words), max_size=3), label="stop"
    )
    min_tokens = data.draw(st.integers(0, 6), label="min_tokens")
    expected = reference(family.decode, prompt, new, strings, min_tokens)
    completion = Completion(Detokenizer(family.decode, prompt), strings, min_tokens)
    shown, keep = streamed(completion, new, splits(data, len(new)), strings)
    assert (completion.text, completion.stop, keep) == expected
    assert shown == completion.text


@deterministic
@given(
    data=st.data(),
    tokens=st.lists(st.integers(0, 2), max_size=16),
    strings=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    min_tokens=st.integers(0, 16),
)
def test_overlapping_stop_strings_end_at_the_first(data, tokens, strings, min_tokens):
    """Each other and themselves: all are made of a and b."""
    expected = reference(pieces, [], tokens, strings, min_tokens)
    completion = Completion(Detokenizer(pieces), strings, min_tokens)
    shown, keep = streamed(completion, tokens, splits(data, len(tokens)), strings)
    assert (completion.text, completion.stop, keep) == expected
    assert shown == completion.text


@pytest.mark.parametrize(
    ("strings", "tokens", "min_tokens", "keep", "text", "stop"),
    [
        (["b"], [0, 0, 0], 0, None, "aaa", None),
        (["b"], [0, 1, 0], 0, 2, "a", "b"),
        (["aab"], [0, 2, 0], 0, 2, "", "aab"),  # across tokens
        (["aab"], [0, 0, 0, 1], 0, 4, "a", "aab"),  # begun twice before it is complete
        (["b"], [3, 0], 0, 1, "ca", "b"),  # inside a token, whose rest is cut
        (["bc", "ab"], [0, 1, 3], 0, 2, "", "ab"),  # the first to be complete
        (["b", "ab"], [3], 0, 1, "c", "ab"),  # complete with the same token: the one that begins first
        (["a", "ab"], [2], 0, 1, "", "a"),  # and of those that begin there, the shorter
        (["b"], [1, 0, 1], 1, 3, "ba", "b"),
        (["b"], [1, 0, 1], 3, None, "bab", None),
        (["ba"], [1, 0, 1], 1, 2, "", "ba"),  # begins within min_tokens and ends past it
        (["ba"], [1, 0, 1, 0], 2, 4, "ba", "ba"),
        (["b"], [5, 5, 1], 2, 3, "", "b"),
        (["\n"], [0, 4], 0, 2, "a", "\n"),
        (["é"], [0, 6, 0], 0, 2, "a", "é"),
    ],
)
def test_earliest_stop_string_ends_the_text(strings, tokens, min_tokens, keep, text, stop):
    completion = Completion(Detokenizer(pieces), strings, min_tokens)
    assert completion.add(tokens) == keep
    completion.end()
    assert (completion.text, completion.stop) == (text, stop)
    assert completion.take() == text


def test_possible_beginning_of_a_stop_string_is_held_back():
    completion = Completion(Detokenizer(pieces), ["aab", "bb"])
    taken = []
    for token in [0, 0, 0, 4, 1, 0]:
        assert completion.add([token]) is None
        taken.append(completion.take())
    assert taken == ["", "", "a", "aa\n", "", "b"]
    assert completion.text == "aaa\nba"
    completion.end()
    assert completion.take() == "a"


@pytest.mark.parametrize("stop", [(), ("zz",)])
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_an_incomplete_character_shows_when_it_is_complete_or_at_the_end(name, stop):
    family = FAMILIES[name]()
    prompt, euro = family.encode("x"), family.encode("x€")[-3:]
    completion = Completion(Detokenizer(family.decode, prompt), stop)
    taken = []
    for token in [*euro, *euro[:2]]:
        completion.add([token])
        taken.append(completion.take())
    assert taken == ["", "", "€", "", ""]
    assert completion.text == "€"
    completion.end()
    completion.end()  # which adds nothing
    left = completion.take()
    assert left.startswith(REPLACEMENT)
    assert completion.text == "€" + left


def test_incomplete_character_matches_no_stop_string():
    """A text that ends within a character gets U+FFFD at its end, which the model did not write."""
    family = FAMILIES["byte_level"]()
    completion = Completion(Detokenizer(family.decode), [REPLACEMENT])
    assert completion.add(family.encode("€")[:2]) is None
    completion.end()
    assert (completion.text, completion.stop) == (REPLACEMENT, None)


@pytest.mark.parametrize("stop", [(), ("b",)])
def test_a_completion_ends_once(stop):
    completion = Completion(Detokenizer(pieces), stop)
    completion.add([0, 1])
    text = "a" if stop else "ab"
    for _ in range(2):
        completion.end()
        assert (completion.text, completion.stop) == (text, stop[0] if stop else None)
    with pytest.raises(RuntimeError, match="has ended"):
        completion.add([0])
    assert completion.text == text


@pytest.mark.parametrize("stop", [(), ("not in it", "no, not")])
@every_family
def test_work_is_linear_in_the_text(name, stop):
    """Tokens that the decoder reads for each of a completion's, streamed, and whatever they are."""
    family, rng = FAMILIES[name](), np.random.default_rng(0)
    text = family.encode(" ".join(rng.choice(WORDS, 1500)))[:2000]
    for tokens in (text, rng.integers(family.size, size=2000).tolist(), [family.special[-1]] * 2000, [200] * 2000):
        calls, read, most = 0, 0, MAX_SETTLED + MAX_HELD

        def decode(tokens):
            nonlocal calls, read
            calls, read = calls + 1, read + len(tokens)
            return family.decode(tokens)

        completion, shown = Completion(Detokenizer(decode), stop), ""
        for start in range(0, len(tokens), 4):
            completion.add(tokens[start : start + 4])
            shown += completion.take()
        completion.end()
        assert shown + completion.take() == completion.text
        assert calls < 3 * len(tokens)
        assert read < 3 * most * len(tokens)


@every_family
def test_unstreamed_text_is_decoded_once_at_the_end(name):
    """With a few decodes in all, if there are no stop strings."""
    family, calls, read = FAMILIES[name](), 0, 0

    def decode(tokens):
        nonlocal calls, read
        calls, read = calls + 1, read + len(tokens)
        return family.decode(tokens)

    tokens = family.encode("the cat sat. " * 600)[:4000]
    completion = Completion(Detokenizer(decode))
    for token in tokens:
        assert completion.add([token]) is None
    assert calls == 0
    completion.end()
    assert completion.text == family.decode(tokens)
    assert calls <= 3
    assert read < len(tokens) + 3 * MAX_SETTLED
