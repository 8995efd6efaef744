"""Attention to keys and values that are computed from latents: segments of texts, and a float64 oracle."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from cuda_lowering import interpreted, shapes_of_queries
from matmul_rows import abstract_weight
from stored_head_maps import head_map

from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.mla.prefill import up_projected_attention_kernel, up_projected_attention_reference
from jspec.pallas.weights.head_maps import HeadMaps

T, N, SCALE = 128, 2, 0.1
FIRST, SECOND, EMPTY, LONG = range(4)  # rows: two segments of one text, no text, a text of which most was read before


@dataclasses.dataclass(frozen=True)
class Case:
    """The numbers of a head: not rotated, rotated, of a value; ``pages`` of P slots for each row; the numbers of a latent;
    and how maps are stored, as ``head_map`` names it."""

    own: int
    rotated: int
    value: int
    P: int = 64
    pages: int = 6
    rank: int = 64
    stored: str = "bfloat16"


CASES = [
    Case(64, 64, 128),
    Case(192, 64, 256, pages=5),  # GLM-4.7-Flash's, tiles of 64 slots
    Case(128, 64, 128, P=128, pages=3),  # DeepSeek-V3's
    Case(64, 64, 64, stored="int8"),
    Case(64, 64, 128, rank=320, stored="blocks"),  # the third group of numbers that share scales is not full
    Case(64, 64, 128, rank=192, stored="int4_32_float16_zeros_ordered"),
    Case(64, 64, 64, rank=128, stored="nvfp4"),
]


@functools.cache
def problem(case: Case):
    """Arguments in bfloat16; pages that no text has, and slots that no query sees, are NaN."""
    rng, S, P = np.random.default_rng(case.value), case.pages * case.P, case.P
    start = np.array([P, P + T, 0, S - T - 5])
    count = np.array([T, T // 2, 0, T])
    positions = (start[:, None] + np.arange(T)).astype(np.int32)
    valid = np.arange(T) < count[:, None]
    table = 1 + rng.permutation(4 * case.pages).reshape(4, case.pages)
    table[SECOND] = table[FIRST]
    pool = np.full((1, 1 + 4 * case.pages, P, case.rank + case.rotated), np.nan, "bfloat16")
    newest = np.where(valid, positions, -1).max(axis=1)
    newest[FIRST] = newest[SECOND]
    for b in (FIRST, LONG):
        text = rng.normal(size=(S, pool.shape[-1]))
        text[newest[b] + 1 :] = np.nan
        pool[0, table[b]] = text.reshape(case.pages, P, -1)
    live = np.arange(case.pages) * P <= np.where(valid, positions, -1).max(axis=1)[:, None]
    table = np.where(live, table, 2**30).astype(np.int32)
    q = rng.normal(size=(4, T, N, case.own + case.rotated)).astype("bfloat16")
    queries = PagedQueries(table, positions, valid)  # pyright: ignore[reportArgumentType]  # arrays soon
    return *jax.device_put((q, pool, queries)), stored_maps(case)[0]


@functools.cache
def stored_maps(case: Case) -> tuple[HeadMaps, list[np.ndarray]]:
    """Its maps to keys and to values, and what they stand for in float64."""
    found = [head_map(case.stored, N, size, case.rank) for size in (case.own, case.value)]
    return HeadMaps(*(of for of, _, _ in found)), [wide for _, wide, _ in found]


def oracle(args, case: Case):
    """float64 ``[B, T, N, Hv]`` by the definition; zeros for invalid query tokens."""
    q, pool, (table, positions, valid, _) = jax.tree.map(np.asarray, args[:3])
    keys, values = stored_maps(case)[1]
    out = np.zeros((*q.shape[:3], values.shape[1]))
    for b in np.flatnonzero(valid.any(axis=1)):
        text = np.asarray(pool[0][np.minimum(table[b], pool.shape[1] - 1)], np.float64).reshape(-1, pool.shape[-1])
        latent, rotated = np.split(text, [keys.shape[-1]], axis=1)
        own = np.einsum("sc,nhc->nsh", latent, keys)
        k = np.concatenate([own, np.broadcast_to(rotated, (N, *rotated.shape))], axis=-1)
        v = np.einsum("sc,nhc->nsh", latent, values)
        for t in np.flatnonzero(valid[b]):
            seen = slice(positions[b, t] + 1)
            scores = SCALE * np.einsum("nh,nsh->ns", np.asarray(q[b, t], np.float64), k[:, seen])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[b, t] = np.einsum("ns,nsh->nh", weights / weights.sum(axis=1, keepdims=True), v[:, seen])
    return out


def check_up_projected(case: Case, k, v, text):
    """That keys and values in bfloat16 are those of pages of latents and rotated keys, ``[pages, P, Ck + Hr]``."""
    k, v = (np.asarray(part, np.float64) for part in (k, v))
    keys, values = stored_maps(case)[1]
    latents, rotated = np.split(text, [case.rank], axis=-1)
    close = functools.partial(np.testing.assert_allclose, rtol=2**-7, atol=2**-7)
    close(k[..., : case.own], np.einsum("upc,nhc->upnh", latents, keys))
    close(v, np.einsum("upc,nhc->upnh", latents, values))
    wanted = rotated.astype(np.float32).astype("bfloat16")[:, :, None]
    np.testing.assert_array_equal(k[..., case.own :], np.broadcast_to(wanted, k[..., case.own :].shape))


def kernel(*args, **how):
    from jax.experimental.pallas.mosaic_gpu import InterpretGPUParams  # pyright: ignore  # not in jax 0.10

    return up_projected_attention_kernel(*args, scale=SCALE, instances=3, interpret=InterpretGPUParams(), **how)


reference = functools.partial(up_projected_attention_reference, scale=SCALE)
by_implementation = pytest.mark.parametrize(
    "attend", [reference, pytest.param(kernel, marks=interpreted)], ids=["reference", "kernel"]
)


def shapes(B=64, T=128, N=20, own=192, rotated=64, value=256, rank=512, P=64, dtype="bfloat16", kind="bfloat16"):
    array, M = jax.ShapeDtypeStruct, 1024 // P
    maps = HeadMaps(*(abstract_weight(kind, (N, n, rank)) for n in (own, value)))
    pool, queries = array((1, 1 + B * M, P, rank + rotated), dtype), array((B, T, N, own + rotated), dtype)
    return queries, pool, shapes_of_queries(B, T, M), maps
