"""Makes the tokenizer files of a Hugging Face checkpoint from the metadata of a GGUF file."""

import re
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.gguf.header import Header
from jspec.checkpoints.gguf.pre_tokenizers import WORDS

_MODEL, _PRE, _SCORES = "tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.scores"
_TOKENS, _TYPES, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"
_TEMPLATE, _TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
_NONE = ("none", "no_vocab")
_BYTES, _PIECES, _PIECES_AND_MERGES = "gpt2", "llama", "gemma4"  # what the tokens of a vocabulary are made of
_NORMAL, _UNKNOWN, CONTROL, USER_DEFINED, _BYTE = 1, 2, 3, 4, 6  # types of tokens; 5 is an unused one
_IDS = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
_LLAMA_IDS = {"bos": 1, "eos": 2, "unk": 0}  # of pieces, where the file does not say
_PADDING = re.compile(r"\[PAD\d+\]")  # a token that a converter made up for a row of the embedding that has none
_MAX_TOKEN = 1024  # characters; the longest in use have 512
_SPACE = "▁"  # stands for a space in pieces
_MISTRAL_3 = "[AVAILABLE_TOOLS]"  # a token of Mistral's third vocabulary and later ones
_WITHOUT_STRIP = ("<unk>", "<s>", "<|endoftext|>")  # tokens of Phi-3 that leave the spaces behind them


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
    model = fields.text(_MODEL, _NONE[0])
    if model in _NONE:
        return None
    tokens, types = _strings(fields, _TOKENS), _numbers(fields, _TYPES, "iu", "integers in 0..6")
    if types.min() < 0 or types.max() > _BYTE:
        raise fields.refuse(_TYPES, "integers in 0..6")
    if max(map(len, tokens)) > _MAX_TOKEN:
        raise fields.refuse(_TOKENS, f"tokens of at most {_MAX_TOKEN} characters")
    if len(set(tokens)) < len(tokens):
        seen: dict[str, int] = {}
        twice = next(i for i, token in enumerate(tokens) if seen.setdefault(token, i) != i)
        raise fields.refuse(_TOKENS, f"no token twice; {tokens[twice]!r} is {seen[tokens[twice]]} and {twice}")
    defaults = _LLAMA_IDS if model == _PIECES else {}
    ids = {
        name: fields.integer(f"tokenizer.ggml.{key}_token_id", defaults.get(name), 0, len(tokens) - 1)
        for name, key in _IDS.items()
    }
    return Vocabulary(model, tokens, types, {name: i for name, i in ids.items() if i is not None})


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
    if vocabulary.model == _BYTES:
        rules, begins = _of_bytes(fields, vocabulary)
    elif vocabulary.model in (_PIECES, _PIECES_AND_MERGES):
        vocabulary = vocabulary._replace(tokens=_respelled(vocabulary))
        rules, begins = _of_pieces(fields, vocabulary), True
    else:
        raise fields.refuse(_MODEL, f"{_BYTES!r}, {_PIECES!r} or {_PIECES_AND_MERGES!r}; give the original checkpoint")
    named = {name: vocabulary.tokens[i] for name, i in vocabulary.ids.items()}
    bos = {named["bos"]: vocabulary.ids["bos"]} if _adds(fields, "bos", begins) and "bos" in named else {}
    eos = {named["eos"]: vocabulary.ids["eos"]} if _adds(fields, "eos", False) and "eos" in named else {}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
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


def _adds(fields: Fields, name: str, absent: bool) -> bool:
    return fields.flag(f"tokenizer.ggml.add_{name}_token", absent)


def _template(bos: dict[str, int], eos: dict[str, int]) -> dict[str, Any]:
    """What is written before and behind a text; transformers takes it from here, whatever tokenizer_config.json says."""

    def parts(sequence: str, kind: int) -> list[dict[str, Any]]:
        first, last = ([{"SpecialToken": {"id": token, "type_id": kind}} for token in tokens] for tokens in (bos, eos))
        return [*first, {"Sequence": {"id": sequence, "type_id": kind}}, *last]

    special = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in (bos | eos).items()}
    single = parts("A", 0)
    return {"type": "TemplateProcessing", "single": single, "pair": single + parts("B", 1), "special_tokens": special}


