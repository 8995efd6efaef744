"""Attention over cached latents: rows of texts, a float64 oracle, and what is written."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cuda_lowering import shapes_of_queries

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.pallas.attention.fp8 import KVScales
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.attention.tiling import AttentionTiling

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
    return jax.device_put((q, pool, PagedQueries(table, positions, valid))), text  # pyright: ignore  # arrays soon


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


SCALE = np.float32(0.013)


def in_bytes(pool, kind: str) -> tuple[np.ndarray, KVScales]:
    """A pool of latents as bytes, and their scales, by numpy; NaN where there was NaN."""
    numbers, scale = np.asarray(pool, np.float32), np.full(pool.shape[:3], SCALE)
    if kind == "tokens":
        peak = np.maximum(np.abs(numbers).max(axis=-1), 448 * 2.0**-64)
        scale = np.exp2(np.ceil(np.log2(peak / 448))).astype(np.float32)
    codes = np.clip(numbers / scale[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return codes, KVScales(scale if kind == "tokens" else scale[0, 0, :1], None)


def round_of_latents(B: int, T: int, dtype, kv: LayerKV):
    """A function that writes the latents of a round and attends to them, over 16 pages of 64 slots, and its arguments."""
    array = jax.ShapeDtypeStruct
    view = PagedView(*shapes_of_queries(B, T, 16)[:3])
    q, new = (array(shape, dtype) for shape in ((B, T, 20, 576), (B, T, 768 + 576)))
    weights, rotation = [array((768,), dtype), array((512,), dtype)], Rotation(*[array((B, T, 32), jnp.float32)] * 2)

    def function(view, q, new, weights, rotation, kv):
        vectors, kv = view.write_latent_kv(new, *weights, 1e-6, rotation, kv)
        return vectors, view.attend_latents(q, kv, 512, 0.1), kv

    return function, (view, q, new, weights, rotation, kv)
