"""Prompt lookup over the user's own texts: propose what followed the text's ending there, where the text itself has no
earlier occurrence of it. On device, no model."""

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec._arguments import is_int, require
from jspec.config import ModelConfig
from jspec.drafting.base import Context, Setup
from jspec.drafting.ngram import NGram
from jspec.sampling.verify import Proposal
from jspec.text import Tokenizer

MAX_CORPUS_TOKENS = 2**22
LONGEST_MATCH = 2**31 // MAX_CORPUS_TOKENS - 1  # (length, place) of a match is one int32
END = -1  # stands after each text of a corpus: no token, so that no match and no continuation crosses it

Corpus = str | os.PathLike | Sequence[str] | Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class NGramCorpus(NGram):
    """Drafts like ``NGram`` from the request's own text, and else from a corpus.

    The longest suffix of ngram_min..ngram_max tokens that occurs in the corpus is continued by the tokens after that
    occurrence, up to the end of the text there; of several, the first in the corpus. A round compares B x C x ngram_max
    numbers for a corpus of C tokens, with a workspace of up to 4 B C bytes.

    Attributes:
      corpus: int32 ``[C]``, texts one after another, ``END`` after each.
    """

    corpus: jax.Array

    @classmethod
    def build(cls, setup: Setup):
        how = setup.speculation
        require(how.ngram_max <= LONGEST_MATCH, "ngram_max", how.ngram_max, f"at most {LONGEST_MATCH} with a corpus")
        return cls(how.most_draft_tokens, how.ngram_min, how.ngram_max, setup.draft)

    def propose(self, state, context: Context):
        state, own = super().propose(state, context)
        newest, C, K = context.length[:, None] - 1, self.corpus.shape[0], self.num_draft_tokens
        followed = jnp.pad(self.corpus, (0, 1), constant_values=END)[1:] != END
        unbroken = jnp.broadcast_to(followed[None], (newest.shape[0], C))  # [B, C]: the occurrence ends here
        matched = jnp.zeros(unbroken.shape, jnp.int32)
        for back in range(self.ngram_max):
            suffix = jnp.where(newest >= back, context.tokens_at(newest - back), END - 1)  # [B, 1]
            shifted = jnp.pad(self.corpus, (back, 0), constant_values=END)[:C]  # the token ``back`` places before
            unbroken &= shifted[None] == suffix
            matched += unbroken
        # The longest match, of several the first, by one reduction.
        places = jnp.arange(C, dtype=jnp.int32)[None]
        best = jnp.max(matched * MAX_CORPUS_TOKENS + (C - 1 - places), axis=1, keepdims=True)  # [B, 1]
        longest, end = best // MAX_CORPUS_TOKENS, C - 1 - best % MAX_CORPUS_TOKENS
        source = end + 1 + jnp.arange(K, dtype=jnp.int32)[None]  # [B, K]
        drafts = jnp.where(source < C, self.corpus[jnp.minimum(source, C - 1)], END)
        inside = jnp.sum(jnp.cumprod(drafts != END, axis=1), axis=1, dtype=jnp.int32)
        found = jnp.where(longest[:, 0] >= self.ngram_min, jnp.minimum(inside, context.room), 0)
        count = jnp.where(own.count > 0, own.count, found)
        tokens = jnp.where(own.count[:, None] > 0, own.tokens, jnp.maximum(drafts, 0))
        return state, Proposal(tokens, count, distribution=None, point_mass=own.point_mass)


def prepare(corpus: Corpus, tokenizer: Tokenizer | None, target: ModelConfig) -> jax.Array:
    """The ``corpus`` of ``NGramCorpus``, int32 ``[C]``.

    Args:
      corpus: the path of a text file in UTF-8, a list of texts, or a list of lists of token ids.
      tokenizer: the target's; texts need one.
      target: whose vocabulary the tokens are of.

    Raises:
      ValueError: a file that is not there, texts without a tokenizer, a token outside the vocabulary, no tokens at all, or
        more than ``MAX_CORPUS_TOKENS``.
    """
    pieces, size = [], 0
    for i, text in enumerate(_texts(corpus)):
        tokens = np.asarray(_encode(i, text, tokenizer))
        flat = tokens.ndim == 1 and (not tokens.size or np.issubdtype(tokens.dtype, np.integer))
        require(flat, f"ngram_corpus[{i}]", type(text).__name__, "a text or a flat list of token ids")
        for token in tokens[(tokens < 0) | (tokens >= target.vocab_size)][:1]:
            expected = f"token ids in 0..{target.vocab_size - 1}, the target's vocabulary"
            require(False, f"ngram_corpus[{i}]", int(token), expected)
        size += tokens.size + 1
        require(size <= MAX_CORPUS_TOKENS, "ngram_corpus", f"over {size:,} tokens", f"at most {MAX_CORPUS_TOKENS:,}")
        pieces += [tokens.astype(np.int32), np.array([END], np.int32)]
    if size == len(pieces) // 2:
        raise ValueError("ngram_corpus holds no tokens: expected a text file, or a list of texts or of token ids")
    return jnp.asarray(np.concatenate(pieces))


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
    return tokenizer.encode(text)
