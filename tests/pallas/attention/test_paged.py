"""paged_attention against a float64 oracle that reads the text slot by slot, for its reference implementation and its
kernel."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import shapes_of_queries
from paged_problems import (
    CASES,
    DEAD,
    FULL,
    MERGED,
    SHARED,
    SMALL,
    SMALL_PARTS,
    WHOLE,
    Case,
    assert_agrees,
    assert_nan_stays_in_its_row,
    problem,
)

from jspec.models.cache_pools import LayerKV
from jspec.models.kv_cache import PagedView
from jspec.pallas.attention import flash
from jspec.pallas.attention.flash import AttentionLaunch
from jspec.pallas.attention.merge_splits import merge_splits
from jspec.pallas.attention.paged import paged_attention_kernel, paged_attention_reference
from jspec.pallas.attention.parts import PARTS, Parts
from jspec.pallas.attention.spec import AttentionSpec, PagedQueries
from jspec.pallas.attention.table import paged_attention
from jspec.pallas.attention.tiling import AttentionTiling


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
        assert_nan_stays_in_its_row(self.attend, Case(T=5, R=4, H=64, P=16, pages=8))

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


def _bits_of_equal_scores(tiling: AttentionTiling, tokens=slice(None), **how) -> np.ndarray:
    """What the kernel gives if each weight is 1.

    Products are exact then, so only the order of sums decides about bits; a CPU joins products and sums to one
    instruction or not, as it likes."""
    case = Case(T=5, R=4, H=64, P=16, pages=9, **how)
    (q, k, v, queries), _ = problem(case)
    queries = queries._replace(positions=queries.positions[:, tokens], valid=queries.valid[:, tokens])
    out = paged_attention_kernel(jnp.zeros_like(q)[:, tokens], k, v, queries, case.spec, tiling=tiling, interpret=True)
    return np.where(np.asarray(queries.valid)[:, :, None, None], out, 0)


@pytest.mark.parametrize("how", [{}, {"sink": 1.0}, {"window": 50}], ids=str)
def test_how_instances_share_a_row_and_which_tokens_share_a_pass_change_no_bit(how):
    wanted = _bits_of_equal_scores(MERGED, **how)
    for tiling in (SHARED, replace(MERGED, instances=64), replace(MERGED, max_splits=4, split_slots=32)):
        np.testing.assert_array_equal(_bits_of_equal_scores(tiling, **how), wanted, err_msg=str(tiling))
        alone = _bits_of_equal_scores(tiling, slice(2, 3), **how)
        np.testing.assert_array_equal(alone, wanted[:, 2:3], err_msg=str(tiling))


@pytest.mark.parametrize("parts", [Parts(16), Parts(32), None])  # with None, those of instances
def test_parts_of_another_length_are_detected(parts):
    wrong = replace(MERGED, instances=64, parts=parts)
    assert (_bits_of_equal_scores(wrong) != _bits_of_equal_scores(MERGED)).any()


@pytest.mark.parametrize("fault", ["backwards", "in pairs"])
def test_a_merge_out_of_order_is_detected(fault, monkeypatch):
    """Of the softmaxes that instances have stored."""

    def merge(acc, peak, total, last, sinks, dtype, sharing, *more, **how):
        """``merge_splits`` of these softmaxes in another order. Weights are 1 here, so that sums alone are merged."""
        end = sharing.places(jnp.max(last, axis=1), None)[1][:, None]
        place = jnp.arange(acc.shape[1])[None]
        if fault == "backwards":
            at = jnp.where(place < end, end - 1 - place, place)
            acc, peak, total = (jax.vmap(lambda x, i: x[i])(x, at) for x in (acc, peak, total))
        else:
            live, even = (place < end)[:, :, None] & (peak != -jnp.inf), (place % 2 == 0)[:, :, None]
            acc, total = jnp.where(live[..., None], acc, 0), jnp.where(live, total, 0)
            acc, total = (x + jnp.roll(x, -1, axis=1).at[:, -1].set(0) for x in (acc, total))
            peak = jnp.where(live & even, 0.0, -jnp.inf)
        return merge_splits(acc, peak, total, last, sinks, dtype, sharing, *more, **how)

    monkeypatch.setattr(flash, "merge_splits", merge)
    tiling = replace(MERGED, instances=64, num_stages=1 if fault == "backwards" else 2)  # an own trace, with the fault
    got, wanted = _bits_of_equal_scores(tiling), _bits_of_equal_scores(MERGED)
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert (got != wanted).any()


def test_long_texts_alone_split_rows_of_a_large_batch():
    pool = jax.ShapeDtypeStruct((8, 100, 64, 128), jnp.bfloat16)

    def splits(B, T, M, window=None):
        launch = AttentionLaunch.of(shapes_of_queries(B, T, M), 32, pool, AttentionSpec(window), AttentionTiling())
        return launch.sharing.head, launch.sharing.splits, launch.sharing.stored

    assert splits(16, 5, 16) == (8, 1, 1)
    assert splits(16, 5, 512) == (24, 8, 25)
    assert splits(8, 5, 512) == (4, 16, 45)
    assert splits(1, 5, 512) == (1, 32, 48)
    assert splits(1, 5, 512, window=100) == (1, 2, 2)
    assert splits(16, 5, 512, window=100) == (2, 1, 1)  # short at any length
    assert splits(64, 32, 512) == (48, 1, 1)  # a prefill pass


@pytest.mark.parametrize("parts", [PARTS, SMALL_PARTS, Parts(16, 4)], ids=str)
def test_parts_follow_each_other_and_grow(parts):
    numbers = [parts.number(slot) for slot in range(10_000)]
    starts = np.array([parts.start(number) for number in range(numbers[-1] + 2)])
    np.testing.assert_array_equal(numbers, np.searchsorted(starts, np.arange(10_000), side="right") - 1)
    np.testing.assert_array_equal(jax.vmap(parts.number)(jnp.arange(10_000)), numbers)
    np.testing.assert_array_equal(jax.vmap(parts.start)(jnp.arange(len(starts))), starts)
    lengths = np.diff(starts)
    assert (lengths[: 2 * parts.steps] == parts.shortest).all()
    assert (np.diff(lengths) >= 0).all()
    assert (lengths <= np.maximum(starts[:-1] // parts.steps, parts.shortest)).all()
    for span in (1, 2, 16, 17, 700, 5000):
        most = max(numbers[first + span - 1] - numbers[first] + 1 for first in range(10_001 - span))
        assert most == parts.count(10_000, span), span


@pytest.mark.parametrize(
    ("cells", "tiles", "splits"), [(8, 16, 16), (8, 256, 32), (128, 16, 2), (512, 16, 1), (8, 3, 4), (8, 1, 1)]
)
def test_one_row_fills_the_gpu_and_many_rows_are_not_split(cells, tiles, splits):
    assert AttentionTiling(instances=264).num_splits(cells, tiles) == splits


def test_a_view_attends_by_the_reference_on_a_cpu():
    case = Case(T=5, R=4, H=64, P=16, pages=9, window=3, sink=1.0)
    (q, k, v, queries), _ = problem(case)
    with jax.default_device(jax.devices("cpu")[0]):
        got = jax.jit(lambda view, *args: view.attend(*args))(PagedView(*queries[:3]), q, LayerKV(k, v), case.spec)
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
