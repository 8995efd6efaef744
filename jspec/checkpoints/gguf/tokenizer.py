"""Makes the tokenizer files of a Hugging Face checkpoint from the metadata of a GGUF file."""

import re
from typing import Any

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.gguf.header import Header
from jspec.checkpoints.gguf.pre_tokenizers import WORDS
from jspec.checkpoints.gguf.vocabulary import (
    BYTE,
    BYTES,
    CONTROL,
    GGUF,
    MODEL,
    NORMAL,
    PIECES,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    numbers,
    read_vocabulary,
    refuse_numbers,
    strings,
)

_PRE, _MERGES, _SCORES = "tokenizer.ggml.pre", "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_PIECES_AND_MERGES = "gemma4"
_PADDING = re.compile(r"\[PAD\d+\]")  # a token that a converter made up for a row of the embedding that has none
_SPACE = "▁"  # stands for a space in pieces
_MISTRAL_3 = "[AVAILABLE_TOOLS]"  # a token of Mistral's third vocabulary and later ones
_WITHOUT_STRIP = ("<unk>", "<s>", "<|endoftext|>")  # tokens of Phi-3 that leave the spaces behind them


def tokenizer_files(header: Header) -> dict[str, dict]:
    """What ``tokenizer.json`` and ``tokenizer_config.json`` of the original checkpoint say, as far as the file has it.

    transformers makes the same tokens of a text as with the original files. Two things differ that converters changed:
    tokens such as ``<|x|>`` are special, and each row of the embedding has a token.

    Args:
      header: that of the file.

    Returns:
      Name -> content; empty for a file without a tokenizer.

    Raises:
      Refusal: the tokenizer is of a kind that is not read, or is damaged; the message names the key and its value.

    Example::

        header = read_header("model.gguf")
        for name, content in tokenizer_files(header).items():
            Path("folder", name).write_text(json.dumps(content))
    """
    fields = Fields(header.metadata, header.where)
    vocabulary = read_vocabulary(fields)
    if vocabulary is None:
        return {}
    if vocabulary.model == BYTES:
        rules, begins = _of_bytes(fields, vocabulary)
    elif vocabulary.model in (PIECES, _PIECES_AND_MERGES):
        vocabulary = vocabulary._replace(tokens=_respelled(vocabulary))
        rules, begins = _of_pieces(fields, vocabulary), True
    else:
        raise fields.refuse(MODEL, f"{BYTES!r}, {PIECES!r} or {_PIECES_AND_MERGES!r}; give the original checkpoint")
    named = {name: vocabulary.tokens[i] for name, i in vocabulary.ids.items()}
    bos, eos = (
        {named[name]: vocabulary.ids[name]}
        if fields.flag(f"tokenizer.ggml.add_{name}_token", absent) and name in named
        else {}
        for name, absent in (("bos", begins), ("eos", False))
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        GGUF: True,
        "fix_mistral_regex": False,  # transformers would suspect the rule of every large vocabulary
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(bos),
        "add_eos_token": bool(eos),
        **{f"{name}_token": named[name] for name in ("bos", "eos", "unk", "pad") if name in named},
        **_chat_templates(fields),
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(fields, vocabulary),
        "post_processor": _template(bos, eos),
        **rules,
    }
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def _template(bos: dict[str, int], eos: dict[str, int]) -> dict[str, Any]:
    """What is written before and behind a text; transformers takes it from here, whatever tokenizer_config.json says."""
    first, last = ([{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens] for tokens in (bos, eos))
    single, pair = (
        [*first, *({"Sequence": {"id": part, "type_id": 0}} for part in parts), *last] for parts in ("A", "AB")
    )
    special = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in (bos | eos).items()}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _of_bytes(fields: Fields, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """The rules of a vocabulary of bytes, and whether texts begin with a token for that."""
    words = WORDS.get(fields.text(_PRE, ""))
    if words is None:
        raise fields.refuse(
            _PRE, f"one of {', '.join(sorted(WORDS))}, because the same text has other tokens by another rule"
        )
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    model = _bpe(ids, _stored_merges(fields, ids), ignore_merges=words.whole)
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {**words.json, "decoder": decoder, "model": model}, words.bos


def _of_pieces(fields: Fields, vocabulary: Vocabulary) -> dict[str, Any]:
    """The rules of a vocabulary of SentencePiece."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    stored = vocabulary.model == _PIECES_AND_MERGES or _MERGES in fields.raw
    merges = _stored_merges(fields, ids) if stored else _scored_merges(fields, vocabulary, ids)
    unknown = vocabulary.tokens[vocabulary.ids["unk"]] if "unk" in vocabulary.ids else None
    in_bytes = bool((vocabulary.types == BYTE).any())
    model = _bpe(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=in_bytes)
    begun = fields.flag("tokenizer.ggml.add_space_prefix", vocabulary.model == PIECES)
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if begun:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    rules = {"pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": decoders}, "model": model}
    if begun and _MISTRAL_3 in ids:  # not every part of a text gets a space before it, but the first alone
        metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "first", "split": False}
        return rules | {"normalizer": None, "pre_tokenizer": metaspace}
    normalizers = [{"type": "Prepend", "prepend": _SPACE}] if begun else []
    return rules | {"normalizer": {"type": "Sequence", "normalizers": [*normalizers, _replace(" ", _SPACE)]}}


def _replace(text: str, other: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": other}


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options) -> dict[str, Any]:
    unsaid = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    flags = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **unsaid, **flags, **options, "vocab": vocab, "merges": merges}


def _respelled(vocabulary: Vocabulary) -> list[str]:
    """The tokens as pieces are spelt. Converters write runs of spaces, which users of SentencePiece define, as spaces."""
    tokens, taken = list(vocabulary.tokens), set(vocabulary.tokens)
    for i in np.flatnonzero(vocabulary.types == USER_DEFINED).tolist():
        spelt = tokens[i].replace(" ", _SPACE)
        if not tokens[i].strip(" ") and spelt not in taken:
            tokens[i] = spelt
    return tokens


def _stored_merges(fields: Fields, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that become one, the first in rank first."""
    merges = []
    for merge in strings(fields, _MERGES):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            raise fields.refuse(_MERGES, f"two tokens that are one together; {merge!r} is no such pair")
        merges.append((left, right))
    return merges


def _scored_merges(fields: Fields, vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The same, of scores: of the pairs in a text, SentencePiece merges the one whose token has the highest score.

    Converters give the tokens that users define the lowest score, but SentencePiece takes them as they are, so they come
    first. Among equals the longest left part is first, as in tokenizer.json files."""
    scores = numbers(fields, _SCORES, "fiu", "numbers").astype(np.float64)
    if np.isnan(scores).any() or len(np.unique(scores[vocabulary.types == NORMAL])) == 1:
        raise refuse_numbers(fields, _SCORES, "numbers that say which pieces are merged first")
    order = np.where(vocabulary.types == USER_DEFINED, 0, -scores).tolist()
    merges = []
    for i in np.flatnonzero(np.isin(vocabulary.types, (NORMAL, USER_DEFINED))).tolist():
        token, rank = vocabulary.tokens[i], order[i]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((rank, -cut, cut - len(token), i, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _added_tokens(fields: Fields, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is cut into words."""
    strips = vocabulary.model == PIECES and fields.text("general.architecture", "") == "phi3"
    kinds = np.isin(vocabulary.types, (UNKNOWN, CONTROL, USER_DEFINED))
    return [
        {
            "id": i,
            "content": (token := vocabulary.tokens[i]),
            "single_word": False,
            "lstrip": False,
            "rstrip": strips and token not in _WITHOUT_STRIP,
            "normalized": False,
            "special": bool(vocabulary.types[i] != USER_DEFINED),
        }
        for i in np.flatnonzero(kinds).tolist()
        if not _PADDING.fullmatch(vocabulary.tokens[i])
    ]


def _chat_templates(fields: Fields) -> dict[str, Any]:
    template = fields.text(_TEMPLATE, None)
    named = {} if template is None else {"default": template}
    if _TEMPLATES in fields.raw:
        named |= {name: fields.text(f"{_TEMPLATE}.{name}") for name in strings(fields, _TEMPLATES)}
        return {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}
    return {} if template is None else {"chat_template": template}
