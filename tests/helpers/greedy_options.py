"""Greedy text under options that change logits, by their definition: one causal pass for each token."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from engines import MAX_LEN, target
from lossless.distributions import Options, processed

from jspec.models.causal import causal_logits


@functools.cache
def forward() -> Callable[[np.ndarray], jax.Array]:
    """The target's logits of a text of MAX_LEN tokens, in one program for all lengths."""
    model = target()  # which is cached, and must not be made of the tracers of the program
    return jax.jit(lambda text: causal_logits(model, text)[0])


@functools.cache
def logits_after(text: tuple[int, ...]) -> np.ndarray:
    padded = np.zeros((1, MAX_LEN), np.int32)
    padded[0, : len(text)] = text
    return np.asarray(forward()(padded)[len(text) - 1]).astype(np.float64)


def greedy_by_definition(prompt: list[int], options: dict[str, Any], count: int) -> list[int]:
    asked = Options(**options | {"logit_bias": tuple(options.get("logit_bias", {}).items())})
    text = list(prompt)
    for _ in range(count):
        text.append(int(np.argmax(processed(logits_after(tuple(text)), tuple(text), len(prompt), asked))))
    return text[len(prompt) :]
