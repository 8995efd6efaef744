"""Keys and values in eight bits: how they are rounded, and attention functions and kernels that read and write them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from paged_problems import (
    CASES,
    LIVE,
    OF_HEADS,
    SHARED,
    Case,
    G,
    arguments,
    assert_agrees,
    in_bytes,
    oracle,
    problem,
    ragged_arguments,
)

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView, View
from jspec.pallas.attention.decode import decode_attention_kernel
from jspec.pallas.attention.fp8 import KVScales, decode, encode, rounded, token_scales
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.rope_and_write_kv import rope_and_write_kv_kernel
from jspec.pallas.attention.tiling import tiling_of, tiling_of_bytes

KINDS = ["heads", "tokens"]
ROUND, DECODE = jax.jit(rounded), jax.jit(decode, static_argnums=1)
OF_BYTES = dataclasses.replace(tiling_of_bytes("bfloat16", 128, 4, 1), instances=1)  # pyright: ignore
ROUNDED = [
    Case(T=1, R=4, H=128, P=64, pages=3, dtype="bfloat16", tiling=OF_BYTES),  # a tile has two pages
    Case(T=5, R=4, H=64, P=16, pages=9, window=20),
    Case(T=5, R=2, H=64, P=16, pages=9, dtype="bfloat16", tiling=SHARED, sink=1.0),
    Case(T=5, R=2, H=64, P=16, pages=9, scale=0.3, softcap=2.0, rotary=48),
]


def pairs(cases):
    """Each case with each kind of scales; half of them nightly."""
    every = [(case, kind, (i + j) % 2) for i, case in enumerate(cases) for j, kind in enumerate(KINDS)]
    marks = (), pytest.mark.nightly
    return pytest.mark.parametrize(
        ("case", "kind"), [pytest.param(case, kind, marks=marks[odd], id=f"{case} {kind}") for case, kind, odd in every]
    )


MODES = [pytest.param(True, id="interpreted"), pytest.param(False, id="compiled", marks=pytest.mark.gpu)]


def e4m3(numbers: np.ndarray) -> np.ndarray:
    """The bytes of e4m3 numbers nearest to float32 ``numbers``, which are bounded by 448."""
    return np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


@functools.cache
def problem_in_bytes(case: Case, kind: str):
    """``problem`` with pools in bytes, and the oracle's attention over the numbers that they stand for.

    What is NaN there is NaN here; scales of tokens that nobody wrote are NaN, too."""
    (q, k, v, queries), _ = problem(case)
    text = []
    pools, scales = [], []
    for pool, of_heads in zip((k, v), OF_HEADS, strict=True):
        pool = np.asarray(pool)
        codes, of_tokens = ROUND(np.moveaxis(pool, 0, 2), of_heads if kind == "heads" else None)
        pools.append(jax.device_put(np.moveaxis(np.asarray(codes), 2, 0)))
        written = ~np.isnan(np.asarray(pool, np.float32)).any(axis=-1)
        scale = of_heads
        if of_tokens is not None:
            scale = jax.device_put(np.where(written, np.moveaxis(np.asarray(of_tokens), 2, 0), np.float32(np.nan)))
        scales.append(scale)
        each = np.asarray(scale, np.float64).reshape(*(*scale.shape, 1, 1)[:3], 1)
        text.append(np.asarray(DECODE(pools[-1], jnp.float32), np.float64) * each)
    table = np.where(np.asarray(queries.table) < k.shape[1], queries.table, 0)
    rows = [pool[:, table].reshape(G, len(table), -1, case.H) for pool in text]
    queries_of = np.asarray(queries.positions), np.asarray(queries.valid)
    wanted = oracle(case, np.asarray(q, np.float64), *rows, *queries_of)
    return (q, *pools, queries), KVScales(*scales), wanted


def test_every_number_is_rounded_to_nearest_even_and_bounded():
    rng = np.random.default_rng(0)
    finite = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = np.unique(finite[np.isfinite(finite)])
    ties = (finite[1:] + finite[:-1]) / 2
    numbers = np.exp(rng.normal(size=50000) * 5) * rng.choice([-1, 1], 50000)
    far = np.array([448.1, 464.0, 1e9, -1e30, -0.0, 1e-30, 3e38])
    x = np.concatenate([numbers, finite, ties, np.nextafter(ties, 0), np.nextafter(ties, 1e9), far]).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(encode)(x), e4m3(x))


def test_nan_and_infinity_are_stored_as_nan():
    codes = encode(jnp.array([jnp.nan, -jnp.nan, jnp.inf, -jnp.inf]))
    assert codes.tolist() == [0x7F, 0xFF, 0x7F, 0xFF]
    assert jnp.isnan(decode(codes, jnp.bfloat16)).all()


def test_bytes_are_read_exactly():
    codes = np.arange(256, dtype=np.uint8)
    for dtype in (jnp.bfloat16, jnp.float32):
        read = np.asarray(decode(jnp.asarray(codes), dtype), np.float32)
        np.testing.assert_array_equal(read, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_the_scale_of_a_token_is_the_least_power_of_two_that_holds_it():
    peaks = np.array([448, 448.1, 447.9, 1.75, 1.7500001, 1, 1e38, 1e-12, 2.0**-50], np.float32)
    scales = np.asarray(token_scales(jnp.asarray(peaks[:, None] * np.array([0.5, -1, 0.1], np.float32))))[:, 0]
    assert (np.log2(scales) % 1 == 0).all()
    assert (peaks <= 448 * scales).all()
    assert (peaks > 224 * scales).all()
    assert (np.asarray(token_scales(jnp.zeros((2, 3)))) == 2.0**-64).all()
    assert np.isnan(token_scales(jnp.array([[1.0, jnp.nan], [-jnp.inf, 1.0]]))).all()


@pytest.mark.parametrize(("R", "T", "stages"), [(1, 1, 3), (4, 1, 3), (4, 4, 3), (4, 5, 2), (2, 9, 2)])
def test_tiles_of_bytes_have_128_slots_and_fewer_are_under_way_for_more_queries(R, T, stages):
    tiling = tiling_of_bytes("bfloat16", 128, R, T)
    assert tiling is not None
    assert (tiling.tile_slots(2 * 128), tiling.num_stages) == (128, stages)
    for *other, shared in (("bfloat16", 256, R), ("bfloat16", 64, R), ("float32", 128, R), ("bfloat16", 128, 8)):
        assert tiling_of_bytes(*other, shared, T) == tiling_of(*other)


class TestAttentionOverBytes:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def attend(case: Case, args, scales):
            kernel = functools.partial(paged_attention_kernel, tiling=case.tiling)
            return implementation(paged_attention_reference, kernel)(*args, case.spec, scales)

        self.attend = attend

    @pairs(ROUNDED)
    def test_agrees_with_the_oracle_of_what_they_stand_for(self, case, kind):
        args, scales, wanted = problem_in_bytes(case, kind)
        assert_agrees(self.attend(case, args, scales), args, *wanted)

    @pytest.mark.parametrize("kind", KINDS)
    def test_nan_reaches_those_that_see_it(self, kind):
        case = Case(T=3, R=2, H=32, P=16, pages=4)
        args, scales, wanted = problem_in_bytes(case, kind)
        page = args[3].table[LIVE, 0]
        for broken in (1, 2):
            for code in (0x7F, 0xFF):
                poisoned, found = list(args), scales
                poisoned[broken] = args[broken].at[0, page, 3, 5].set(code)
                if kind == "tokens":  # whose scales are NaN then, and all their numbers
                    poisoned[broken] = args[broken].at[0, page, 3].set(code)
                    which = scales._fields[broken - 1]
                    found = scales._replace(**{which: getattr(scales, which).at[0, page, 3].set(jnp.nan)})
                got = self.attend(case, poisoned, found)
                everywhere = broken == 1 or kind == "tokens"
                reached = got[LIVE, :, : case.R] if everywhere else got[LIVE, :, : case.R, 5]
                assert jnp.isnan(reached).all()
                whole = got.at[LIVE, :, : case.R].set(wanted[0][LIVE, :, : case.R])
                assert_agrees(whole, args, *wanted)


def assert_same_cache(got: LayerKV, wanted: LayerKV, exact: bool):
    """Bytes are those of keys that may differ in their last bits, so a few may be neighbours."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = (np.asarray(array)[:, 1:] if array.ndim > 1 else np.asarray(array) for array in (x, y))
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        assert same.all() if exact else same.mean() > 0.995


