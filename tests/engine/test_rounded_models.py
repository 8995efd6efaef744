"""A target that rounds is one model, however its text is computed: greedy text does not depend on chunks, drafts, prefix
hits and preemption, and is that of one causal pass that rounds alike.

It rounds the keys and values that it caches, or its latents, or the inputs of its maps, to eight bits."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest
from disturbances import texts_of
from engines import GREEDY, draft, engine, in_bytes, in_eight_bits, latents, plain_greedy, requests_of, target
from requests_and_engines import CONFIG, P
from shared_prefixes import TEXT

from jspec.engine.engine import Engine
from jspec.models.cache_pools import LayerKV
from jspec.models.decoder import Decoder
from jspec.models.kv_cache import PagedView, View
from jspec.models.mla import LatentAttention
from jspec.pallas.attention.fp8 import decode, decode_latents
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.matmul import quantize_activations
from jspec.pallas.mla.prefill import up_projected_attention_reference

PROMPTS = [TEXT[:1], TEXT, [*TEXT[:13], 3, 5], TEXT[3:12]]
REQUESTS = requests_of(PROMPTS, dataclasses.replace(GREEDY, max_tokens=18))
texts = functools.partial(texts_of, requests=REQUESTS)
CACHES, INPUTS = ("fp8", "fp8_per_token_head"), ("int8 inputs", "fp8 inputs")


def rounding(kind: str, model=target) -> Decoder:
    """The model, which caches numbers of this kind, or rounds the inputs of its maps."""
    number, _, inputs = kind.partition(" ")
    return in_eight_bits(model(), number) if inputs else in_bytes(model(), kind)


def subject(kind: str, method: str | None, K: int, model=target, **changes) -> Engine:
    """Latents are drafted for by the same model, with latents that are not rounded."""
    models = rounding(kind, model), draft() if model is target else model()
    return engine(method, K, models=models, config=dataclasses.replace(CONFIG, **changes))


def causal_texts(model: Decoder) -> list[list[int]]:
    return [text[:18] for text in plain_greedy(model, PROMPTS)]


def assert_texts_are_those_of_a_causal_pass(served: Engine, kind: str, model=target):
    """Beside each other, then with hits of cached prompts, and while all of them are preempted at every call."""
    expected = causal_texts(rounding(kind, model))
    assert texts(served) == expected
    assert texts(served, at_a_time=1) == expected
    assert texts(served, preempt=True) == expected


def assert_other_texts(served: Engine, kind: str, model=target):
    """Of the same lengths, so that no request has failed."""
    found, expected = texts(served), causal_texts(rounding(kind, model))
    assert [len(text) for text in found] == [len(text) for text in expected]
    assert found != expected


@pytest.mark.parametrize(
    ("kind", "model"),
    [*((kind, target) for kind in (*CACHES, *INPUTS)), *((kind, latents) for kind in CACHES)],
)
def test_rounding_changes_the_text(kind, model):
    """So that the tests below would see numbers that were not rounded."""
    exact = in_eight_bits(model(), kind.split()[0], rounds=False) if kind in INPUTS else model()
    assert causal_texts(rounding(kind, model)) != causal_texts(exact)


@pytest.mark.parametrize(
    ("kind", "method", "K", "chunk"),
    [
        ("fp8", "draft_model", 4, P),
        ("fp8_per_token_head", "draft_model", 2, 8),
        ("int8 inputs", "draft_model", 4, P),
        ("fp8 inputs", "draft_model", 2, 8),
        *(
            pytest.param(kind, method, K, chunk, marks=pytest.mark.nightly)
            for kind in (*CACHES, *INPUTS)
            for method, K, chunk in ((None, 1, P), ("draft_model", 1, 3), ("draft_model", 3, 8), ("ngram", 4, 1))
        ),
    ],
)
def test_text_is_that_of_a_causal_pass(kind, method, K, chunk):
    assert_texts_are_those_of_a_causal_pass(subject(kind, method, K, prefill_chunk=chunk), kind)


@pytest.mark.parametrize(
    ("kind", "method", "K", "chunk", "expands"),
    [
        ("fp8_per_token_head", "draft_model", 3, 8, False),
        pytest.param("fp8", "draft_model", 2, P, True, marks=pytest.mark.nightly),
        pytest.param("fp8", "ngram", 4, 3, False, marks=pytest.mark.nightly),
        pytest.param("fp8_per_token_head", None, 1, P, True, marks=pytest.mark.nightly),
    ],
)
def test_text_over_latents_is_that_of_a_causal_pass(kind, method, K, chunk, expands, monkeypatch):
    """Prefill over absorbed queries, or over keys and values of all heads, where that is what a GPU would do."""
    monkeypatch.setattr(PagedView, "up_projects", lambda view, q, kv, maps: view.may_up_project)
    monkeypatch.setattr("jspec.models.kv_cache.up_projected_attention", up_projected_attention_reference)
    served = subject(kind, method, K, latents, prefill_chunk=chunk, expand_latents=expands)
    assert_texts_are_those_of_a_causal_pass(served, kind, latents)


def extended_unrounded(view, qkv, rotation, kv: LayerKV, num_kv_heads: int, spec: AttentionSpec):
    """``PagedView.extend``, which in verify passes sees their own tokens as they are, and only older ones rounded."""
    if view.shared or kv.scales is None:  # those of the draft model
        return View.extend(view, qkv, rotation, kv, num_kv_heads, spec)
    assert kv.v is not None
    scales = [scale.reshape(*(*scale.shape, 1, 1)[:3], 1) for scale in kv.scales]
    numbers = [decode(pool, jnp.float32) * scale for pool, scale in zip((kv.k, kv.v), scales, strict=True)]
    attended, _ = View.extend(view, qkv, rotation, LayerKV(*numbers), num_kv_heads, spec)
    _, written = View.rope_and_write_kv(view, qkv, rotation, kv, num_kv_heads)
    return attended, written


def test_a_verify_pass_that_sees_its_own_tokens_unrounded_is_detected(monkeypatch):
    """With scales of heads: those of tokens round so little that this changes no greedy text of this model."""
    monkeypatch.setattr(PagedView, "extend", extended_unrounded)
    served = subject("fp8", "draft_model", 3, max_batch=2)  # no other test has a trace of these shapes
    assert_other_texts(served, "fp8")


@pytest.mark.nightly
@pytest.mark.parametrize("kind", CACHES)
def test_a_verify_pass_that_sees_its_own_latents_unrounded_is_detected(kind, monkeypatch):
    attend = LatentAttention._from_latents

    def unrounded(attention, compressed, rotation, kv: LayerKV, view):
        if view.shared or kv.scales is None:
            return attend(attention, compressed, rotation, kv, view)
        numbers = decode_latents(kv.k, kv.scales.k.reshape(1, *(kv.scales.k.shape[1:] or (1, 1))), jnp.float32)
        attended, _ = attend(attention, compressed, rotation, LayerKV(numbers, None), view)
        return attended, attend(attention, compressed, rotation, kv, view)[1]

    monkeypatch.setattr(LatentAttention, "_from_latents", unrounded)
    served = subject(kind, "draft_model", 3, latents, max_batch=2)  # no other test has a trace of these shapes
    assert_other_texts(served, kind, latents)


@pytest.mark.parametrize(
    ("kind", "faulty", "K", "chunk"),
    [("int8 inputs", "verify", 2, 5), ("fp8 inputs", "verify", 5, 4), ("int8 inputs", "prefill", 5, 9)],
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
    assert texts(served) != causal_texts(rounding(kind))
