"""The benchmark of a cache in eight bits: its floors count the bytes, and the kernel alone is what a view runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.random_modules import abstract_module
from benchmarks.report import kv_cache_table, results
from benchmarks.rounds.floors import kv_bytes, target_pass
from benchmarks.rounds.kv_cache import CALLS, attention_program
from benchmarks.rounds.programs import PAGE, Forward, filled, with_kv_cache
from benchmarks.shapes import LLAMA_8B
from jspec.models.cache_pools import init_pool
from jspec.pallas.attention.fp8 import decode


def test_floors_count_bytes_and_scales():
    target = abstract_module(LLAMA_8B)
    plain, half, with_scales = (with_kv_cache(target, kind) for kind in (None, "fp8", "fp8_per_token_head"))
    assert kv_bytes(plain, 1000) == 2 * kv_bytes(half, 1000) == 1000 * 2 * 32 * 2 * 8 * 128
    assert kv_bytes(with_scales, 1000) == kv_bytes(half, 1000) * 132 / 128
    assert target_pass(half, 16, 1, 100).kv_bytes == kv_bytes(half, 1600)
    assert target.kv_rounding is None  # its own


def test_random_bytes_are_numbers_and_scales_stay_ones():
    target = with_kv_cache(abstract_module(LLAMA_8B), "fp8_per_token_head")
    [kv] = filled(init_pool(target.cache_shape()[:1], 3, 16, jnp.bfloat16))
    numbers = np.asarray(decode(kv.k, jnp.float32))
    assert np.isfinite(numbers).all()
    assert 0.5 < numbers.std() < 2
    np.testing.assert_array_equal(kv.scales.k, 1)


@pytest.mark.parametrize("kind", [None, "fp8"])
def test_the_attention_program_writes_into_the_pools_that_it_is_given(kind):
    what = Forward(2, 3, PAGE, PAGE, CALLS)
    calls, fresh = attention_program("tiny", kind, "float32", what)
    kv, qkv = fresh()
    after, read = jax.jit(calls)(kv, qkv)
    newest = np.asarray(after.k)[:, 1:, PAGE - 3 :]
    assert (newest != np.asarray(kv.k)[:, 1:, PAGE - 3 :]).any()
    np.testing.assert_array_equal(np.asarray(after.k)[:, 1:, : PAGE - 3], np.asarray(kv.k)[:, 1:, : PAGE - 3])
    assert np.isfinite(np.asarray(read)).all()


def test_the_table_has_what_was_measured():
    def figure(key, measured, **details):
        return results.Figure(key, measured, None, None, None, details, None)  # pyright: ignore

    kl = {"mean_kl": 0.00388, "max_kl": 0.14, "top1": 0.969, "positions": 3328}
    found = {"kl, fp8": figure("kl, fp8", 0.00388, **kl)}
    assert "| fp8 | 3.9e-3 | 1.4e-1 | 96.9% |" in kv_cache_table.quality(found)
    for kind, length in (("none", 3.0), ("fp8", 2.9), ("fp8_per_token_head", 2.8)):
        key = f"acceptance, eagle, T = 0, {kind}"
        found[key] = figure(key, length)
    assert "| eagle, T = 0 | 3.00 | 2.90 | 2.80 |" in kv_cache_table.quality(found)
    assert not kv_cache_table.quality({})
