"""Chooses the tokens of a draft vocabulary: the most frequent ones of a corpus, or those of a list."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from jspec._validation import is_int
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.text.detokenizer import Tokenizer, encode

DraftVocabulary = int | str | os.PathLike | Sequence[int]
LISTS = (".json", ".txt", ".npy")
_PIECE = 2**17  # characters of a corpus that are encoded at a time, up to the end of a line


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The tokens of a draft vocabulary.

    Attributes:
      tokens: their ids, int64 ``[Vd]``, ascending: draft token i is token ``tokens[i]`` of the target.
      vocab_size: V of the target.
      note: what the user ought to know about them.
    """

    tokens: np.ndarray
    vocab_size: int
    note: str


def choose(
    source: HuggingFaceModel,
    draft_vocabulary: DraftVocabulary,
    corpus: str | os.PathLike | None = None,
    target: Checkpoint | None = None,
) -> Chosen:
    """The tokens that ``source`` is to have logits for.

    Args:
      source: the open folder of the drafter.
      draft_vocabulary: how many tokens, which are then the most frequent of ``corpus``; or their ids, as a sequence or in
        a file: a list in JSON, numbers between blanks (``.txt``), or an array of numpy (``.npy``).
      corpus: a text file in UTF-8.
      target: the checkpoint of the target. Its tokenizer encodes the corpus if ``source`` has none.

    Raises:
      Refusal: the tokens are not in the vocabulary, repeated, too many or too few; or the corpus cannot be counted.
    """
    model = None if target is None else target.target_config
    V = source.config.dimensions["V"] or (0 if model is None else model.vocab_size)
    if not V:
        raise Refusal(
            f"{source.folder.given}: config.json has no vocab_size, so nothing says how many tokens there are; give target"
        )
    configs = [config for config in (source.config.decoder, model) if config is not None]
    stops = {token for config in configs for token in config.eos_token_ids if token < V}
    if is_int(draft_vocabulary):
        size: Any = draft_vocabulary
        return _most_frequent(source, size, V, corpus, target, stops)
    if corpus is not None:
        raise Refusal(
            f"corpus={str(corpus)!r}: counts tokens where draft_vocabulary is a number, and it is a list; leave one out"
        )
    what = "draft_vocabulary"
    if isinstance(draft_vocabulary, str | os.PathLike):
        what = f"draft_vocabulary={str(draft_vocabulary)!r}"
        draft_vocabulary = _read_list(Path(draft_vocabulary), what)
    tokens = _checked(draft_vocabulary, V, what)
    lacking = sorted(stops - set(tokens.tolist()))
    note = f"draft vocabulary of {len(tokens):,} of {V:,} tokens"
    if lacking:
        note += f", without {', '.join(map(str, lacking))}, at which texts stop: the target alone can end one"
    return Chosen(tokens, V, note)


def _most_frequent(source: HuggingFaceModel, size: int, V: int, corpus, target, stops: set[int]) -> Chosen:
    """The ``size`` most frequent tokens of ``corpus``; of equally frequent ones those of lower ids."""
    if corpus is None:
        raise Refusal(
            f"draft_vocabulary={size}: corpus is missing; give a text file whose most frequent tokens they are"
        )
    if not 1 <= size < V:
        raise Refusal(f"draft_vocabulary={size}: expected 1..{V - 1}, fewer than the {V} tokens of the vocabulary")
    tokenizer = _tokenizer(source, target)
    always = sorted(stops | {token for token in _special(tokenizer) if token < V})
    if size < len(always):
        raise Refusal(
            f"draft_vocabulary={size}: expected at least {len(always)}, as many as there are stop tokens and special "
            "tokens, which are always in it"
        )
    counts = _counts(Path(corpus), tokenizer, V)
    order = np.lexsort((np.arange(V), -counts))
    others = order[~np.isin(order, always)][: size - len(always)]
    tokens = np.sort(np.concatenate([np.array(always, np.int64), others]))
    share, seen = counts[tokens].sum() / counts.sum(), int((counts > 0).sum())
    note = f"draft vocabulary of {size:,} of {V:,} tokens, {share:.1%} of those of {corpus}"
    if counts[tokens].min() == 0 and seen < size:
        note += f"; it has only {seen:,} different ones, and the rest are those of the lowest ids"
    return Chosen(tokens, V, note)


