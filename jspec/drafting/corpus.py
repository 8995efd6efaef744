"""Prompt lookup over a corpus of texts that the user gives.

Where a text's newest tokens do not occur earlier in the text itself, the drafts are the tokens that followed them in the
corpus. The lookup runs on the device and needs no model.
"""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec._validation import is_int, require
from jspec.config import ModelConfig
from jspec.drafting.base import Context, Setup
from jspec.drafting.ngram import NGram, copied
from jspec.text.detokenizer import Tokenizer, encode

MAX_CORPUS_TOKENS = 2**22
LONGEST_MATCH = 2**31 // MAX_CORPUS_TOKENS - 1  # because (length, place) of a match is packed into one int32
END = -1  # stands after each text of a corpus. It equals no token, so no match and no continuation crosses it.

Corpus = str | os.PathLike | Sequence[str] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class NGramCorpus(NGram):
    """``NGram`` over the request's own text and, if that finds nothing, over a corpus.

    The longest suffix of ngram_min..ngram_max tokens that occurs in the corpus is continued by the tokens after that
    occurrence, up to the end of that text of the corpus. If it occurs several times, the first occurrence counts. For a
    corpus of C tokens, a round makes B x C x ngram_max comparisons in a workspace of up to 4 B C bytes.

    Attributes:
      corpus: int32 ``[C]``, the texts one after another, with ``END`` after each.
    """

    corpus: jax.Array

    @classmethod
    def build(cls, setup: Setup):
        shortest, longest = setup.speculation.ngram_lengths
        require(longest <= LONGEST_MATCH, "ngram_max", longest, f"at most {LONGEST_MATCH} with a corpus")
        return cls(setup.speculation.most_draft_tokens, shortest, longest, setup.draft)

    def propose(self, state, context: Context):
        repeated, many = self.continuation(context)
        newest, C, K = context.length[:, None] - 1, self.corpus.shape[0], self.num_draft_tokens
        # Entry [b, c] of the arrays [B, C] is about an occurrence of row b's suffix whose last token is corpus[c].
        followed = jnp.pad(self.corpus, (0, 1), constant_values=END)[1:] != END
        unbroken = jnp.broadcast_to(followed[None], (newest.shape[0], C))  # all tokens compared so far agree
        matched = jnp.zeros(unbroken.shape, jnp.int32)  # how many tokens agree
        for back in range(self.ngram_max):
            suffix = jnp.where(newest >= back, context.tokens_at(newest - back), END - 1)  # [B, 1]
            shifted = jnp.pad(self.corpus, (back, 0), constant_values=END)[:C]  # the token ``back`` places before
            unbroken &= shifted[None] == suffix
            matched += unbroken
        # One reduction finds the longest match and, among equally long ones, the first.
        places = jnp.arange(C, dtype=jnp.int32)[None]
        best = jnp.max(matched * MAX_CORPUS_TOKENS + (C - 1 - places), axis=1, keepdims=True)  # [B, 1]
        longest, end = best // MAX_CORPUS_TOKENS, C - 1 - best % MAX_CORPUS_TOKENS
        source = end + 1 + jnp.arange(K, dtype=jnp.int32)[None]  # [B, K]
        drafts = jnp.where(source < C, self.corpus[jnp.minimum(source, C - 1)], END)
        before_end = jnp.sum(jnp.cumprod(drafts != END, axis=1), axis=1, dtype=jnp.int32)  # [B]
        count = jnp.where(longest[:, 0] >= self.ngram_min, jnp.minimum(before_end, context.room), 0)
        tokens = jnp.where(many[:, None] > 0, repeated, jnp.maximum(drafts, 0))
        return state, copied(tokens, jnp.where(many > 0, many, count), context)


def prepare(corpus: Corpus, tokenizer: Tokenizer | None, target: ModelConfig) -> jax.Array:
    """The array ``NGramCorpus.corpus``, int32 ``[C]``, of the user's corpus.

    Args:
      corpus: the path of a text file in UTF-8, a list of texts, or a list of lists of token ids.
      tokenizer: the target's tokenizer. It may be None if ``corpus`` holds token ids.
      target: config of the target, whose vocabulary the tokens have to be in.

    Raises:
      ValueError: the file does not exist, texts were given without a tokenizer, a token is outside of the vocabulary, or
        there are no tokens or more than ``MAX_CORPUS_TOKENS``.
    """
    arrays, size = [], 0
    for i, text in enumerate(_texts(corpus)):
        tokens = np.asarray(_encode(i, text, tokenizer))
        flat = tokens.ndim == 1 and (not tokens.size or np.issubdtype(tokens.dtype, np.integer))
        require(flat, f"ngram_corpus[{i}]", type(text).__name__, "a text or a flat list of token ids")
        for token in tokens[(tokens < 0) | (tokens >= target.vocab_size)][:1]:
            expected = f"token ids in 0..{target.vocab_size - 1}, the target's vocabulary"
            require(False, f"ngram_corpus[{i}]", int(token), expected)
        size += tokens.size + 1
        require(size <= MAX_CORPUS_TOKENS, "ngram_corpus", f"over {size:,} tokens", f"at most {MAX_CORPUS_TOKENS:,}")
        arrays += [tokens.astype(np.int32), np.array([END], np.int32)]
    if size == len(arrays) // 2:
        raise ValueError("ngram_corpus holds no tokens: expected a text file, or a list of texts or of token ids")
    return jnp.asarray(np.concatenate(arrays))


def _texts(corpus: Corpus) -> Iterable[str | Sequence[int]]:
    if isinstance(corpus, str | os.PathLike):
        file = pathlib.Path(corpus)
        expected = "the path of a text file, or a list of texts or of token ids"
        require(file.is_file(), "ngram_corpus", str(corpus)[:80], expected)
        try:
            return [file.read_text("utf-8")]
        except UnicodeDecodeError as error:
            raise ValueError(f"ngram_corpus={str(corpus)!r}: expected a text file in UTF-8; {error}") from None
    if len(corpus) and is_int(corpus[0]):
        raise ValueError("ngram_corpus is a flat list of token ids: expected a list of such lists, one a text")
    return corpus


def _encode(index: int, text: str | Sequence[int], tokenizer: Tokenizer | None) -> Sequence[int]:
    if not isinstance(text, str):
        return text
    if tokenizer is None:
        raise ValueError(f"ngram_corpus[{index}] is text, but the checkpoint has no tokenizer; give token ids")
    return encode(tokenizer, text, f"ngram_corpus[{index}]")
