"""Tokenizers of real GGUF files make the tokens that the original ones make of the same texts.

Beside the vocabularies in llama.cpp's folder ``models`` (``ggml-vocab-*.gguf``) lie texts (``.inp``), and the tokens that
the original tokenizers made of them (``.out``). The source archive of llama-cpp-python has that folder, too."""

import re
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
from real_models import NAMES, SMOL, gguf_file
from tokenizers import AddedToken

from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import read_header

PUBLISHED = (
    *("command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3"),
    *("qwen2", "qwen35", "refact", "starcoder"),
)
REFUSED = {"bert-bge": "tokenizer.ggml.model='bert'", "falcon": "tokenizer.ggml.pre='falcon'"}


def real(path: Path, folder: Path):
    header = read_header(path)
    return header.metadata, load(path, folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tokens(name, tmp_path):
    path = gguf_file(f"ggml-vocab-{name}")
    _, tokenizer = real(path, tmp_path / "hf")
    texts = Path(f"{path}.inp").read_text("utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text("utf-8").split("\n")[: len(texts)]
    tokens = [[int(token) for token in line.split()] for line in lines]
    if name == "qwen35":  # made without the NFC that transformers' own class has
        texts, tokens = zip(
            *[pair for pair in zip(texts, tokens, strict=True) if unicodedata.is_normalized("NFC", pair[0])],
            strict=True,
        )
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts] == list(tokens)


@pytest.mark.parametrize("name", REFUSED)
def test_published_vocabularies_with_other_rules_are_refused(name, tmp_path):
    path = gguf_file(f"ggml-vocab-{name}")
    with pytest.raises(Refusal, match=re.escape(REFUSED[name])):
        real(path, tmp_path / "hf")


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
