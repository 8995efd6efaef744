"""A target that rounds the inputs of its maps to eight bits is one model, however its text is computed: greedy text does not
depend on chunks, drafts, prefix hits and preemption, and is that of one causal pass that rounds them."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest
from disturbances import texts_of
from engines import GREEDY, draft, engine, in_eight_bits, plain_greedy, requests_of, target
from requests_and_engines import CONFIG, P
from shared_prefixes import TEXT

from jspec.engine.engine import Engine
from jspec.pallas.matmul import quantize_activations

KINDS = "int8", "fp8"
PROMPTS = [TEXT[:1], TEXT, [*TEXT[:13], 3, 5], TEXT[3:12]]
REQUESTS = requests_of(PROMPTS, dataclasses.replace(GREEDY, max_tokens=18))
texts = functools.partial(texts_of, requests=REQUESTS)


def subject(kind: str, method: str | None, K: int, **changes) -> Engine:
    models = in_eight_bits(target(), kind), draft()
    return engine(method, K, models=models, config=dataclasses.replace(CONFIG, **changes))


def wanted(kind: str, rounds: bool = True) -> list[list[int]]:
    return [text[:18] for text in plain_greedy(in_eight_bits(target(), kind, rounds), PROMPTS)]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_another_model_than_without(kind):
    """So that the tests below would see a pass that does not round."""
    assert wanted(kind) != wanted(kind, rounds=False)


@pytest.mark.parametrize(
    ("kind", "method", "K", "chunk"),
    [
        ("int8", "draft_model", 4, P),
        ("fp8", "draft_model", 2, 8),
        *(
            pytest.param(kind, method, K, chunk, marks=pytest.mark.nightly)
            for kind in KINDS
            for method, K, chunk in ((None, 1, P), ("draft_model", 1, 3), ("draft_model", 3, 8), ("ngram", 4, 1))
        ),
    ],
)
def test_text_is_that_of_a_causal_pass(kind, method, K, chunk):
    """Beside each other, then with hits of cached prompts, and while all of them are preempted at every call."""
    served = subject(kind, method, K, prefill_chunk=chunk)
    assert texts(served) == wanted(kind)
    assert texts(served, at_a_time=1) == wanted(kind)
    assert texts(served, preempt=True) == wanted(kind)


@pytest.mark.parametrize(
    ("kind", "faulty", "K", "chunk"), [("int8", "verify", 2, 5), ("fp8", "verify", 5, 4), ("int8", "prefill", 5, 9)]
)
def test_a_scale_of_all_tokens_of_a_pass_is_detected(kind, faulty, K, chunk, monkeypatch):
    """In place of one for each token. No other test has a trace of passes of these shapes."""
    quantize, tokens = quantize_activations._quantize, {"verify": K + 1, "prefill": chunk}[faulty]

    def quantize_together(x, axis, *how):
        if x.ndim == 3 and x.shape[1] == tokens:
            numbers, scale = quantize(x.reshape(1, 1, -1), 2, *how)
            return numbers.reshape(x.shape), jnp.broadcast_to(scale, (*x.shape[:2], 1))
        return quantize(x, axis, *how)

    monkeypatch.setattr(quantize_activations, "_quantize", quantize_together)
    served = subject(kind, "draft_model", K, max_batch=2, prefill_chunk=chunk)
    assert texts(served) != wanted(kind)
