"""Tokenizers of real GGUF files make the tokens that the original ones make of the same texts.

Beside vocabularies that llama.cpp publishes (``ggml-vocab-*.gguf``) lie texts and the tokens that the original tokenizers
made of them."""

import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from gguf_tokenizers import (
    CONTROL,
    ORIGINALS,
    TEXTS,
    USER_DEFINED,
    differences,
    load,
    transformers,
)
from real_models import NAMES, SMOL, VARIABLE, gguf_file
from tokenizers import AddedToken

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import read_header


def vocabularies() -> list[Path]:
    folder = os.environ.get(VARIABLE)
    return sorted(Path(folder, "gguf").glob("*.gguf.inp")) if folder else []


def real(path: Path, folder: Path):
    header = read_header(path)
    return header.metadata, load(path, folder)


@pytest.mark.parametrize("path", vocabularies() or [None], ids=lambda path: path and path.name)
def test_published_tokens(path, tmp_path):
    """Tokens that the original tokenizers made, beside vocabularies that llama.cpp publishes."""
    if path is None:
        pytest.skip(f"{VARIABLE} has no file gguf/ggml-vocab-*.gguf.inp")
    try:
        _, tokenizer = real(path.with_suffix(""), tmp_path / "hf")
    except Refusal as refusal:
        pytest.skip(str(refusal))
    texts = path.read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".out").read_text("utf-8").split("\n")[: len(texts)]
    tokens = [[int(token) for token in line.split()] for line in lines]
    if "qwen35" in path.name:  # made without the NFC that transformers' own class has
        texts, tokens = zip(
            *[pair for pair in zip(texts, tokens, strict=True) if unicodedata.is_normalized("NFC", pair[0])],
            strict=True,
        )
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == list(tokens)


def marked(metadata, kind: int) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    return [tokens[i] for i in np.flatnonzero(metadata["tokenizer.ggml.token_type"] == kind)]


@pytest.mark.parametrize("name", NAMES)
def test_real_files(name, tmp_path):
    """The references are transformers' Qwen2Tokenizer, the parts of SmolLM's tokenizer.json, and for Gemma transformers' own
    reading of GGUF files, which differs in literal ▁▁ and in runs of more than 31 spaces."""
    path = gguf_file(name)
    metadata, tokenizer = real(path, tmp_path / "hf")
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    source = Path(__file__).read_text("utf-8")
    texts = [*TEXTS, *source.split("\n\n"), source[:2000]]
    if metadata["tokenizer.ggml.model"] == "gpt2":
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        rule = {"qwen2": "qwen2", "smollm": "smollm"}[metadata["tokenizer.ggml.pre"]]
        reference = ORIGINALS[rule](vocab, merges)
    else:
        reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        texts = [text for text in texts if "▁▁" not in text and " " * 32 not in text]
    reference.clean_up_tokenization_spaces = False
    reference.add_special_tokens({"additional_special_tokens": marked(metadata, CONTROL)})
    defined = [token for token in marked(metadata, USER_DEFINED) if token.strip(" ")]
    reference.add_tokens([AddedToken(token, normalized=False) for token in defined])
    assert differences(tokenizer, reference, texts) == []
    assert tokenizer.encode("x")[0] == (vocab["<bos>"] if "<bos>" in vocab else vocab["x"])
    assert tokenizer.get_vocab().keys() == {token if token.strip(" ") else "▁" * len(token) for token in vocab}


def test_digits_behind_spaces_need_the_rule_of_smollm(tmp_path):
    """What transformers' own reading of GGUF files lacks, and a text on which it shows."""
    _, tokenizer = real(gguf_file(SMOL), tmp_path / "hf")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("x =  3"))
    assert tokens == ["x", "Ġ=", "ĠĠ", "3"]
