"""Prefill over keys and values in eight bits on Hopper GPUs: what they stand for is computed before any query attends."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import for_cuda, kernels_of, mosaic_kernels_of, shapes_of_queries

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.pallas.attention.fp8 import KVScales, decode, rounded
from jspec.pallas.attention.paged import paged_attention_reference
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.table import TABLE, Attention
from jspec.pallas.attention.widened import widen_kernel, widened_attention_kernel

KINDS = ["heads", "tokens"]
OF_HEADS = KVScales(jnp.array([0.03, 0.25], jnp.float32), jnp.array([0.02, 0.5], jnp.float32))
G, R, H, P, M, T = 2, 4, 64, 64, 4, 32
MODES = [pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
interprets_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 does not interpret Mosaic kernels of this kind"
)


def segments(kind: str):
    """A text of four pages, one of them half full, that is read in seven segments, and an eighth row that is idle; pages
    that nobody wrote hold NaN."""
    rng, B = np.random.default_rng(0), 8
    numbers = jnp.asarray(rng.normal(size=(2, 1, 9 * P, G, H)), jnp.bfloat16)
    of_heads = OF_HEADS if kind == "heads" else (None, None)
    codes, scales = zip(*(rounded(x, scale) for x, scale in zip(numbers, of_heads, strict=True)), strict=True)
    table = jnp.broadcast_to(jnp.array([7, 2, 5, 3], jnp.int32), (B, M))
    in_use = np.isin(np.arange(9), np.asarray(table[0]))[None, :, None]
    pools = [jnp.where(in_use[..., None], jnp.moveaxis(x, 2, 0).reshape(G, 9, P, H), 0x7F) for x in codes]
    of_tokens = KVScales(*(jnp.moveaxis(s, 2, 0).reshape(G, 9, P) for s in scales)) if kind == "tokens" else OF_HEADS
    positions = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    valid = jnp.broadcast_to(jnp.arange(B)[:, None] < 7, (B, T))
    q = jnp.asarray(rng.normal(size=(B, T, G * R, H)), jnp.bfloat16)
    return q, *pools, PagedQueries(table, positions, valid), of_tokens


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [3, 5])
def test_listed_pages_are_what_their_bytes_stand_for(kind, count, interpret):
    """Of more pages than there is room for, nothing is."""
    _, k, v, _, scales = segments(kind)
    numbers = jnp.array([5, 2, 7, 0], jnp.int32)
    wide = widen_kernel(k, v, scales, numbers, jnp.int32(count), jnp.bfloat16, interpret=interpret)
    for got, pool, scale in zip(wide, (k, v), scales, strict=True):
        each = scale[:, None, None, None] if kind == "heads" else scale[..., None]
        wanted = (decode(pool, jnp.float32) * each)[:, numbers].astype(jnp.bfloat16)
        x, y = (np.asarray(array, np.float32)[:, :3] for array in (got, wanted))
        np.testing.assert_array_equal(x, y if count == 3 else np.full_like(y, np.nan))


@interprets_mosaic
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 70])
def test_agrees_with_attention_over_bytes(kind, window):
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

    q, k, v, queries, scales = segments(kind)
    args = q, k, v, queries, AttentionSpec(window), scales
    got = widened_attention_kernel(*args, num_stages=2, instances=3, interpret=InterpretGPUParams())
    wanted, valid = paged_attention_reference(*args), np.asarray(queries.valid)
    x, y = (np.asarray(array, np.float32) for array in (got, wanted))
    np.testing.assert_allclose(x[valid], y[valid], atol=2**-6)
    np.testing.assert_array_equal(x[~valid], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_agrees_with_attention_over_bytes_on_a_gpu(kind):
    q, k, v, queries, scales = segments(kind)
    args = q, k, v, queries, AttentionSpec(), scales
    got, valid = widened_attention_kernel(*args), np.asarray(queries.valid)
    x, y = (np.asarray(array, np.float32)[valid] for array in (got, paged_attention_reference(*args)))
    np.testing.assert_allclose(x, y, atol=2**-6)


def prefill_view(kind: str, P=64, may_up_project=True):
    """``PagedView.extend`` of 16 segments of 64 tokens, and its arguments."""
    array, B, T, M = jax.ShapeDtypeStruct, 16, 64, 1024 // P
    pool = array((8, 1 + B * M, P, 128), jnp.uint8)
    scale = array(pool.shape[:1] if kind == "heads" else pool.shape[:3], jnp.float32)
    view = PagedView(*shapes_of_queries(B, T, M)[:3], shared=True, may_up_project=may_up_project)
    rotation = Rotation(*[array((B, T, 64), jnp.float32)] * 2)
    extend = lambda view, qkv, rotation, kv: view.extend(qkv, rotation, kv, 8, AttentionSpec())  # noqa: E731
    kv = LayerKV(pool, pool, KVScales(scale, scale))  # pyright: ignore
    return extend, (view, array((B, T, 48, 128), "bfloat16"), rotation, kv)


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_on_hopper_widens_what_it_reads(kind, monkeypatch):
    monkeypatch.setattr("jspec.pallas.attention.table.on_hopper", lambda: True)
    text = for_cuda(*prefill_view(kind))
    assert sorted(kernels_of(text)) == ["rope_and_write_kv", "widen"]
    assert mosaic_kernels_of(text) == ["prefill_attention"]


@pytest.mark.parametrize(("hopper", "how"), [(False, {}), (True, {"may_up_project": False}), (True, {"P": 16})])
def test_elsewhere_prefill_reads_bytes(hopper, how, monkeypatch):
    monkeypatch.setattr("jspec.pallas.attention.table.on_hopper", lambda: hopper)
    text = for_cuda(*prefill_view("heads", **how))
    assert sorted(kernels_of(text)) == ["attend_split", "rope_and_write_kv"]
    assert not re.search("mosaic_gpu", text)


def test_a_soft_cap_has_no_kernel(monkeypatch):
    monkeypatch.setattr("jspec.pallas.attention.table.on_hopper", lambda: True)
    q, k, _, queries, _ = segments("heads")
    q = jnp.broadcast_to(q[:, None], (8, 64, *q.shape[1:])).reshape(512, *q.shape[1:])
    queries = PagedQueries(*(jnp.repeat(x, 64, axis=0) for x in queries[:3]))
    assert TABLE[0].serves(Attention(q, k, queries, AttentionSpec(), may_widen=True))
    assert not TABLE[0].serves(Attention(q, k, queries, AttentionSpec(softcap=2.0), may_widen=True))
