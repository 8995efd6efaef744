"""Reads and checks the tokens of a GGUF file: their texts, types and special ids."""

from typing import NamedTuple

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal

GGUF = "gguf"  # key of tokenizer_config.json that says that the tokenizer was made of a GGUF file

MODEL, TOKENS, BYTES, PIECES = "tokenizer.ggml.model", "tokenizer.ggml.tokens", "gpt2", "llama"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # types of tokens; 5 is an unused one
_TYPES, NONE = "tokenizer.ggml.token_type", ("none", "no_vocab")  # models of files without a tokenizer
_IDS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_LLAMA_IDS = {"bos": 1, "eos": 2, "unk": 0}  # of pieces, where the file does not say
_MAX_TOKEN = 1024  # characters; the longest in use have 512


class Vocabulary(NamedTuple):
    """The tokens of a GGUF file.

    Attributes:
      model: what they are made of, as ``tokenizer.ggml.model`` has it.
      tokens: the text of each.
      types: the type of each, int32.
      ids: ``bos``, ``eos``, ``eot``, ``eom``, ``unk`` and ``pad`` -> token, as far as the file has them.
    """

    model: str
    tokens: list[str]
    types: np.ndarray
    ids: dict[str, int]


def read_vocabulary(fields: Fields) -> Vocabulary | None:
    """The tokens; None if the file has none.

    Raises:
      Refusal: a list is missing, has another length or a token twice, or a token id is out of range.
    """
    model = fields.text(MODEL, NONE[0])
    if model in NONE:
        return None
    tokens, types = strings(fields, TOKENS), numbers(fields, _TYPES, "iu", "integers in 0..6")
    if types.min() < 0 or types.max() > BYTE:
        raise refuse_numbers(fields, _TYPES, "integers in 0..6")
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise fields.refuse(TOKENS, f"tokens of at most {_MAX_TOKEN} characters")
    if len(set(tokens)) < len(tokens):
        seen: dict[str, int] = {}
        twice = next(i for i, token in enumerate(tokens) if seen.setdefault(token, i) != i)
        raise fields.refuse(TOKENS, f"no token twice; {tokens[twice]!r} is {seen[tokens[twice]]} and {twice}")
    defaults = _LLAMA_IDS if model == PIECES else {}
    ids = {
        name: fields.integer(f"tokenizer.ggml.{key}_token_id", defaults.get(name), 0, len(tokens) - 1)
        for name, key in _IDS.items()
    }
    return Vocabulary(model, tokens, types, {name: i for name, i in ids.items() if i is not None})


def strings(fields: Fields, key: str) -> list[str]:
    """The list of strings under ``key``, which is not empty."""
    value = fields.raw.get(key)
    if not isinstance(value, list) or not value:
        raise fields.refuse(key, "a list of strings")
    return value


def numbers(fields: Fields, key: str, kinds: str, what: str) -> np.ndarray:
    """The numbers under ``key``, one for each token; ``kinds`` of NumPy."""
    value, count = fields.raw.get(key), len(fields.raw[TOKENS])
    if not isinstance(value, np.ndarray):
        raise fields.refuse(key, f"{count} {what}, one for each token")
    if value.dtype.kind not in kinds or len(value) != count:
        raise refuse_numbers(fields, key, f"{count} {what}, one for each token")
    return value


def refuse_numbers(fields: Fields, key: str, expected: str) -> Refusal:
    """The exception for an array that is not what is ``expected``; the caller raises it."""
    value = fields.raw[key]
    return Refusal(f"{fields.where}: {key} has {len(value)} numbers of {value.dtype}: expected {expected}")
