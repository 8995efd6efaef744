"""Tiny tokenizers of the families that checkpoints have, which decode in different ways."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ("the", "cat", "sat", "x", "un", "happy", "déjà", ".", ",", "(", "n't", "日本")


class Family(NamedTuple):
    """A tokenizer, and its ids that print nothing; what jspec uses of one of transformers."""

    tokenizer: Tokenizer
    special: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size()


def byte_level() -> Family:
    """GPT-2, Llama 3, Qwen: tokens are bytes, so a character may be spread over tokens."""
    vocab = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the", "Ġt", "Ġthe", "ca", "cat"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "t"), ("Ġt", "he"), ("c", "a"), ("ca", "t")]
    vocab.append("he")
    merges.insert(2, ("h", "e"))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _with_special(tokenizer, ["<s>", "</s>"])


def sentencepiece() -> Family:
    """Llama 2, Mistral: words begin with ▁, decoding drops the first space, and unknown characters are byte tokens."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted({letter for word in WORDS for letter in word if letter.isascii()})
    vocab = ["<unk>", "<s>", "</s>", *bytes_, "▁", *letters, "▁the", "▁t", "he", "▁x", "at", "▁c", "▁cat"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "x"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(vocab)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    family = _with_special(tokenizer, ["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return family


def metaspace() -> Family:
    """T5, newer conversions of Llama 2: as ``sentencepiece``, in one decoder and without bytes."""
    letters = sorted({letter for word in WORDS for letter in word})
    vocab = ["<unk>", "<s>", "</s>", "▁", *letters, "▁the", "▁cat", "▁x"]
    tokenizer = Tokenizer(models.Unigram([(token, -float(len(vocab) - i)) for i, token in enumerate(vocab)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _with_special(tokenizer, ["<unk>", "<s>", "</s>"])


def wordpiece() -> Family:
    """BERT: a space before every word but the first, and none before punctuation."""
    letters = sorted({letter for word in WORDS for letter in word})
    vocab = ["[UNK]", "[CLS]", "[SEP]", *letters, *(f"##{letter}" for letter in letters), *(w for w in WORDS if w[1:])]
    tokenizer = Tokenizer(models.WordPiece(vocab={token: i for i, token in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return _with_special(tokenizer, ["[UNK]", "[CLS]", "[SEP]"])


def _with_special(tokenizer: Tokenizer, names: list[str]) -> Family:
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return Family(tokenizer, tuple(tokenizer.token_to_id(name) for name in names))


FAMILIES: dict[str, Callable[[], Family]] = {
    make.__name__: functools.cache(make) for make in (byte_level, sentencepiece, metaspace, wordpiece)
}
