"""paged_attention against a float64 oracle that reads the text slot by slot, for its reference implementation and its
kernel."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import shapes_of_queries

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.pallas.attention.flash import AttentionLaunch
from jspec.pallas.attention.paged import paged_attention, paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.tiling import AttentionTiling, tiling_of

G = 2
LIVE, DEAD, FULL, SHORT, EARLY, ONE = range(6)  # rows of a problem
SMALL = AttentionTiling(tile_bytes=4096, queries=16, instances=64)  # several splits, tiles and blocks of rows
WHOLE = AttentionTiling(instances=1)  # nothing is split
LARGE = tiling_of("bfloat16", 512)
SHARED = AttentionTiling(tile_bytes=4096, instances=1, split_slots=32, max_splits=4)  # only long rows are split


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
        sinks = self.sink + jax.random.normal(jax.random.key(self.T), (G * self.R,))
        return replace(spec, sinks=sinks.astype(self.dtype))

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
    new.

    Pages lie scattered; what no query may see, and the null page, is NaN, and table entries past the text are no pages.
    """
    rng, T, S = np.random.default_rng(case.T), case.T, case.pages * case.P
    ends = np.array([S - case.P // 2 - 1, S // 2, S + (T > 1), S - 3, T - 1, 1])  # one past the last query
    positions = (ends[:, None] - T + np.arange(T)).astype(np.int32)
    valid = (positions >= 0) & (positions < S)
    valid[DEAD] = False
    valid[SHORT, (T + 1) // 2 :] = False
    newest = np.where(valid, positions, -1).max(axis=1)

    B = len(ends)
    q = (spread * rng.normal(size=(B, T, G * case.R, case.H))).astype(case.dtype)
    text = rng.normal(size=(2, G, B, S, case.H)).astype(case.dtype)
    table = 1 + rng.permutation(B * case.pages).reshape(B, case.pages)
    pools = np.full((2, G, 1 + table.size, case.P, case.H), np.nan, text.dtype)
    known = (np.arange(S) <= newest[:, None])[:, :, None]
    pools[:, :, table] = np.where(known, text, pools.dtype.type(np.nan)).reshape(2, G, *table.shape, case.P, case.H)
    table = np.where(np.arange(case.pages) * case.P <= newest[:, None], table, 2**30).astype(np.int32)
    args = jax.tree.map(jnp.asarray, (q, *pools, PagedQueries(table, positions, valid)))  # pyright: ignore  # arrays soon
    return args, oracle(case, *(np.asarray(x, np.float64) for x in (q, *text)), positions, valid)


def oracle(case, q, k, v, positions, valid):
    """float64 ``[2, B, T, N, H]``: the result, and what it would be of |v|; zeros for invalid queries."""
    out, sinks = np.zeros((2, *q.shape)), case.spec.sinks
    for b, t in np.argwhere(valid):
        p = positions[b, t]
        seen = slice(0 if case.window is None else max(0, p - case.window + 1), p + 1)
        for n in range(q.shape[2]):
            scores = k[n // case.R, b, seen] @ q[b, t, n] * (case.scale or case.H**-0.5)
            if (cap := case.softcap) is not None:
                scores = cap * np.tanh(scores / cap)
            values = v[n // case.R, b, seen]
            if sinks is not None:
                scores, values = np.append(scores, float(sinks[n])), np.vstack([values, np.zeros(case.H)])
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


class TestPagedAttention:
    @pytest.fixture(autouse=True)
    def choose_implementation(self, implementation):
        def attend(case: Case, args):
            kernel = functools.partial(paged_attention_kernel, tiling=case.tiling)
            return implementation(paged_attention_reference, kernel)(*args, case.spec)

        self.attend = attend

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_agrees_with_the_oracle(self, case):
        args, wanted = problem(case)
        assert_agrees(self.attend(case, args), args, *wanted)

    def test_a_nan_that_a_query_sees_reaches_it_and_no_other_row(self):
        """So that a broken model is reported as such."""
        case = Case(T=5, R=4, H=64, P=16, pages=8)
        args, wanted = problem(case)
        page = args[3].table[LIVE, 0]
        for broken in (1, 2):
            poisoned = list(args)
            poisoned[broken] = args[broken].at[0, page, 3].set(jnp.nan)
            got = self.attend(case, poisoned)
            assert jnp.isnan(got[LIVE, :, : case.R]).all()
            assert_agrees(got.at[LIVE, :, : case.R].set(wanted[0, LIVE, :, : case.R]), args, *wanted)

    @pytest.mark.parametrize("sink", [None, 1.0])
    def test_scores_far_apart_stay_finite(self, sink):
        case = Case(T=5, R=4, H=64, P=16, pages=6, sink=sink)
        args, wanted = problem(case, 1e4)
        assert_agrees(self.attend(case, args), args, *wanted)

    @pytest.mark.parametrize("tiling", [SMALL, WHOLE], ids=["split", "whole"])
    def test_sinks_that_have_nearly_all_the_weight(self, tiling):
        """What is left for the keys is tiny, and right relative to its own size."""
        case = Case(T=5, R=4, H=64, P=16, pages=6, window=40, sink=20.0, tiling=tiling)
        args, (wanted, magnitude) = problem(case)
        valid = np.asarray(args[-1].valid)
        error = abs(np.asarray(self.attend(case, args), np.float64) - wanted)[valid]
        assert magnitude[valid].max() < 1e-4
        assert (error <= 1e-4 * magnitude[valid]).all()

    @pytest.mark.parametrize("tiling", [SMALL, WHOLE], ids=["split", "whole"])
    def test_sinks_that_have_no_weight_change_nothing(self, tiling):
        case = Case(T=5, R=4, H=64, P=16, pages=6, tiling=tiling)
        args, _ = problem(case)
        valid = np.asarray(args[-1].valid)
        got, wanted = (np.asarray(self.attend(variant, args))[valid] for variant in (replace(case, sink=-20.0), case))
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("sink", [None, 1.0])
@pytest.mark.parametrize("tiling", [SMALL, WHOLE], ids=["split", "whole"])
def test_the_kernel_gives_zeros_to_queries_that_are_invalid_or_off_the_table(tiling, sink):
    case = Case(T=5, R=4, H=64, P=16, pages=6, sink=sink)
    args, wanted = problem(case)
    invalid = ~np.asarray(args[-1].valid)
    assert invalid[DEAD].all()
    assert invalid[FULL].tolist() == [False] * 4 + [True]
    claimed = args[-1]._replace(valid=args[-1].valid.at[FULL].set(True))
    got = paged_attention_kernel(*args[:-1], claimed, case.spec, tiling=tiling, interpret=True)
    np.testing.assert_array_equal(got[invalid], 0)
    assert_agrees(got, args, *wanted)


def test_long_texts_alone_split_rows_of_a_large_batch():
    pool = jax.ShapeDtypeStruct((8, 100, 64, 128), jnp.bfloat16)

    def splits(B, T, M, window=None):
        launch = AttentionLaunch.of(shapes_of_queries(B, T, M), 32, pool, AttentionSpec(window), AttentionTiling())
        return launch.min_splits, launch.num_splits

    assert splits(16, 5, 16) == (1, 1)
    assert splits(16, 5, 512) == (1, 8)
    assert splits(1, 5, 512) == (16, 16)
    assert splits(16, 5, 512, window=100) == splits(64, 32, 512) == (1, 1)  # short at any length; a prefill pass


@pytest.mark.parametrize(
    ("cells", "tiles", "splits"), [(8, 16, 16), (8, 256, 32), (128, 16, 2), (512, 16, 1), (8, 3, 4), (8, 1, 1)]
)
def test_one_row_fills_the_gpu_and_many_rows_are_not_split(cells, tiles, splits):
    assert AttentionTiling(instances=264).num_splits(cells, tiles) == splits


def test_a_view_attends_by_the_reference_on_a_cpu():
    case = Case(T=5, R=4, H=64, P=16, pages=9, window=3, sink=1.0)
    (q, k, v, queries), _ = problem(case)
    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(lambda view, *args: view.attend(*args))(PagedView(*queries), q, LayerKV(k, v), case.spec)
        wanted = jax.jit(paged_attention_reference)(q, k, v, queries, case.spec)
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 16])
@pytest.mark.parametrize("T", [1, 5, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_real_sizes_agree_on_a_gpu_whose_memory_holds_nan(B, T, dtype):
    case = Case(T=T, R=4, H=128, P=64, pages=16, dtype=dtype)
    keys = jax.random.split(jax.random.key(B + T), 5)
    pages = 1 + B * case.pages
    q = jax.random.normal(keys[0], (B, T, 8 * case.R, case.H)).astype(dtype)
    k, v = (jax.random.normal(key, (8, pages, case.P, case.H)).astype(dtype) for key in keys[1:3])
    table = 1 + jax.random.permutation(keys[3], pages - 1).reshape(B, case.pages).astype(jnp.int32)
    newest = jax.random.randint(keys[4], (B, 1), T - 1, case.pages * case.P)
    positions = newest - jnp.arange(T)[None, ::-1]
    args = q, k, v, PagedQueries(table, positions, jnp.ones((B, T), bool))
    exact = jax.jit(functools.partial(paged_attention_reference, spec=case.spec))
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    wanted, magnitude = exact(q, k, v, *args[3:]), exact(q, k, jnp.abs(v), *args[3:])
    jnp.full(2**28, jnp.nan).block_until_ready().delete()  # the kernel's outputs will lie there
    got = jax.jit(functools.partial(paged_attention, spec=case.spec))(*args)
    assert_agrees(got, args, wanted, magnitude)