@pytest.mark.parametrize("interpret", MODES)
@pairs(ROUNDED)
def test_a_round_writes_and_sees_rounded_tokens(case, kind, interpret):
    qkv, rotation, kv, view = arguments(case)
    kv = in_bytes(kv, kind)
    wanted, wanted_kv = jax.jit(lambda *args: View.extend(view, *args, G, case.spec))(qkv, rotation, kv)
    how = {"tiling": case.tiling, "interpret": interpret, "scales": kv.scales}
    out, *written = decode_attention_kernel(qkv, rotation, kv.k, kv.v, view.queries, case.spec, **how)
    assert_same_cache(kv.with_written(*written), wanted_kv, interpret)
    valid = np.asarray(view.valid)
    x, y = (np.asarray(array, np.float32)[valid] for array in (out, wanted))
    assert np.isfinite(y).all()
    np.testing.assert_allclose(x, y, atol=2**-6 if case.dtype == "bfloat16" else 3e-5)


@pytest.mark.parametrize("interpret", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_ragged_round_does_so_too(kind, interpret):
    case = ROUNDED[2]
    qkv, rotation, kv, view = ragged_arguments(case, 64)
    kv = in_bytes(kv, kind)
    args = view.rows.queries, case.spec
    how = {"tiling": case.tiling, "interpret": interpret, "scales": kv.scales}
    out, *written = decode_attention_kernel(qkv, rotation, kv.k, kv.v, *args, view.layout, **how)
    in_rows = view.to_rows(qkv), view.to_rows(rotation), kv.k, kv.v, *args
    wanted, *wanted_written = decode_attention_kernel(*in_rows, **how)
    assert_same_cache(kv.with_written(*written), kv.with_written(*wanted_written), True)
    valid = np.asarray(view.rows.valid)
    x, y = (np.asarray(o, np.float32)[valid] for o in (view.to_rows(out), wanted))
    np.testing.assert_allclose(x, y, atol=2**-8)


@pytest.mark.parametrize("interpret", MODES)
@pairs([ROUNDED[0], ROUNDED[3], CASES[8]])
def test_many_tokens_are_written_rounded(case, kind, interpret):
    qkv, rotation, kv, view = arguments(case)
    kv = in_bytes(kv, kind)
    got, *written = rope_and_write_kv_kernel(qkv, rotation, kv.k, kv.v, view.queries, kv.scales, interpret=interpret)
    wanted, wanted_kv = jax.jit(lambda *args: View.rope_and_write_kv(*args, G))(view, qkv, rotation, kv)
    assert_same_cache(kv.with_written(*written), wanted_kv, False)
    tolerance = 2**-7 if case.dtype == "bfloat16" else 1e-6
    x, y = (np.asarray(array, np.float32) for array in (got, wanted))
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_new_tokens_that_are_not_divided_by_their_scales_are_detected(kind, monkeypatch):
    case = dataclasses.replace(ROUNDED[1], T=3)
    qkv, rotation, kv, view = arguments(case)
    kv = in_bytes(kv, kind)
    wanted, _ = jax.jit(lambda *args: View.extend(view, *args, G, case.spec))(qkv, rotation, kv)

    def as_stored_wrongly(k, v, scale_refs, g):
        return encode(k), encode(v), *((jnp.full(len(k), 2.0),) * 2 if scale_refs.of_tokens else ())

    monkeypatch.setattr("jspec.pallas.attention.decode._as_stored", as_stored_wrongly)
    kernel = decode_attention_kernel.__wrapped__
    attend = jax.jit(lambda *args: kernel(*args, view.queries, case.spec, scales=kv.scales, interpret=True))
    out, *_ = attend(qkv, rotation, kv.k, kv.v)
    valid = np.asarray(view.valid)
    assert np.abs(np.asarray(out) - np.asarray(wanted))[valid].max() > 1e-3


def test_a_view_rounds_what_it_writes_and_keeps_the_scales_of_heads():
    case = ROUNDED[0]
    qkv, rotation, kv, view = arguments(case)
    kv = in_bytes(kv, "heads")
    assert isinstance(view, PagedView)
    _, written = jax.jit(lambda *args: view.extend(*args, G, case.spec))(qkv, rotation, kv)
    assert written.k.dtype == written.v.dtype == jnp.uint8
    np.testing.assert_array_equal(written.scales.k, OF_HEADS.k)
    assert written.in_pages.scales is None
