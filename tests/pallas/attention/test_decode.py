"""Rotation, cache writes and attention in one launch, against the three of them one after another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from paged_problems import CASES, DEAD, SMALL, WHOLE, Case, G, arguments, ragged_arguments

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView, View
from jspec.pallas.attention.decode import decode_attention_kernel
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.attention.table import ONE_LAUNCH, Attention
from jspec.pallas.attention.tiling import AttentionTiling


def composed(qkv, rotation, kv, view, case: Case):
    return jax.jit(lambda *args: View.extend(view, *args, G, case.spec))(qkv, rotation, kv)


def assert_agrees(got, wanted, view, dtype):
    """Outputs of valid tokens, and every slot of the pools but the null page's."""
    tolerance = 2**-6 if dtype == "bfloat16" else 2e-5
    valid = np.asarray(view.valid)
    (out, kv), (wanted_out, wanted_kv) = got, wanted
    assert valid.any()
    x, y = (np.asarray(o, np.float32)[valid] for o in (out, wanted_out))
    assert np.isfinite(y).all()
    np.testing.assert_allclose(x, y, atol=tolerance)
    for pool, wanted_pool in zip(kv[:2], wanted_kv[:2], strict=True):
        x, y = (np.asarray(p, np.float32)[:, 1:] for p in (pool, wanted_pool))
        np.testing.assert_allclose(x, y, rtol=2**-7 if dtype == "bfloat16" else 1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "interpret", [pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("case", [case for case in CASES if case.T < 40], ids=str)
def test_agrees_with_rope_write_and_attention_apart(case, interpret):
    args = qkv, rotation, kv, view = arguments(case)
    wanted = composed(*args, case)
    how = {"tiling": case.tiling, "interpret": interpret}
    out, *pools = decode_attention_kernel(qkv, rotation, *kv[:2], view.queries, case.spec, **how)
    assert_agrees((out, pools), wanted, view, case.dtype)


@pytest.mark.parametrize("sink", [None, 1.0])
@pytest.mark.parametrize("tiling", [SMALL, WHOLE], ids=["split", "whole"])
def test_rows_without_tokens_get_zeros_and_write_nothing(tiling, sink):
    case = Case(T=5, R=4, H=64, P=16, pages=6, sink=sink)
    qkv, rotation, kv, view = arguments(case)
    attend = functools.partial(decode_attention_kernel, qkv, rotation, *kv[:2], tiling=tiling, interpret=True)
    out, *pools = attend(view.queries, case.spec)
    np.testing.assert_array_equal(out[DEAD], 0)
    out, *pools = attend(view.queries._replace(valid=jnp.zeros_like(view.valid)), case.spec)
    np.testing.assert_array_equal(out, 0)
    for pool, before in zip(pools, kv[:2], strict=True):
        np.testing.assert_array_equal(pool, before)


def test_a_view_takes_three_steps_on_a_cpu():
    case = Case(T=5, R=4, H=64, P=16, pages=9, window=3, sink=1.0)
    qkv, rotation, kv, view = arguments(case)
    assert ONE_LAUNCH.serves(Attention(qkv, kv.k, view.queries))
    with jax.default_device(jax.devices("cpu")[0]):
        extend = functools.partial(jax.jit, static_argnums=3)(view.extend)
        out, written = extend(qkv, rotation, kv, G, case.spec)
        assert_agrees((out, written), composed(qkv, rotation, kv, view, case), view, case.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 5), (16, 5), (64, 5), (3, 9)])
def test_real_sizes_agree_on_a_gpu(B, T):
    case = Case(T=T, R=4, H=128, P=64, pages=16, dtype="bfloat16", tiling=AttentionTiling())
    keys = jax.random.split(jax.random.key(B + T), 6)
    qkv = jax.random.normal(keys[0], (B, T, 8 * (case.R + 2), case.H)).astype(case.dtype)
    pools = [jax.random.normal(key, (8, 1 + 16 * B, 64, case.H)).astype(case.dtype) for key in keys[1:3]]
    table = 1 + jax.random.permutation(keys[3], 16 * B).reshape(B, 16).astype(jnp.int32)
    positions = jax.random.randint(keys[4], (B, 1), 0, 1024 - T) + jnp.arange(T, dtype=jnp.int32)[None]
    angles = 6 * jax.random.uniform(keys[5], (B, T, case.H // 2))
    view, rotation = PagedView(table, positions, jnp.ones((B, T), bool)), Rotation(jnp.cos(angles), jnp.sin(angles))
    wanted = jax.jit(lambda *args: View.extend(view, *args, 8, AttentionSpec()))(qkv, rotation, LayerKV(*pools))
    out, *written = decode_attention_kernel(qkv, rotation, *pools, view.queries, AttentionSpec())
    assert_agrees((out, written), wanted, view, case.dtype)


@pytest.mark.parametrize(
    ("interpret", "padding"),
    [
        # An interpreted store writes what it masks back as it was, even past the end of an array.
        pytest.param(True, 64, id="interpreted"),
        pytest.param(False, 64, id="compiled", marks=pytest.mark.gpu),
        pytest.param(False, 0, id="compiled, no padding", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("case", [case for case in CASES if case.T < 40], ids=str)
def test_a_ragged_view_agrees_with_its_rows(case, interpret, padding):
    """They are read and written where they are, and nothing of a row shows in another."""
    qkv, rotation, kv, view = ragged_arguments(case, padding)
    rows, how = view.rows, {"tiling": case.tiling, "interpret": interpret}
    what = *kv[:2], rows.queries, case.spec
    out, *pools = decode_attention_kernel(qkv, rotation, *what, view.layout, **how)
    wanted, *wanted_pools = decode_attention_kernel(view.to_rows(qkv), view.to_rows(rotation), *what, **how)
    valid = np.asarray(rows.valid)
    x, y = (np.asarray(o, np.float32)[valid] for o in (view.to_rows(out), wanted))
    np.testing.assert_allclose(x, y, atol=2**-8 if case.dtype == "bfloat16" else 2e-6)  # programs have fewer queries
    for pool, wanted_pool in zip(pools, wanted_pools, strict=True):
        x, y = (np.asarray(p, np.float32)[:, 1:] for p in (pool, wanted_pool))
        np.testing.assert_array_equal(x, y)
    assert np.isfinite(np.asarray(out, np.float32)).all()  # of padding, too: experts route it like other tokens