def _tokenizer(source: HuggingFaceModel, target: Checkpoint | None) -> Tokenizer:
    tokenizer = load_tokenizer(source.folder)
    if tokenizer is None and target is not None:
        tokenizer = target.tokenizer
    if tokenizer is not None:
        return tokenizer
    lacking = "it has none" if target is None else f"neither it nor the target {target.folder.given} has one"
    raise Refusal(
        f"{source.folder.given}: the corpus needs a tokenizer, and {lacking}; give a target that has tokenizer.json"
    )


def _special(tokenizer: Tokenizer) -> set[int]:
    """The ids of special tokens: of those that the tokenizer has a use for, and of reserved ones."""
    known: Any = tokenizer
    added = getattr(known, "added_tokens_decoder", {})
    reserved = {token for token, content in added.items() if getattr(content, "special", False)}
    return reserved | set(getattr(known, "all_special_ids", ()))


def _counts(corpus: Path, tokenizer: Tokenizer, V: int) -> np.ndarray:
    """How often each token occurs in a text file, int64 ``[V]``."""
    counts, known = np.zeros(V, np.int64), cast(Any, tokenizer)
    known.model_max_length = sys.maxsize  # otherwise transformers warns that a model could not read so long a text
    for text in _pieces(corpus):
        try:
            tokens = np.array(encode(tokenizer, text, f"corpus={str(corpus)!r}", add_special_tokens=False), np.int64)
        except ValueError as error:
            raise Refusal(str(error)) from None
        counts += np.bincount(tokens[(tokens >= 0) & (tokens < V)], minlength=V)
    if not counts.any():
        raise Refusal(f"corpus={str(corpus)!r}: holds no text; give one like those that are to be drafted")
    return counts


def _pieces(corpus: Path) -> Iterator[str]:
    """The text of a file, some lines at a time."""
    if not corpus.is_file():
        raise Refusal(f"corpus={str(corpus)!r}: is no file; give a text file")
    try:
        with corpus.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(_PIECE):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise Refusal(f"corpus={str(corpus)!r}: expected a text file in UTF-8; {error}") from None


def _read_list(file: Path, what: str) -> Any:
    """The ids in a file, unchecked."""
    if file.suffix not in LISTS or not file.is_file():
        known = ", ".join(LISTS)
        raise Refusal(f"{what}: expected a number of tokens, or a file of their ids that ends in one of {known}")
    try:
        if file.suffix == ".npy":
            return np.load(file, allow_pickle=False)
        text = file.read_text("utf-8")
        return json.loads(text) if file.suffix == ".json" else [int(word) for word in text.split()]
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{what}: cannot be read as a list of token ids ({error})") from None


def _checked(tokens: Any, V: int, what: str) -> np.ndarray:
    """``tokens`` ascending, int64 ``[Vd]``."""
    listed: Any = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed or not all(map(is_int, listed)):
        raise Refusal(f"{what}: expected a list of token ids, integers in 0..{V - 1}")
    values: list[int] = list(listed)
    outside = [token for token in values if not 0 <= token < V]
    if outside:
        raise Refusal(f"{what}: holds token {outside[0]}: expected ids in 0..{V - 1}, those of the vocabulary")
    ids, times = np.unique(np.array(values, np.int64), return_counts=True)
    if times.max() > 1:
        raise Refusal(f"{what}: holds token {ids[times.argmax()]} {times.max()} times: expected each once")
    if len(ids) == V:
        raise Refusal(f"{what}: holds all {V} tokens of the vocabulary: expected fewer, or no draft vocabulary")
    return ids
