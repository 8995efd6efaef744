"""Stop strings by themselves, and tokenizers of checkpoint folders; ``test_detokenizer.py`` has real families."""

import json

from tiny import tiny_checkpoint, tiny_tokenizer

from jspec.checkpoints.tokenizer import load_tokenizer


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
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.clean_up_tokenization_spaces is False  # pyright: ignore[reportAttributeAccessIssue]
    assert tokenizer.decode(tokenizer.encode("a . b n't"), skip_special_tokens=True) == "a . b n't"
