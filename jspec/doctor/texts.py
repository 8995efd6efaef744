"""How well an original, and what rounding or conversion has made of it, predict a user's own texts."""

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jspec._validation import require
from jspec.config import EngineConfig, ModelConfig
from jspec.doctor.figures import divergence, log_softmax
from jspec.doctor.under_test import logits
from jspec.loading.kv_cache_dtype import kv_rounding, with_kv_cache_dtype
from jspec.loading.options import Path
from jspec.loading.pair import open_checkpoints
from jspec.models import build
from jspec.text.detokenizer import encode
from jspec.text.files import PARAGRAPHS, read_texts
from jspec.text.prompts import checked_ids

MOST_TOKENS, LONGEST_WINDOW = 4096, 512  # logits of the whole vocabulary are kept for each token
MOST_CHARACTERS = 64 * MOST_TOKENS  # of a text, which bounds what is encoded


@dataclasses.dataclass(frozen=True)
class TextFigures:
    """How well an original and another model predict the same texts.

    Attributes:
      other: what the other is called in sentences.
      windows, tokens: how many windows were read, and how many of their tokens predicted: all but the first of each.
      perplexities: exp of the mean negative log-probability of a token, of the original and of the other.
      mean_kl: mean of KL(original || other) in nats.
      changed: for how many of the tokens the other has another likeliest one.

    Example::

        from jspec.doctor import compare_with_reference

        figures = compare_with_reference("path/to/int8", "path/to/hf", texts="path/to/texts.txt").on_texts
        print(figures.mean_kl, figures.sentences)
    """

    other: str
    windows: int
    tokens: int
    perplexities: tuple[float, float]
    mean_kl: float
    changed: int

    @property
    def sentences(self) -> tuple[str, ...]:
        """What was read, and each figure with what it means."""
        (whole, ours), other, tokens = self.perplexities, self.other, self.tokens
        return (
            f"texts: {tokens:,} tokens are predicted, in {self.windows} windows of at most {LONGEST_WINDOW}; of a "
            f"longer file the first {MOST_TOKENS:,} are read",
            f"perplexity {whole:.2f} of the original, {ours:.2f} with {other} ({ours / whole - 1:+.1%}): a next token is as "
            "uncertain as among so many equally likely ones",
            f"KL(original || {other}) {self.mean_kl:.1e} nats a token: a token that the original draws is "
            f"{-math.expm1(-self.mean_kl):.2%} less likely with {other}, in the geometric mean",
            f"likeliest next token: {self.changed:,} of {tokens:,} have another one with {other}, "
            f"{100 * self.changed / tokens:.1f} of 100: there a greedy text goes on in another way",
        )


def windows_of(file: Path, tokenizer: Any, config: ModelConfig, where: Any) -> list[np.ndarray]:
    """The texts of a file (parted by blank lines, or .jsonl with ``text`` or ``prompt``) as tokens, ``[length]`` each.

    They are cut at ``MOST_TOKENS`` in all. A text longer than ``LONGEST_WINDOW`` goes on in the next window, behind the
    token that begins texts if the tokenizer puts one there.

    Raises:
      ValueError: the file cannot be used, ``where`` has no tokenizer, or the texts have fewer than two tokens.
    """
    texts = read_texts("texts", pathlib.Path(file), ("text", "prompt"), PARAGRAPHS)
    require(
        tokenizer is not None, "texts", str(file), f"a tokenizer in {where}, which has none: add its tokenizer.json"
    )
    windows, left = [], MOST_TOKENS
    for text in texts:
        ids = checked_ids(encode(tokenizer, text[:MOST_CHARACTERS], "a text"), config.vocab_size, "a text")
        first = ids[:1] if ids[:1] == [getattr(tokenizer, "bos_token_id", None)] else []
        step = min(LONGEST_WINDOW, config.max_position) - len(first)
        for begin in range(len(first), len(ids), step):
            window = [*first, *ids[begin : begin + step]][:left]
            if len(window) >= 2:
                windows.append(np.array(window))
                left -= len(window)
        if left < 2:
            break
    require(bool(windows), "texts", str(file), "a text of at least two tokens, of which the second is predicted")
    return windows


def figures_of(
    windows: Sequence[np.ndarray], originals: Iterable[np.ndarray], others: Iterable[np.ndarray], other: str
) -> TextFigures:
    """The figures of two models from the logits ``[length, V]`` that each gives in each window."""
    rows = []
    for tokens, *pairs in zip(windows, originals, others, strict=True):
        for token, *pair in zip(tokens[1:], *pairs, strict=False):  # the last logits are of no token
            p, q = map(log_softmax, pair)
            rows.append((p[token], q[token], divergence(p, q), p.argmax() != q.argmax()))
    *likely, kl, changed = np.array(rows, np.float64).T
    whole, ours = (float(np.exp(-one.mean())) for one in likely)
    return TextFigures(other, len(windows), len(rows), (whole, ours), float(kl.mean()), int(changed.sum()))


def rounded_cache_on_texts(
    target: Path, texts: Path, kv_cache_dtype: str = "auto", dtype: str | None = None, download: bool | None = None
) -> TextFigures | None:
    """What rounding its cache costs a target on a user's texts, None if nothing is rounded; the arguments are those of
    ``diagnose`` and ``compare_with_reference``."""
    checkpoint, _ = open_checkpoints(target, None, download=download)
    config, dtype = checkpoint.target_config, dtype or ("bfloat16" if jax.default_backend() == "gpu" else "float32")
    engine = with_kv_cache_dtype(EngineConfig(dtype=dtype, kv_cache_dtype=kv_cache_dtype), checkpoint)
    rounding = kv_rounding(engine, checkpoint)
    if rounding is None:
        return None
    windows = windows_of(texts, checkpoint.tokenizer, config, checkpoint.folder.given)
    model = build(config.for_length(LONGEST_WINDOW), checkpoint.language_model(dtype)[1], dtype)
    originals = logits(model, windows)
    model.kv_rounding = rounding
    return figures_of(windows, originals, logits(model, windows), f"a cache in {engine.kv_cache_dtype}")
