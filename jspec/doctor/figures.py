"""The figures of a comparison: how far apart logits, hidden states and greedy texts are, and what counts as equal."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class TextDifference:
    """Where two greedy completions first differ.

    Attributes:
      index: how many tokens of the completions are the same.
      expected, ours: the reference's next token and the engine's; None where a text has ended.
      margin: by how much the reference's logit of ``expected`` is above its logit of ``ours``; None where a text has ended.
      own_margin: the same difference of the logits of the model under test, in one pass over the text.
    """

    index: int
    expected: int | None
    ours: int | None
    margin: float | None
    own_margin: float | None


@dataclasses.dataclass(frozen=True)
class Texts:
    """A prompt with the reference's greedy completion, read by both.

    Attributes:
      prompt_length, length: tokens of the prompt, and of the completion.
      max_absolute, max_relative: the largest difference of two logits, and the largest in relation to the largest logit of
        its position.
      at: the position of the former.
      mean_kl, max_kl: KL(reference || ours) in nats, over positions.
      top1_differs: the positions at which the likeliest token differs.
      difference: where the engine's own greedy text first differs; None if it is the same.
    """

    prompt_length: int
    length: int
    max_absolute: float
    max_relative: float
    at: int
    mean_kl: float
    max_kl: float
    top1_differs: tuple[int, ...]
    difference: TextDifference | None

    @property
    def positions(self) -> int:
        return self.prompt_length + self.length


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What counts as equal.

    Attributes:
      name: the coarser of the two dtypes.
      logits: the largest difference of two logits; None if it has no limit.
      mean_kl: the largest mean KL divergence of a text, in nats.
      margin: up to which margin of the reference another greedy token counts as a tie; 0 if texts have to be the same.
    """

    name: str
    logits: float | None
    mean_kl: float
    margin: float

    @property
    def hidden(self) -> float:
        """The relative difference above which a hidden state is said to differ."""
        return 1e-3 if self.logits is not None else 0.1

    def holds_for(self, text: Texts) -> bool:
        """Whether a text is within the tolerance. A number that is no number is not."""
        tie = text.difference is None or (
            self.margin > 0 and text.difference.margin is not None and text.difference.margin <= self.margin
        )
        near = self.logits is None or text.max_absolute <= self.logits
        return tie and near and text.mean_kl <= self.mean_kl

    def __str__(self) -> str:
        if self.logits is not None:
            return f"{self.name}: logits within {self.logits:g}, KL within {self.mean_kl:g}, and the same greedy texts"
        return (
            f"{self.name}: KL within {self.mean_kl:g} nats on average, and greedy texts the same up to ties within "
            f"{self.margin:g}"
        )


@dataclasses.dataclass(frozen=True)
class LayerDifference:
    """How far apart hidden states are.

    Attributes:
      index: 0 for the embeddings, k for the residual stream after k layers, and L for what the output head reads.
      relative: the largest difference, in relation to the largest number of the reference.
      position: the first position at which they are further apart than rounding explains; None if there is none.
    """

    index: int
    relative: float
    position: int | None

    def sentence(self, count: int) -> str:
        """Where hidden states begin to differ, for a model of ``count`` layers."""
        where = f"after layer {self.index - 1} of 0 to {count - 1}"
        if self.index == 0:
            where = "at the embeddings"
        elif self.index == count:
            where += " and the final norm"
        position = "" if self.position is None else f", from position {self.position} on"
        return f"Hidden states of the first prompt begin to differ {where} (by {self.relative:.1e} of their size{position})"


def logit_figures(reference: np.ndarray, ours: np.ndarray) -> dict[str, Any]:
    """The fields of ``Texts`` that logits ``[T, V]`` of both sides give.

    Raises:
      ValueError: the vocabularies have different sizes.
    """
    if reference.shape != ours.shape:
        raise ValueError(
            f"the reference has logits for {reference.shape[1]} tokens, and the target for {ours.shape[1]}: expected the "
            "original checkpoint of this target"
        )
    apart = np.abs(reference - ours).max(-1)
    kl = np.array([divergence(log_softmax(r), log_softmax(o)) for r, o in zip(reference, ours, strict=True)])
    return {
        "max_absolute": float(apart.max()),
        "max_relative": float((apart / np.abs(reference).max(-1)).max()),
        "at": int(apart.argmax()),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "top1_differs": tuple(np.flatnonzero(reference.argmax(-1) != ours.argmax(-1)).tolist()),
    }


def text_difference(
    expected: Sequence[int], ours: Sequence[int], prompt_length: int, reference: np.ndarray, own: np.ndarray
) -> TextDifference | None:
    """Where two completions of a prompt first differ; the logits are those of the prompt with ``expected``."""
    same = next((i for i, pair in enumerate(zip(expected, ours, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        if len(expected) == len(ours):
            return None
        same = min(len(expected), len(ours))
    theirs = expected[same] if same < len(expected) else None
    token = ours[same] if same < len(ours) else None
    margins: list[float | None] = [None, None]
    if theirs is not None and token is not None:
        rows = (logits[prompt_length - 1 + same] for logits in (reference, own))
        margins = [float(row[theirs] - row[token]) for row in rows]
    return TextDifference(same, theirs, token, *margins)


def hidden_difference(index: int, reference: np.ndarray, ours: np.ndarray, beyond: float) -> LayerDifference:
    """How far apart the hidden states ``[T, D]`` of both sides are; ``beyond`` is what rounding explains."""
    size = float(np.abs(reference).max()) or 1.0
    rows = np.abs(reference - ours).max(-1) / size
    positions = np.flatnonzero(~(rows <= beyond))
    return LayerDifference(index, float(rows.max()), int(positions[0]) if len(positions) else None)


def divergence(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """KL(p || q) in nats at each position, from log-probabilities ``[..., V]``; rounding below 0 is 0."""
    return np.maximum((np.exp(p) * (p - q)).sum(-1), 0.0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64, from logits ``[..., V]``."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
