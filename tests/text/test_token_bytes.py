"""The bytes of tokens joined are those of the text, also where a character is spread over tokens."""

import pytest
from tokenizer_families import FAMILIES
from transformers import PreTrainedTokenizerFast

from jspec.text.token_bytes import TokenBytes

TEXT = "the cat sat, déjà 日本 🙂"


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=FAMILIES[family]().tokenizer)


def decoded(tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


@pytest.mark.parametrize("family", ["byte_level", "sentencepiece"])
def test_bytes_of_tokens_join_to_those_of_the_text(family):
    made = tokenizer(family)
    ids = made.encode(TEXT, add_special_tokens=False)
    pieces = [TokenBytes(made)(token, decoded(made, token)) for token in ids]
    assert b"".join(pieces).lstrip() == TEXT.encode()
    assert any("\ufffd" in piece.decode(errors="replace") for piece in pieces), "a part of a character"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_complete_characters_have_the_bytes_of_their_text(family):
    made = tokenizer(family)
    for token in made.encode("the cat", add_special_tokens=False):
        assert TokenBytes(made)(token, decoded(made, token)).strip() == decoded(made, token).strip().encode()


def test_added_tokens_are_plain_text():
    made = tokenizer("byte_level")
    made.add_tokens(["Ġé"])
    token = made.convert_tokens_to_ids("Ġé")
    assert TokenBytes(made)(token, "Ġé") == "Ġé".encode()


def test_without_a_tokenizer_the_text_counts():
    assert TokenBytes(None)(7, "token_id:7") == b"token_id:7"