def _of_bytes(fields: Fields, vocabulary: Vocabulary) -> tuple[dict[str, Any], bool]:
    """The rules of a vocabulary of bytes, and whether texts begin with a token for that."""
    words = WORDS.get(fields.text(_PRE, ""))
    if words is None:
        raise fields.refuse(
            _PRE, f"one of {', '.join(sorted(WORDS))}, because the same text has other tokens by another rule"
        )
    ranks = {token: i for i, token in enumerate(vocabulary.tokens)}
    model = _bpe(ranks, _stored_merges(fields, ranks), ignore_merges=words.whole)
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {**words.json, "decoder": decoder, "model": model}, words.bos


def _of_pieces(fields: Fields, vocabulary: Vocabulary) -> dict[str, Any]:
    """The rules of a vocabulary of SentencePiece."""
    ranks = {token: i for i, token in enumerate(vocabulary.tokens)}
    stored = vocabulary.model == _PIECES_AND_MERGES or _MERGES in fields.raw
    merges = _stored_merges(fields, ranks) if stored else _scored_merges(fields, vocabulary, ranks)
    unknown = vocabulary.tokens[vocabulary.ids["unk"]] if "unk" in vocabulary.ids else None
    in_bytes = bool((vocabulary.types == _BYTE).any())
    model = _bpe(ranks, merges, unk_token=unknown, fuse_unk=True, byte_fallback=in_bytes)
    begun = fields.flag("tokenizer.ggml.add_space_prefix", vocabulary.model == _PIECES)
    decoders = [_replace(_SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if begun:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    rules = {"pre_tokenizer": None, "decoder": {"type": "Sequence", "decoders": decoders}, "model": model}
    if begun and _MISTRAL_3 in ranks:  # not every part of a text gets a space before it, but the first alone
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


def _stored_merges(fields: Fields, ranks: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that become one, the first in rank first."""
    merges = []
    for merge in _strings(fields, _MERGES):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or left not in ranks or right not in ranks or left + right not in ranks:
            raise fields.refuse(_MERGES, f"two tokens that are one together; {merge!r} is no such pair")
        merges.append((left, right))
    return merges


def _scored_merges(fields: Fields, vocabulary: Vocabulary, ranks: dict[str, int]) -> list[tuple[str, str]]:
    """The same, of scores: of the pairs in a text, SentencePiece merges the one whose token has the highest score.

    Converters give the tokens that users define the lowest score, but SentencePiece takes them as they are, so they come
    first. Among equals the longest left part is first, as in tokenizer.json files."""
    scores = _numbers(fields, _SCORES, "f", "numbers")
    of_pieces = scores[vocabulary.types == _NORMAL]
    if np.isnan(scores).any() or len(of_pieces) == 0 or (of_pieces.min() == of_pieces.max() and len(of_pieces) > 1):
        raise fields.refuse(_SCORES, "numbers that say which pieces are merged first")
    order = np.where(vocabulary.types == USER_DEFINED, 0, -scores).tolist()
    merges = []
    for i in np.flatnonzero(np.isin(vocabulary.types, (_NORMAL, USER_DEFINED))).tolist():
        token, rank = vocabulary.tokens[i], order[i]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, -cut, cut - len(token), i, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _added_tokens(fields: Fields, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is cut into words."""
    strips = vocabulary.model == _PIECES and fields.raw.get("general.architecture") == "phi3"
    kinds = np.isin(vocabulary.types, (_UNKNOWN, CONTROL, USER_DEFINED))
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
        named |= {name: fields.text(f"{_TEMPLATE}.{name}") for name in _strings(fields, _TEMPLATES)}
        return {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}
    return {} if template is None else {"chat_template": template}


def _strings(fields: Fields, key: str) -> list[str]:
    """The list of strings under ``key``, which is not empty."""
    value = fields.raw.get(key)
    if not isinstance(value, list) or not value:
        raise fields.refuse(key, "a list of strings")
    return value


def _numbers(fields: Fields, key: str, kinds: str, what: str) -> np.ndarray:
    """The numbers under ``key``, one for each token; ``kinds`` of NumPy."""
    value, count = fields.raw.get(key), len(fields.raw[_TOKENS])
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != count:
        had = f", and has {len(value)}" if isinstance(value, np.ndarray) else ""
        raise fields.refuse(key, f"{count} {what}, one for each token{had}")
    return value
