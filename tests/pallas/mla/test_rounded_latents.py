"""Latents in eight bits: what is written, and that attention over them, and keys and values that are computed from them, are
those of the numbers that the bytes stand for; for reference implementations and kernels."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import latent_attention as attention
import latent_prefill as prefill
import ml_dtypes
import numpy as np
import pytest
from cuda_lowering import for_cuda, interpreted, kernels_of, mosaic_kernels_of
from latent_attention import SCALE, in_bytes

from jspec.config import Rope
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import CausalView, PagedView
from jspec.models.layers import rotation_at
from jspec.pallas.attention.fp8 import KVScales
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.mla.attention import latent_attention_kernel, latent_attention_reference
from jspec.pallas.mla.norm_rope_write_kv import norm_rope_latents, norm_rope_write_kv_kernel
from jspec.pallas.mla.prefill import UP_PROJECTED, up_projected_attention
from jspec.pallas.mla.up_project import up_project_kernel, up_project_reference

OF_LATENTS = KVScales(np.array([SCALE]), None)
KINDS = pytest.mark.parametrize("kind", ["heads", "tokens"])
DECODED = [attention.CASES[i] for i in (0, 1, 2, 5)]
EXPANDED = prefill.CASES[0], prefill.CASES[4], prefill.CASES[5]  # maps in bfloat16, in blocks and in codes


def meaning(codes, scales: KVScales) -> np.ndarray:
    """float64, what the bytes of a pool stand for."""
    of_each = np.asarray(scales.k, np.float64).reshape(*(*scales.k.shape, 1, 1)[:3], 1)
    return np.asarray(codes).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * of_each


class TestAttention:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.attend = lambda case: implementation(
            functools.partial(latent_attention_reference, rank=case.rank, scale=0.1),
            functools.partial(latent_attention_kernel, rank=case.rank, scale=0.1, tiling=case.tiling),
        )

    @KINDS
    @pytest.mark.parametrize("case", DECODED, ids=str)
    def test_equals_the_oracle_of_what_they_stand_for(self, case, kind):
        (q, pool, queries), _ = attention.problem(case)
        codes, scales = in_bytes(pool, kind)
        table, positions, valid = jax.tree.map(np.asarray, queries[:3])
        text = meaning(codes, scales)[0, np.where(table < pool.shape[1], table, 0)].reshape(len(q), -1, q.shape[-1])
        wanted = attention.oracle(case, q, text, positions, valid, 0.1)
        got = np.asarray(self.attend(case)(q, codes, queries, scales), np.float64)
        assert np.abs(got - wanted)[valid].max() < (1e-5 if case.dtype == "float32" else 0.02)

    @KINDS
    def test_nan_reaches_those_that_see_it(self, kind):
        case = DECODED[1]
        (q, pool, queries), _ = attention.problem(case)
        page = np.asarray(queries.table)[0, 0]
        pool = np.array(pool)
        pool[0, page, 3, 5] = np.nan
        codes, scales = in_bytes(pool, kind)
        got = np.asarray(self.attend(case)(q, codes, queries, scales))
        assert np.isnan(got[0] if kind == "tokens" else got[0, ..., 5]).all()
        assert np.isfinite(got[4]).all()


def write_reference(compressed, query_weight, latent_weight, rotation, pool, tokens, scales):
    q, latents = norm_rope_latents(compressed, query_weight, latent_weight, 1e-6, rotation)
    return q, *PagedView(*tokens[:3]).write(LayerKV(pool, None, scales), latents[:, :, None], None)


def rotation_of(positions, case: attention.Case) -> Rotation:
    return jax.jit(functools.partial(rotation_at, rope=Rope(theta=100.0), head_dim=case.rotated))(positions)


class TestWrite:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def kernel(*args, interpret=False):
            q, pool, *of_tokens = norm_rope_write_kv_kernel(*args[:3], 1e-6, *args[3:], interpret=interpret)
            return q, *LayerKV(args[4], None, args[6]).with_written(pool, None, *of_tokens)

        self.write = implementation(write_reference, kernel)

    @KINDS
    @pytest.mark.parametrize(("case", "queries"), [(DECODED[0], None), (DECODED[1], 24), (DECODED[2], 40)])
    def test_bytes_that_are_written_stand_for_the_nearest_numbers(self, case, queries, kind):
        (_, pool, (table, positions, valid, _)), _ = attention.problem(case)
        pool, scales = in_bytes(np.zeros(pool.shape), kind)
        table = np.where(np.asarray(table) >= pool.shape[1], 0, table)
        table[2, 0] = 0
        rng = np.random.default_rng(case.T)
        compressed = rng.normal(size=(*positions.shape, (queries or 24) + case.rank + case.rotated)).astype(case.dtype)
        compressed[0, 0, -1] = 300.0  # a rotated key that is far larger than its latent
        query_weight = None if queries is None else np.ones(queries, case.dtype)
        latent_weight = rng.normal(1, size=case.rank).astype(case.dtype)
        rotation = rotation_of(positions, case)
        tokens = PagedQueries(table, positions, valid)
        args = compressed, query_weight, latent_weight, rotation
        _, got, none, got_scales = self.write(*args, pool, tokens, scales)
        blank = np.zeros(pool.shape)
        _, plain = attention.by_hand(*args, blank, table, positions, valid)
        assert none is None
        assert got.dtype == jnp.uint8
        written = (plain != 0).any(axis=-1)
        assert written.any()
        assert (np.asarray(got)[~written] == np.asarray(pool)[~written]).all()
        if kind == "tokens":
            of_written = np.asarray(got_scales.k)[written]
            peaks = np.abs(plain[written]).max(axis=-1)
            assert (np.log2(of_written) % 1 == 0).all()
            assert (peaks <= 451 * of_written).all()  # the peak itself is a number in the dtype of the model
            assert (peaks > 222 * of_written).all()
        stored, limit = meaning(got, got_scales), 448 * 0.013 if kind == "heads" else np.inf
        close = 2**-4 if case.dtype == "float32" else 2**-4 + 2**-7  # half a spacing of e4m3, relative
        wanted = np.clip(plain, -limit, limit)[written]
        np.testing.assert_allclose(stored[written], wanted, rtol=1.01 * close, atol=0.013 if kind == "heads" else 2e-2)

    def test_both_ways_write_the_same_bytes_of_the_same_numbers(self):
        """Norms and rotations may differ in a last bit, and then a byte may be a neighbour of the other."""
        case = DECODED[2]
        (_, pool, queries), _ = attention.problem(case)
        pool, scales = in_bytes(np.zeros(pool.shape), "tokens")
        queries = queries._replace(table=np.where(np.asarray(queries.table) >= pool.shape[1], 0, queries.table))
        shape = *queries.positions.shape, case.rank + case.rotated + 24
        compressed = np.random.default_rng(2).normal(size=shape).astype(case.dtype)
        rotation = rotation_of(queries.positions, case)
        args = compressed, None, np.ones(case.rank, case.dtype), rotation, pool, queries, scales
        (_, got, _, of_got), (_, wanted, _, of_wanted) = self.write(*args), jax.jit(write_reference)(*args)
        assert (np.asarray(got) == np.asarray(wanted)).mean() > 0.995
        assert (np.asarray(of_got.k) == np.asarray(of_wanted.k)).mean() > 0.995


class TestUpProject:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        functions = (functools.partial(f, dtype=jnp.bfloat16) for f in (up_project_reference, up_project_kernel))
        self.up_project = implementation(*functions)

    numbers = np.array([3, 1, 9, 4, 0, 0, 0], np.int32)

    @pytest.mark.parametrize(
        ("case", "kind"),
        [*((case, None) for case in prefill.CASES), *itertools.product(EXPANDED, ("heads", "tokens"))],
        ids=str,
    )
    def test_equals_the_definition(self, case, kind):
        _, pool, _, maps = prefill.problem(case)
        pool, scales = jnp.nan_to_num(pool), None
        if kind is not None:
            pool, scales = in_bytes(np.asarray(pool, np.float32), kind)
        k, v = self.up_project(pool, self.numbers, np.int32(4), maps, scales)
        assert k.dtype == v.dtype == jnp.bfloat16
        meant = np.asarray(pool, np.float64) if scales is None else meaning(pool, scales)
        prefill.check_up_projected(case, k[:4], v[:4], meant[0, self.numbers[:4]])  # nobody has written the other pages

    def test_more_pages_than_listed_make_every_number_nan(self):
        _, pool, _, maps = prefill.problem(EXPANDED[0])
        for zeros, scales in ((jnp.zeros_like(pool), None), (np.zeros(pool.shape, np.uint8), OF_LATENTS)):
            for part in self.up_project(zeros, self.numbers, np.int32(8), maps, scales):
                assert np.isnan(np.asarray(part, np.float32)).all()


@KINDS
@pytest.mark.parametrize(
    "attend",
    [prefill.reference, pytest.param(prefill.kernel, marks=interpreted)],
    ids=["reference", "kernel"],
)
def test_prefill_equals_the_oracle_of_what_they_stand_for(attend, kind):
    q, pool, queries, maps = prefill.problem(EXPANDED[0])
    codes, scales = in_bytes(pool, kind)
    attend = attend if attend is prefill.kernel else jax.jit(attend)
    got, valid = np.asarray(attend(q, codes, queries, maps, scales), np.float64), np.asarray(queries.valid)
    wanted = prefill.oracle((q, meaning(codes, scales), queries), EXPANDED[0])
    assert np.abs(got - wanted)[valid].max() < 0.02


@KINDS
def test_a_causal_view_rounds_as_a_cache_does(kind):
    latents = jax.random.normal(jax.random.key(0), (2, 5, 48))
    view, scales = CausalView(jnp.zeros((2, 5), jnp.int32)), KVScales(np.ones((1, 0, 1), np.float32), None)
    empty = np.zeros((1, 0, 1, 48), np.uint8), None, scales if kind == "tokens" else OF_LATENTS
    got = jax.jit(lambda latents, *empty: view.round_latents(latents, LayerKV(*empty)))(latents, *empty)
    codes, scales = in_bytes(latents[None], kind)
    np.testing.assert_allclose(got, meaning(codes, scales)[0], rtol=1e-6)
    assert view.round_latents(latents, None) is latents


def rounded_pool(B, M, rank=512, rotated=64, P=64, kind="heads") -> LayerKV:
    """Shapes of a pool of bytes and its scales."""
    scale = jax.ShapeDtypeStruct((1,) if kind == "heads" else (1, 1 + B * M, P), jnp.float32)
    pool = jax.ShapeDtypeStruct((1, 1 + B * M, P, rank + rotated), jnp.uint8)
    return LayerKV(pool, None, KVScales(scale, None))  # pyright: ignore


@KINDS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (64, 4)])
def test_a_round_lowers_for_cuda(B, T, dtype, kind):
    text = for_cuda(*attention.round_of_latents(B, T, dtype, rounded_pool(B, 16, kind=kind)))
    merges = ["merge_splits"] if B * T < 100 else []
    assert sorted(kernels_of(text)) == ["attend_split", *merges, "norm_rope_write_kv"]
    assert "f8E4M3FN" not in text  # no numbers are made of pools


@KINDS
def test_prefill_lowers_for_hopper(kind, monkeypatch):
    monkeypatch.setattr("jspec.pallas.mla.prefill.on_hopper", lambda: True)
    q, _, queries, maps = prefill.shapes()
    kv = rounded_pool(64, 16, kind=kind)
    assert UP_PROJECTED.serves(q, kv.k, queries, maps)
    args = q, kv.k, queries, maps, kv.scales
    text = for_cuda(functools.partial(up_projected_attention, scale=0.1), args)
    assert kernels_of(text) == ["up_project"] * 2
    assert len(mosaic_kernels_of(text)) == 1
    assert "f8E4M3FN" not in text


@pytest.mark.gpu
@KINDS
def test_compiled_prefill_equals_the_oracle(kind):
    q, pool, queries, maps = prefill.problem(EXPANDED[0])
    codes, scales = in_bytes(pool, kind)
    got = np.asarray(up_projected_attention(q, codes, queries, maps, scales, scale=prefill.SCALE), np.float64)
    wanted, valid = prefill.oracle((q, meaning(codes, scales), queries), EXPANDED[0]), np.asarray(queries.valid)
    assert np.abs(got - wanted)[valid].max() < 0.02


def test_new_tokens_that_are_seen_before_they_are_rounded_would_be_noticed():
    """The error that rounding makes is far larger than what the tests above allow."""
    case = dataclasses.replace(DECODED[1], T=3)
    (q, pool, queries), _ = attention.problem(case)
    codes, scales = in_bytes(pool, "tokens")
    how = {"rank": case.rank, "scale": 0.1}
    attend = jax.jit(functools.partial(latent_attention_reference, **how))
    whole, of_bytes = (np.asarray(attend(q, *args)) for args in ((pool, queries), (codes, queries, scales)))
    assert np.abs(whole - of_bytes)[np.asarray(queries.valid)].max() > 1e-3
