"""Attention over pages: rows of texts, a float64 oracle, and the arguments of a round, which writes first."""

import dataclasses
import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.models.ragged_view import RaggedView
from jspec.pallas.attention.fp8 import KVScales, rounded
from jspec.pallas.attention.parts import Parts
from jspec.pallas.attention.reference import Rotation
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.tiling import AttentionTiling, tiling_of

G = 2
LIVE, DEAD, FULL, SHORT, EARLY, ONE = range(6)  # rows of a problem
SMALL_PARTS = Parts(32, steps=1)
SMALL = AttentionTiling(
    tile_bytes=4096, queries=16, instances=64, split_slots=64, parts=Parts(64)
)  # several splits, tiles, blocks of rows
WHOLE = AttentionTiling(instances=1)  # nothing is split
LARGE = tiling_of("bfloat16", 512)
SHARED = AttentionTiling(  # only long rows are split; one instance merges some parts, and others store theirs
    tile_bytes=4096, instances=1, split_slots=64, max_splits=3, parts=SMALL_PARTS
)
MERGED = AttentionTiling(
    tile_bytes=4096, queries=16, instances=1, split_slots=64, max_splits=1, parts=SMALL_PARTS
)  # all parts by one instance


@dataclass(frozen=True)
class Case:
    """T queries of R heads per KV head; ``pages`` of P slots a row.

    ``rotary`` numbers of a head are rotated; None is all of them. The sinks of heads lie around ``sink``; None is no
    sinks."""

    T: int
    R: int
    H: int
    P: int
    pages: int
    window: int | None = None
    dtype: str = "float32"
    tiling: AttentionTiling = SMALL
    scale: float | None = None
    softcap: float | None = None
    rotary: int | None = None
    sink: float | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The sinks are ``[N]`` in the dtype of the case."""
        spec = AttentionSpec(self.window, self.scale, self.softcap)
        if self.sink is None:
            return spec
        sinks = self.sink + np.random.default_rng(self.T).normal(size=G * self.R)
        return replace(spec, sinks=jnp.asarray(sinks.astype(jnp.dtype(self.dtype))))

    def __str__(self):
        named = f"T{self.T} R{self.R} H{self.H} P{self.P} W{self.window} {self.dtype}"
        own = "" if self.scale is self.softcap is None else f" scale {self.scale} cap {self.softcap}"
        own += "" if self.rotary is None else f" rotary {self.rotary}"
        return named + own + ("" if self.sink is None else f" sink {self.sink}")


CASES = [
    Case(T=1, R=1, H=64, P=16, pages=6),
    Case(T=1, R=4, H=128, P=64, pages=3, dtype="bfloat16"),
    Case(T=5, R=4, H=128, P=64, pages=3, dtype="bfloat16", tiling=WHOLE),
    Case(T=5, R=4, H=64, P=16, pages=9, window=3),
    Case(T=5, R=7, H=64, P=24, pages=5, window=33, dtype="bfloat16"),
    Case(T=5, R=1, H=128, P=64, pages=4, window=1, dtype="bfloat16"),
    Case(T=9, R=8, H=64, P=64, pages=3),
    Case(T=9, R=4, H=128, P=16, pages=7, window=70, tiling=AttentionTiling()),
    Case(T=40, R=2, H=16, P=16, pages=8, window=20, dtype="bfloat16"),
    Case(T=5, R=4, H=64, P=16, pages=9, tiling=SHARED),
    Case(T=1, R=4, H=128, P=64, pages=5, dtype="bfloat16", tiling=SHARED),
    Case(T=5, R=7, H=64, P=24, pages=5, window=33, sink=1.0, tiling=MERGED),
    Case(T=5, R=2, H=64, P=16, pages=9, scale=0.3, softcap=2.0, rotary=48),
    Case(T=5, R=2, H=256, P=64, pages=3, window=40, dtype="bfloat16", softcap=3.0, rotary=0),
    Case(T=3, R=4, H=32, P=16, pages=5, dtype="bfloat16", scale=0.05, rotary=16, tiling=WHOLE),
    Case(T=5, R=8, H=512, P=64, pages=2, dtype="bfloat16", scale=0.05, tiling=LARGE),
    Case(T=5, R=4, H=64, P=16, pages=9, sink=1.0),
    Case(T=5, R=7, H=64, P=24, pages=5, window=33, dtype="bfloat16", sink=3.0),
    Case(T=1, R=8, H=64, P=64, pages=5, dtype="bfloat16", tiling=SHARED, sink=2.0),
    Case(T=3, R=4, H=32, P=16, pages=5, window=20, scale=0.05, softcap=2.0, tiling=WHOLE, sink=0.0),
]


@functools.cache
def problem(case: Case, spread: float = 1.0):
    """Rows whose texts are long, over, at the end of their table, with queries that are invalid behind or before, and
    new."""
    T, S = case.T, case.pages * case.P
    ends = np.array([S - case.P // 2 - 1, S // 2, S + (T > 1), S - 3, T - 1, 1])  # one past the last query
    args, text, (positions, valid) = rows_of_queries(case, ends - T, spread)
    return args, oracle(case, *(np.asarray(x, np.float64) for x in (args[0], *text)), positions, valid)


def rows_of_queries(case: Case, first, spread: float = 1.0):
    """Rows whose first query tokens have the slots ``first``, ``[B]``: the arguments of attention, keys and values
    of the texts ``[2, G, B, S, H]``, and positions and which query tokens are valid.

    Pages lie scattered; what no query may see, and the null page, is NaN, and table entries past the text are no pages.
    """
    rng, T, S = np.random.default_rng(case.T), case.T, case.pages * case.P
    positions = (first[:, None] + np.arange(T)).astype(np.int32)
    valid = (positions >= 0) & (positions < S)
    valid[DEAD] = False
    valid[SHORT, (T + 1) // 2 :] = False
    newest = np.where(valid, positions, -1).max(axis=1)

    B = len(first)
    q = (spread * rng.normal(size=(B, T, G * case.R, case.H))).astype(case.dtype)
    text = rng.normal(size=(2, G, B, S, case.H)).astype(case.dtype)
    table = 1 + rng.permutation(B * case.pages).reshape(B, case.pages)
    pools = np.full((2, G, 1 + table.size, case.P, case.H), np.nan, text.dtype)
    known = (np.arange(S) <= newest[:, None])[:, :, None]
    pools[:, :, table] = np.where(known, text, pools.dtype.type(np.nan)).reshape(2, G, *table.shape, case.P, case.H)
    table = np.where(np.arange(case.pages) * case.P <= newest[:, None], table, 2**30).astype(np.int32)
    args = jax.device_put((q, *pools, PagedQueries(table, positions, valid)))  # pyright: ignore  # arrays soon
    return args, text, (positions, valid)


def oracle(case, q, k, v, positions, valid):
    """float64 ``[2, B, T, N, H]``: the result, and what it would be of |v|; zeros for invalid queries."""
    out, sinks = np.zeros((2, *q.shape)), None if case.sink is None else np.asarray(case.spec.sinks, np.float64)
    for b, t in np.argwhere(valid):
        p = positions[b, t]
        seen = slice(0 if case.window is None else max(0, p - case.window + 1), p + 1)
        for n in range(q.shape[2]):
            scores = k[n // case.R, b, seen] @ q[b, t, n] * (case.scale or case.H**-0.5)
            if (cap := case.softcap) is not None:
                scores = cap * np.tanh(scores / cap)
            values = v[n // case.R, b, seen]
            if sinks is not None:
                scores, values = np.append(scores, sinks[n]), np.vstack([values, np.zeros(case.H)])
            weights = np.exp(scores - scores.max())
            out[:, b, t, n] = weights @ values / weights.sum(), weights @ abs(values) / weights.sum()
    return out


def assert_agrees(got, args, wanted, magnitude):
    valid, dtype = np.asarray(args[-1].valid), args[0].dtype
    assert got.dtype == dtype
    error = np.abs(np.asarray(got, np.float64) - np.asarray(wanted, np.float64))[valid]
    # bfloat16 rounds each weight, and then the result, by at most 2^-8 of itself; everything else is fp32.
    rounding = 2**-7 * np.asarray(magnitude, np.float64)[valid] if dtype == jnp.bfloat16 else 0.0
    assert (error <= rounding + 1e-5).all(), (error - rounding).max()


def assert_nan_stays_in_its_row(attend, case: Case):
    """A NaN in a key or a value that a query sees reaches all query tokens of its row that share it, and nothing else."""
    args, wanted = problem(case)
    page = args[3].table[LIVE, 0]
    for broken in (1, 2):
        poisoned = list(args)
        poisoned[broken] = args[broken].at[0, page, 3].set(jnp.nan)
        got = attend(case, poisoned)
        assert jnp.isnan(got[LIVE, :, : case.R]).all()
        restored = got.at[LIVE, :, : case.R].set(wanted[0, LIVE, :, : case.R].astype(got.dtype))
        assert_agrees(restored, args, *wanted)


@functools.cache
def arguments(case: Case):
    """The rows of the attention tests, their newest tokens not in the cache yet, which holds NaN from there on."""
    (_, *pools, queries), _ = problem(case)
    return _arguments(case, *pools, queries)


@functools.partial(jax.jit, static_argnums=0)
def _arguments(case: Case, k_pool, v_pool, queries: PagedQueries):
    table, positions, live = queries[:3]
    keys = jax.random.split(jax.random.key(case.T), 2)
    (B, T), P = positions.shape, case.P
    qkv = jax.random.normal(keys[0], (B, T, G * (case.R + 2), case.H)).astype(case.dtype)
    angles = 6 * jax.random.uniform(keys[1], (B, T, (case.H if case.rotary is None else case.rotary) // 2))
    rotation = None if case.rotary == 0 else Rotation(jnp.cos(angles), jnp.sin(angles))
    table = jnp.where(table < k_pool.shape[1], table, 0)  # pages that no request has yet are the null page
    page = jnp.take_along_axis(table, jnp.clip(positions // P, 0, table.shape[1] - 1), axis=1)
    page = jnp.where(live, page, k_pool.shape[1])
    unwritten = [pool.at[:, page, positions % P].set(jnp.nan, mode="drop") for pool in (k_pool, v_pool)]
    return qkv, rotation, LayerKV(*unwritten), PagedView(table, positions, live)


def ragged_arguments(case: Case, padding: int):
    """``arguments`` with the valid tokens of all rows side by side, and padding behind them."""
    return _ragged(arguments(case), int(arguments(case)[-1].valid.sum()) + padding)


@functools.partial(jax.jit, static_argnums=1)
def _ragged(arguments, size: int):
    qkv, rotation, kv, view = arguments
    order = jnp.argsort(~view.valid, axis=1, stable=True)  # a row's valid tokens come first
    row = jnp.arange(len(order))[:, None]
    qkv, rotation = jax.tree.map(lambda x: x[row, order], (qkv, rotation))
    view = dataclasses.replace(view, positions=view.positions[row, order], valid=view.valid[row, order])
    ragged = RaggedView.of(view, size)
    return ragged.from_rows(qkv), jax.tree.map(ragged.from_rows, rotation), kv, ragged


OF_HEADS = KVScales(jnp.array([0.03, 0.011], jnp.float32), jnp.array([0.02, 0.4], jnp.float32))


@functools.partial(jax.jit, static_argnums=1)
def in_bytes(kv: LayerKV, kind: str) -> LayerKV:
    """The keys and values of ``arguments`` as bytes; what nobody wrote is NaN."""
    if kind == "heads":
        codes = [
            jnp.moveaxis(rounded(jnp.moveaxis(x, 0, 2), s)[0], 2, 0) for x, s in zip(kv[:2], OF_HEADS, strict=True)
        ]
        return LayerKV(*codes, OF_HEADS)
    codes, scales = zip(*(rounded(jnp.moveaxis(x, 0, 2), None) for x in kv[:2]), strict=True)
    return LayerKV(*(jnp.moveaxis(c, 2, 0) for c in codes), KVScales(*(jnp.moveaxis(s, 2, 0) for s in scales)))
