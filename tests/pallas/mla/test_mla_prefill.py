"""Attention to keys and values that are computed from latents: against a float64 oracle, for its reference implementation
and its kernel, which jax interprets since 0.11."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import MOSAIC, for_cuda, interpreted
from latent_prefill import (
    CASES,
    EMPTY,
    FIRST,
    LONG,
    SCALE,
    SECOND,
    T,
    by_implementation,
    kernel,
    oracle,
    problem,
    shapes,
)

from jspec.config import EngineConfig
from jspec.pallas.attention.spec import PagedQueries
from jspec.pallas.mla.prefill import (
    UP_PROJECTED,
    max_prefill_pages,
    pages_in_use,
    up_projected_attention,
    up_projected_attention_kernel,
)


@by_implementation
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_oracle(case, attend):
    args = problem(case)
    got, valid = np.asarray(attend(*args), np.float64), np.asarray(args[2].valid)
    assert np.abs(got - oracle(args, case))[valid].max() < 0.02
    if attend is kernel:
        assert np.all(got[~valid] == 0)


@interpreted
def test_neighbours_change_nothing():
    q, pool, queries, maps = problem(CASES[0])
    together = kernel(q, pool, queries, maps)
    order = jnp.array([LONG, SECOND, FIRST, EMPTY])
    other = kernel(q[order], pool, PagedQueries(*(x[order] for x in queries[:3])), maps)
    np.testing.assert_array_equal(together[order], other)
    only_long = queries.valid & (jnp.arange(4) == LONG)[:, None]
    alone = kernel(q, pool, queries._replace(valid=only_long), maps)
    np.testing.assert_array_equal(alone[LONG], together[LONG])


@interpreted
def test_too_many_pages_make_every_result_nan():
    """What a pass may read is for the scheduler to see to; a wrong number would be worse than none."""
    q, pool, queries, maps = problem(CASES[0])
    B, M = 3, queries.table.shape[1]
    own = jnp.arange(1, 1 + B * M, dtype=jnp.int32).reshape(B, M)  # three texts
    positions = jnp.broadcast_to(M * 64 - T + jnp.arange(T, dtype=jnp.int32), (B, T))
    assert max_prefill_pages(B, T, M, 64) < B * M
    got = kernel(q[:B], jnp.zeros_like(pool), PagedQueries(own, positions, jnp.ones((B, T), bool)), maps)
    assert jnp.isnan(got).all()


class TestPagesInUse:
    table = jnp.array([[4, 2, 7, 0], [4, 2, 9, 2**30], [5, 1, 1, 1], [0, 3, 0, 0]], jnp.int32)

    def of(self, newest, max_pages):
        return pages_in_use(self.table, jnp.array(newest, jnp.int32), (10, 8), max_pages)

    def test_each_page_is_listed_once(self):
        actual = self.of([16, 23, 7, -1], 8)
        np.testing.assert_array_equal(actual.numbers, [2, 4, 5, 7, 9, 0, 0, 0])
        np.testing.assert_array_equal(actual.table, [[1, 0, 3, 0], [1, 0, 4, 0], [2, 0, 0, 0], [0, 0, 0, 0]])
        assert actual.total == 5

    def test_null_pages_are_not_listed(self):
        actual = self.of([-1, -1, -1, 31], 3)
        np.testing.assert_array_equal(actual.numbers, [3, 0, 0])

    @pytest.mark.parametrize("max_pages", [5, 4, 1])
    def test_pages_that_are_not_listed_are_counted(self, max_pages):
        actual = self.of([16, 23, 7, -1], max_pages)
        assert actual.total == 5
        np.testing.assert_array_equal(actual.numbers, [2, 4, 5, 7, 9][:max_pages])

    def test_no_page_is_listed_without_tokens(self):
        actual = self.of([-1] * 4, 2)
        np.testing.assert_array_equal(actual.numbers, [0, 0])
        assert actual.total == 0


@pytest.mark.parametrize("segments", [1, 4, 64])
def test_a_prefill_batch_stays_below_max_prefill_pages(segments):
    config = EngineConfig(max_len=1000, prefill_chunk=128, expand_latents=True, prefill_tokens=8192, reproducible=False)
    assert config.pages_of_prefill(segments) == max_prefill_pages(segments, 128, config.pages_per_row, 64)
    assert dataclasses.replace(config, expand_latents=False).pages_of_prefill(segments) is None


@pytest.mark.parametrize(
    ("shape", "known"),
    [
        *[({}, True), ({"own": 128, "value": 128}, True), ({"own": 128, "value": 128, "P": 128}, True)],
        *[({"B": 4}, True), ({"B": 2}, False), ({"T": 64}, False), ({"P": 128}, False), ({"P": 16}, False)],
        *[({"own": 160}, False), ({"own": 64}, False), ({"dtype": "float32"}, False), ({"own": 256}, False)],
    ],
    ids=str,
)
def test_which_shapes_have_the_kernel(shape, known, monkeypatch):
    monkeypatch.setattr("jspec.pallas.mla.prefill.on_hopper", lambda: True)
    assert UP_PROJECTED.serves(*shapes(**shape)) == known


@pytest.mark.parametrize(
    "kind", ["bfloat16", "fp8_block", "int4_32_float16_zeros", "int8_64_bfloat16", "nvfp4", "mxfp4", "mxfp8", "nf4_64"]
)
def test_lowers_for_hopper(kind):
    text = for_cuda(functools.partial(up_projected_attention, scale=0.1), shapes(kind=kind))
    assert text.count(MOSAIC) == 1
    assert text.count("triton") >= 2


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_equals_the_oracle(case):
    args = problem(case)
    got, valid = np.asarray(up_projected_attention_kernel(*args, scale=SCALE), np.float64), np.asarray(args[2].valid)
    assert np.abs(got - oracle(args, case))[valid].max() < 0.02
    assert np.all(got[~valid] == 0)
