"""A target that caches keys and values in eight bits is one model, however its text is computed: greedy text does not
depend on chunks, drafts, prefix hits and preemption, and is that of one causal pass whose keys and values are rounded."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest
from disturbances import texts_of
from engines import GREEDY, draft, engine, in_bytes, plain_greedy, requests_of, target
from requests_and_engines import CONFIG, P
from shared_prefixes import TEXT

from jspec.engine.engine import Engine
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView, View
from jspec.pallas.attention.fp8 import decode
from jspec.pallas.attention.spec import AttentionSpec

PROMPTS = [TEXT[:1], TEXT, [*TEXT[:13], 3, 5], TEXT[3:12]]
REQUESTS = requests_of(PROMPTS, dataclasses.replace(GREEDY, max_tokens=18))
texts = functools.partial(texts_of, requests=REQUESTS)


def subject(kind: str, method: str | None, K: int, **changes) -> Engine:
    models = in_bytes(target(), kind), draft()
    return engine(method, K, models=models, config=dataclasses.replace(CONFIG, **changes))


def wanted(kind: str) -> list[list[int]]:
    return [text[:18] for text in plain_greedy(in_bytes(target(), kind), PROMPTS)]


@pytest.mark.parametrize("kind", ["fp8", "fp8_per_token_head"])
def test_it_is_another_model_than_without(kind):
    """So that the tests below would see a reader of numbers that were not rounded."""
    assert wanted(kind) != [text[:18] for text in plain_greedy(target(), PROMPTS)]


@pytest.mark.parametrize(
    ("kind", "method", "K", "chunk"),
    [
        ("fp8", "draft_model", 4, P),
        ("fp8_per_token_head", "draft_model", 2, 8),
        *(
            pytest.param(kind, method, K, chunk, marks=pytest.mark.nightly)
            for kind in ("fp8", "fp8_per_token_head")
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


def extended_unrounded(view, qkv, rotation, kv: LayerKV, num_kv_heads: int, spec: AttentionSpec):
    """``PagedView.extend``, which in verify passes sees their own tokens as they are, and only older ones rounded."""
    if view.shared:
        return View.extend(view, qkv, rotation, kv, num_kv_heads, spec)
    assert kv.scales is not None
    assert kv.v is not None
    scales = [scale.reshape(*(*scale.shape, 1, 1)[:3], 1) for scale in kv.scales]
    numbers = [decode(pool, jnp.float32) * scale for pool, scale in zip((kv.k, kv.v), scales, strict=True)]
    attended, _ = View.extend(view, qkv, rotation, LayerKV(*numbers), num_kv_heads, spec)
    _, written = View.rope_and_write_kv(view, qkv, rotation, kv, num_kv_heads)
    return attended, written


@pytest.mark.parametrize("kind", ["fp8", "fp8_per_token_head"])
def test_a_verify_pass_that_sees_its_own_tokens_unrounded_is_detected(kind, monkeypatch):
    monkeypatch.setattr(PagedView, "extend", extended_unrounded)
    served = subject(kind, "draft_model", 3, max_batch=2)  # no other test has a trace of these shapes
    assert texts(served) != wanted(kind)
