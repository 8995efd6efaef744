"""Latents in eight bits: what is written, and that attention over them, and keys and values that are computed from them, are
those of the numbers that the bytes stand for; for reference implementations and kernels."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_mla_attention as attention
import test_mla_prefill as prefill
from cuda_lowering import for_cuda, kernels_of, mosaic_kernels_of, shapes_of_queries
from test_prefill_sm90 import interpreted

from jspec.config import Rope
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import CausalView, PagedView
from jspec.models.layers import rotation_at
from jspec.pallas.attention.fp8 import KVScales, decode, rounded
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.mla.attention import latent_attention_kernel, latent_attention_reference
from jspec.pallas.mla.norm_rope_write_kv import norm_rope_latents, norm_rope_write_kv_kernel
from jspec.pallas.mla.prefill import has_up_projected_attention_kernel, up_projected_attention
from jspec.pallas.mla.up_project import up_project_kernel, up_project_reference

OF_LATENTS = KVScales(jnp.array([0.013], jnp.float32), None)
KINDS = pytest.mark.parametrize("kind", ["heads", "tokens"])
DECODED = [attention.CASES[i] for i in (0, 1, 2, 5)]
EXPANDED = [prefill.CASES[0], prefill.CASES[4]]


def in_bytes(pool, kind: str) -> tuple[jax.Array, KVScales]:
    """A pool of latents as bytes, and their scales; NaN where there was NaN."""
    codes, of_tokens = rounded(jnp.moveaxis(pool, 0, 2), OF_LATENTS.k if kind == "heads" else None)
    scales = OF_LATENTS if of_tokens is None else KVScales(jnp.moveaxis(of_tokens, 2, 0), None)
    return jnp.moveaxis(codes, 2, 0), scales


def meaning(codes, scales: KVScales) -> np.ndarray:
    """float64, what the bytes of a pool stand for."""
    of_each = np.asarray(scales.k, np.float64).reshape(*(*scales.k.shape, 1, 1)[:3], 1)
    return np.asarray(decode(codes, jnp.float32), np.float64) * of_each


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
        table, positions, valid = jax.tree.map(np.asarray, queries)
        text = meaning(codes, scales)[0, np.where(table < pool.shape[1], table, 0)].reshape(len(q), -1, q.shape[-1])
        wanted = attention.oracle(case, q, text, positions, valid, 0.1)
        got = np.asarray(self.attend(case)(q, codes, queries, scales), np.float64)
        assert np.abs(got - wanted)[valid].max() < (1e-5 if case.dtype == "float32" else 0.02)

    @KINDS
    def test_nan_reaches_those_that_see_it(self, kind):
        case = DECODED[1]
        (q, pool, queries), _ = attention.problem(case)
        page = queries.table[0, 0]
        codes, scales = in_bytes(pool.at[0, page, 3, 5].set(jnp.nan), kind)
        got = self.attend(case)(q, codes, queries, scales)
        assert jnp.isnan(got[0] if kind == "tokens" else got[0, ..., 5]).all()
        assert jnp.isfinite(got[4]).all()


def write_reference(compressed, query_weight, latent_weight, rotation, pool, tokens, scales):
    q, latents = norm_rope_latents(compressed, query_weight, latent_weight, 1e-6, rotation)
    return q, *PagedView(*tokens).write(LayerKV(pool, None, scales), latents[:, :, None], None)


class TestWrite:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def kernel(*args, interpret=False):
            q, pool, *of_tokens = norm_rope_write_kv_kernel(*args[:3], 1e-6, *args[3:], interpret=interpret)
            return q, *LayerKV(args[4], None, args[6]).with_written(pool, None, *of_tokens)

        self.write = implementation(write_reference, kernel)

    @KINDS
    @pytest.mark.parametrize(("case", "queries"), [(DECODED[0], None), (DECODED[1], 24), (DECODED[2], 40)])
    def test_what_is_written_stands_for_the_nearest_numbers(self, case, queries, kind):
        (_, pool, (table, positions, valid)), _ = attention.problem(case)
        pool, scales = in_bytes(jnp.zeros_like(pool), kind)
        table = jnp.where(table >= pool.shape[1], 0, table).at[2, 0].set(0)
        (B, T), keys = positions.shape, jax.random.split(jax.random.key(case.T), 2)
        compressed = jax.random.normal(keys[0], (B, T, (queries or 24) + case.rank + case.rotated)).astype(case.dtype)
        compressed = compressed.at[0, 0, -1].set(300.0)  # a rotated key that is far larger than its latent
        query_weight = None if queries is None else jnp.ones(queries, case.dtype)
        latent_weight = (1 + jax.random.normal(keys[1], (case.rank,))).astype(case.dtype)
        rotation = rotation_at(positions, Rope(theta=100.0), case.rotated)
        tokens = PagedQueries(table, positions, valid)
        args = compressed, query_weight, latent_weight, rotation
        _, got, none, got_scales = self.write(*args, pool, tokens, scales)
        blank = jnp.zeros(pool.shape, jnp.float32)
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
        pool, scales = in_bytes(jnp.zeros_like(pool), "tokens")
        queries = queries._replace(table=jnp.where(queries.table >= pool.shape[1], 0, queries.table))
        shape = *queries.positions.shape, case.rank + case.rotated + 24
        compressed = jax.random.normal(jax.random.key(2), shape).astype(case.dtype)
        rotation = rotation_at(queries.positions, Rope(theta=100.0), case.rotated)
        args = compressed, None, jnp.ones(case.rank, case.dtype), rotation, pool, queries, scales
        (_, got, _, of_got), (_, wanted, _, of_wanted) = self.write(*args), write_reference(*args)
        assert (np.asarray(got) == np.asarray(wanted)).mean() > 0.995
        assert (np.asarray(of_got.k) == np.asarray(of_wanted.k)).mean() > 0.995


class TestUpProject:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        functions = (functools.partial(f, dtype=jnp.bfloat16) for f in (up_project_reference, up_project_kernel))
        self.up_project = implementation(*functions)

    numbers = jnp.array([3, 1, 9, 4, 0, 0, 0], jnp.int32)

    @KINDS
    @pytest.mark.parametrize("case", EXPANDED, ids=str)
    def test_equals_the_definition(self, case, kind):
        _, pool, _, maps = prefill.problem(case)
        pool, scales = in_bytes(jnp.nan_to_num(pool), kind)
        k, v = self.up_project(pool, self.numbers, jnp.int32(4), maps, scales)
        assert k.dtype == v.dtype == jnp.bfloat16
        text = meaning(pool, scales)[0, self.numbers[:4]]
        keys, values = prefill.in_float64(maps)
        latents, key = np.split(text, [case.rank], axis=-1)
        close = functools.partial(np.testing.assert_allclose, rtol=2**-7, atol=2**-7)
        k, v = (np.asarray(part[:4], np.float64) for part in (k, v))  # nobody has written the other pages
        close(k[..., : case.own], np.einsum("upc,nhc->upnh", latents, keys))
        close(v, np.einsum("upc,nhc->upnh", latents, values))
        wanted = jnp.asarray(key, jnp.float32).astype(jnp.bfloat16)[:, :, None]
        np.testing.assert_array_equal(k[..., case.own :], np.broadcast_to(wanted, k[..., case.own :].shape))

    def test_more_pages_than_listed_make_every_number_nan(self):
        _, pool, _, maps = prefill.problem(EXPANDED[0])
        codes = jnp.zeros(pool.shape, jnp.uint8)
        for part in self.up_project(codes, self.numbers, jnp.int32(8), maps, OF_LATENTS):
            assert jnp.isnan(part).all()


@KINDS
@pytest.mark.parametrize(
    "attend",
    [prefill.reference, pytest.param(prefill.kernel, marks=interpreted)],
    ids=["reference", "kernel"],
)
def test_prefill_equals_the_oracle_of_what_they_stand_for(attend, kind):
    q, pool, queries, maps = prefill.problem(EXPANDED[0])
    codes, scales = in_bytes(pool, kind)
    got, valid = np.asarray(attend(q, codes, queries, maps, scales), np.float64), np.asarray(queries.valid)
    wanted = prefill.oracle((q, meaning(codes, scales), queries, maps))
    assert np.abs(got - wanted)[valid].max() < 0.02


@KINDS
def test_a_causal_view_rounds_as_a_cache_does(kind):
    latents = jax.random.normal(jax.random.key(0), (2, 5, 48))
    empty = KVScales(jnp.ones((1, 0, 1)), None) if kind == "tokens" else OF_LATENTS
    got = CausalView(jnp.zeros((2, 5), jnp.int32)).round_latents(
        latents, LayerKV(jnp.zeros((1, 0, 1, 48)), None, empty)
    )
    codes, scales = in_bytes(latents[None], kind)
    np.testing.assert_allclose(got, meaning(codes, scales)[0], rtol=1e-6)
    assert CausalView(jnp.zeros((2, 5), jnp.int32)).round_latents(latents, None) is latents


def rounded_pool(B, M, rank=512, rotated=64, P=64, kind="heads") -> LayerKV:
    """Shapes of a pool of bytes and its scales."""
    scale = jax.ShapeDtypeStruct((1,) if kind == "heads" else (1, 1 + B * M, P), jnp.float32)
    pool = jax.ShapeDtypeStruct((1, 1 + B * M, P, rank + rotated), jnp.uint8)
    return LayerKV(pool, None, KVScales(scale, None))  # pyright: ignore


@KINDS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (64, 4)])
def test_a_round_lowers_for_cuda(B, T, dtype, kind):
    array, M = jax.ShapeDtypeStruct, 16
    view, kv = PagedView(*shapes_of_queries(B, T, M)), rounded_pool(B, M, kind=kind)
    q, new = (array(shape, dtype) for shape in ((B, T, 20, 576), (B, T, 768 + 576)))
    weights, rotation = [array((768,), dtype), array((512,), dtype)], Rotation(*[array((B, T, 32), jnp.float32)] * 2)

    def function(view, q, new, weights, rotation, kv):
        vectors, kv = view.write_latent_kv(new, *weights, 1e-6, rotation, kv)
        return vectors, view.attend_latents(q, kv, 512, 0.1), kv

    text = for_cuda(function, (view, q, new, weights, rotation, kv))
    merges = ["merge_splits"] if B * T < 100 else []
    assert sorted(kernels_of(text)) == ["attend_split", *merges, "norm_rope_write_kv"]
    assert "f8E4M3FN" not in text  # no numbers are made of pools


@KINDS
def test_prefill_lowers_for_hopper(kind):
    q, _, queries, maps = prefill.shapes()
    kv = rounded_pool(64, 16, kind=kind)
    assert has_up_projected_attention_kernel(q, kv.k, queries, maps)
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
    wanted, valid = prefill.oracle((q, meaning(codes, scales), queries, maps)), np.asarray(queries.valid)
    assert np.abs(got - wanted)[valid].max() < 0.02


def test_new_tokens_that_are_seen_before_they_are_rounded_would_be_noticed():
    """The error that rounding makes is far larger than what the tests above allow."""
    case = dataclasses.replace(DECODED[1], T=3)
    (q, pool, queries), _ = attention.problem(case)
    codes, scales = in_bytes(pool, "tokens")
    how = {"rank": case.rank, "scale": 0.1}
    difference = latent_attention_reference(q, pool, queries, **how) - latent_attention_reference(
        q, codes, queries, scales, **how
    )
    assert np.abs(np.asarray(difference))[np.asarray(queries.valid)].max() > 1e-3
