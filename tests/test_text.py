"""Stop strings by themselves, and tokenizers of checkpoint folders."""

import pytest
from tiny import tiny_checkpoint, tiny_tokenizer

from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.text import Stop, StopStrings

PIECES = ["a", "b", "ab", "cab", "\n", "", "é"]


def decode(tokens) -> str:
    return "".join(PIECES[token] for token in tokens)


@pytest.mark.parametrize(
    ("strings", "tokens", "min_tokens", "expected"),
    [
        (["b"], [0, 0, 0], 0, None),
        (["b"], [0, 1, 0], 0, Stop(2, "a", "b")),
        (["aab"], [0, 2, 0], 0, Stop(2, "", "aab")),  # across tokens
        (["b"], [3, 0], 0, Stop(1, "ca", "b")),  # inside a token, whose rest is cut
        (["bc", "ab"], [0, 1, 3], 0, Stop(2, "", "ab")),  # the first to be complete
        (["b", "ab"], [3], 0, Stop(1, "c", "ab")),  # complete with the same token: the one that begins first
        (["a", "ab"], [2], 0, Stop(1, "", "a")),  # and of those that begin there, the shorter
        (["b"], [1, 0, 1], 1, Stop(3, "ba", "b")),
        (["b"], [1, 0, 1], 3, None),
        (["ba"], [1, 0, 1], 1, Stop(2, "", "ba")),  # begins within min_tokens and ends past it
        (["ba"], [1, 0, 1, 0], 2, Stop(4, "ba", "ba")),
        (["b"], [5, 5, 1], 2, Stop(3, "", "b")),
        (["\n"], [0, 4], 0, Stop(2, "a", "\n")),
        (["é"], [0, 6, 0], 0, Stop(2, "a", "é")),
    ],
)
def test_the_first_stop_string(strings, tokens, min_tokens, expected):
    assert StopStrings(decode, strings, min_tokens).find(tokens, 0) == expected


def test_growing_text_finds_what_whole_text_does():
    """However many tokens each visit brings."""
    tokens, strings = [0, 4, 2, 5, 3, 1, 1, 0], StopStrings(decode, ["bcab", "bb"], 0)
    whole = strings.find(tokens, 0)
    assert whole == Stop(5, "a\na", "bcab")
    for step in (1, 2, 3, 5):
        seen, found = 0, None
        while found is None:
            upto = min(seen + step, len(tokens))
            found, seen = strings.find(tokens[:upto], seen), upto
        assert found == whole


def test_a_folder_without_tokenizer_files_has_none(tmp_path):
    assert load_tokenizer(tiny_checkpoint(tmp_path / "model")) is None


def test_any_text_survives_the_tokenizer(tmp_path):
    tiny_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    text = "def f(x):\n\treturn 'é€'  # ok"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text
    assert tokenizer.decode([0, *tokens, 1], skip_special_tokens=True) == text
    assert len(tokenizer.get_vocab()) == 258
