"""Attention over latents against a float64 oracle that reads the text slot by slot, for its reference implementation and
its kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import Rope
from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.models.layers import rotation_at
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.attention.tiling import AttentionTiling
from jspec.pallas.mla.attention import has_kernel, latent_attention_kernel, latent_attention_reference
from jspec.pallas.mla.norm_rope_write_kv import norm_rope_latents, norm_rope_write_kv_kernel

SMALL = AttentionTiling(tile_bytes=4096, queries=16, instances=64)  # several splits, tiles and blocks of rows
MANY_SPLITS = AttentionTiling(
    tile_bytes=512, queries=16, instances=5 * 128
)  # more than are merged at once, of rows of five
SHARED = AttentionTiling(tile_bytes=4096, instances=1, split_slots=32, max_splits=4)  # only long rows are split


@dataclasses.dataclass(frozen=True)
class Case:
    """T query tokens of N heads; ``pages`` of P slots a row."""

    T: int
    N: int
    rank: int
    rotated: int
    P: int
    pages: int
    dtype: str = "float32"
    tiling: AttentionTiling = SMALL

    def __str__(self):
        return f"T{self.T} N{self.N} {self.rank}+{self.rotated} P{self.P} {self.dtype}"


CASES = [
    Case(T=1, N=5, rank=32, rotated=16, P=16, pages=5),
    Case(T=5, N=3, rank=64, rotated=16, P=24, pages=4),
    Case(
        T=4,
        N=20,
        rank=512,
        rotated=64,
        P=64,
        pages=3,
        dtype="bfloat16",
        tiling=AttentionTiling(tile_bytes=36864, queries=32),
    ),
    Case(T=1, N=20, rank=512, rotated=64, P=64, pages=3, dtype="bfloat16", tiling=SHARED),
    Case(T=1, N=2, rank=256, rotated=16, P=16, pages=70, tiling=MANY_SPLITS),
    Case(T=33, N=2, rank=64, rotated=32, P=16, pages=8, dtype="bfloat16"),
]


@functools.cache
def problem(case: Case):
    """Rows whose texts are long, over, at the end of their table, partly invalid, and new; what no query may see is NaN."""
    rng, T, S = np.random.default_rng(case.T), case.T, case.pages * case.P
    ends = np.array([S - case.P // 2 - 1, S // 2, S + (T > 1), S - 3, T])  # one past the last query
    positions = (ends[:, None] - T + np.arange(T)).astype(np.int32)
    valid = (positions >= 0) & (positions < S)
    valid[1] = False
    valid[3, (T + 1) // 2 :] = False
    newest, B, H = np.where(valid, positions, -1).max(axis=1), len(ends), case.rank + case.rotated
    q = rng.normal(size=(B, T, case.N, H)).astype(case.dtype)
    text = rng.normal(size=(B, S, H)).astype(case.dtype)
    table = 1 + rng.permutation(B * case.pages).reshape(B, case.pages)
    pool = np.full((1, 1 + table.size, case.P, H), np.nan, text.dtype)
    known = np.where((np.arange(S) <= newest[:, None])[:, :, None], text, text.dtype.type(np.nan))
    pool[0, table] = known.reshape(*table.shape, case.P, H)
    table = np.where(np.arange(case.pages) * case.P <= newest[:, None], table, 2**30).astype(np.int32)
    return jax.tree.map(jnp.asarray, (q, pool, PagedQueries(table, positions, valid))), text  # pyright: ignore  # arrays soon


def oracle(case: Case, q, text, positions, valid, scale: float):
    """float64 ``[B, T, N, Ck]``; zeros for invalid query tokens."""
    q, text = (np.asarray(x, np.float64) for x in (q, text))
    out = np.zeros((*q.shape[:3], case.rank))
    for b, t in np.argwhere(valid):
        seen = text[b, : positions[b, t] + 1]
        scores = scale * q[b, t] @ seen.T
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[b, t] = weights / weights.sum(axis=1, keepdims=True) @ seen[:, : case.rank]
    return out


class TestLatentAttention:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.attend = lambda case, scale: implementation(
            functools.partial(latent_attention_reference, rank=case.rank, scale=scale),
            functools.partial(latent_attention_kernel, rank=case.rank, scale=scale, tiling=case.tiling),
        )

    @pytest.mark.parametrize("scale", [0.1, 0.02])
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_equals_the_oracle(self, case, scale):
        args, text = problem(case)
        q, _, (_, positions, valid) = jax.tree.map(np.asarray, args)
        got = np.asarray(self.attend(case, scale)(*args), np.float64)
        wanted = oracle(case, q, text, positions, valid, scale)
        error = np.abs(got - wanted)[valid].max()
        assert error < (1e-5 if case.dtype == "float32" else 0.02)

    def test_neighbours_change_nothing(self):
        """Each row alone gives the same bits as among others."""
        case = CASES[1]
        args, _ = problem(case)
        q, pool, queries = args
        attend = jax.jit(self.attend(case, 0.1))
        together = attend(*args)
        other = attend(q[::-1], pool, PagedQueries(*(x[::-1] for x in queries)))[::-1]
        keep = np.asarray(queries.valid)
        np.testing.assert_array_equal(np.asarray(together)[keep], np.asarray(other)[keep])


def write_reference(compressed, query_weight, latent_weight, eps, rotation, pool, tokens):
    """What ``norm_rope_write_kv_kernel`` does, composed of the functions that define it."""
    q, latents = norm_rope_latents(compressed, query_weight, latent_weight, eps, rotation)
    return q, PagedView(*tokens).write(LayerKV(pool, None), latents[:, :, None], None).k


class TestNormRopeWriteKV:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        self.norm_rope_write = implementation(
            functools.partial(write_reference, eps=1e-6), functools.partial(norm_rope_write_kv_kernel, eps=1e-6)
        )

    @pytest.mark.parametrize("queries", [None, 24, 40])
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_equals_numpy(self, case, queries):
        """A row at the end of its table, rows with invalid tokens, and null pages, into which nothing is written."""
        (_, pool, (table, positions, valid)), _ = problem(case)
        pool = jnp.nan_to_num(pool)
        table = jnp.where(table >= pool.shape[1], 0, table).at[2, 0].set(0)
        (B, T), keys = positions.shape, jax.random.split(jax.random.key(case.T), 3)
        width = (queries or 24) + case.rank + case.rotated
        compressed = jax.random.normal(keys[0], (B, T, width)).astype(case.dtype)
        query_weight = None if queries is None else (1 + jax.random.normal(keys[1], (queries,))).astype(case.dtype)
        latent_weight = (1 + jax.random.normal(keys[2], (case.rank,))).astype(case.dtype)
        rotation = rotation_at(positions, Rope(theta=100.0), case.rotated)
        write = functools.partial(self.norm_rope_write, compressed, query_weight, latent_weight)
        q, actual = write(rotation=rotation, pool=pool, tokens=PagedQueries(table, positions, valid))
        wanted_q, wanted = by_hand(compressed, query_weight, latent_weight, rotation, pool, table, positions, valid)
        tolerance = 1e-5 if case.dtype == "float32" else 0.04
        np.testing.assert_allclose(np.asarray(q, np.float64), wanted_q, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(np.asarray(actual, np.float64), wanted, rtol=tolerance, atol=tolerance)
        assert (wanted != np.asarray(pool, np.float64)).any()


def by_hand(compressed, query_weight, latent_weight, rotation, pool, table, positions, valid):
    """Vectors of queries and the pool, in float64."""
    x, pool = np.asarray(compressed, np.float64), np.array(pool, np.float64)
    rank, half, P = latent_weight.shape[0], rotation.cos.shape[-1], pool.shape[2]
    q, latent, key = np.split(x, [x.shape[-1] - rank - 2 * half, x.shape[-1] - 2 * half], axis=-1)

    def normed(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * np.asarray(weight, np.float64)

    cos, sin = (np.asarray(angle, np.float64) for angle in rotation)
    a, b = key[..., :half], key[..., half:]
    written = np.concatenate([normed(latent, latent_weight), a * cos - b * sin, b * cos + a * sin], axis=-1)
    for row, t in np.argwhere(np.asarray(valid)):
        index, slot = divmod(int(positions[row, t]), P)
        if index < table.shape[1] and table[row, index] != 0:
            pool[0, int(table[row, index]), slot] = written[row, t]
    return q if query_weight is None else normed(q, query_weight), pool


@pytest.mark.parametrize(
    ("rank", "rotated", "dtype", "known"),
    [
        (512, 64, "bfloat16", True),
        (32, 16, "float32", True),
        (24, 16, "float32", False),
        (512, 8, "bfloat16", False),
        (1024, 64, "bfloat16", False),
        (512, 64, "float16", False),
    ],
)
def test_the_kernel_is_for_powers_of_two(rank, rotated, dtype, known):
    H = rank + rotated
    q, pool = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, 1, 4, H), (1, 3, 16, H)))
    assert has_kernel(q, pool, rank) is known
