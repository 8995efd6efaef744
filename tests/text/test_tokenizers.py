"""Stop strings by themselves, and tokenizers of checkpoint folders; ``test_detokenizer.py`` has real families."""

import inspect
import json
from collections.abc import Sequence
from typing import Any

import pytest
from resaved import set_keys
from tiny import tiny_checkpoint, tiny_tokenizer

from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.commands.demo import FAMILY
from jspec.text.detokenizer import encode, encode_within


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


def test_spaces_are_not_cleaned_up(tmp_path):
    """Whatever the folder asks for, as Llama 3's does: text that a model wrote is not edited."""
    tiny_tokenizer(tmp_path)
    set_keys(tmp_path / "tokenizer_config.json", clean_up_tokenization_spaces=True)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.clean_up_tokenization_spaces is False  # pyright: ignore[reportAttributeAccessIssue]
    assert tokenizer.decode(tokenizer.encode("a . b n't"), skip_special_tokens=True) == "a . b n't"


class Counting:
    """The family's tokenizer, which counts the characters that it is given."""

    def __init__(self):
        self.tokenizer: Any = load_tokenizer(FAMILY / "target")
        self.characters = 0

    def encode(self, text: str, **options) -> list[int]:
        self.characters += len(text)
        return self.tokenizer.encode(text, **options)

    def decode(self, token_ids: Sequence[int], **options) -> str:
        return self.tokenizer.decode(token_ids, **options)

    def get_vocab(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()


TEXT = inspect.getsource(json) * 40  # some 500,000 characters


@pytest.mark.parametrize("most", [1, 20, 300])
def test_only_as_much_is_encoded_as_is_needed(most):
    tokenizer = Counting()
    whole = encode(tokenizer, TEXT, "prompt")
    tokenizer.characters = 0
    assert encode_within(tokenizer, TEXT, "prompt", most) is None
    assert tokenizer.characters < 50 * (most + 64)
    tokenizer.characters = 0
    last = encode_within(tokenizer, TEXT, "prompt", most, last=True)
    assert last is not None
    assert last[-most:] == whole[-most:]
    assert tokenizer.characters < 50 * (most + 64)


@pytest.mark.parametrize("length", [0, 1, 2_000, 4_000, 30_000])
@pytest.mark.parametrize("text", [TEXT, " " * 30_000])
def test_short_text_is_encoded_in_one_call(text, length):
    """Of blanks, 16 of which are a token, more characters are short enough than of others."""
    tokenizer = Counting()
    tokens = encode(tokenizer, text[:length], "prompt")
    for most in (len(tokens) - 1, len(tokens), len(tokens) + 1):
        found = encode_within(tokenizer, text[:length], "prompt", most)
        assert found == (tokens if most >= len(tokens) else None)
