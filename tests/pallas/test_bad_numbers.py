"""A bad number, NaN or infinite, reaches the result of its own row wherever it does so in the reference implementation, and
no other row.

The maxima and minima that Pallas' Triton lowering makes drop NaN, unlike those of interpreted kernels. Kernels are
interpreted here with maxima and minima that drop it, too."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bad_numbers import PROBLEMS, Problem
from cuda_lowering import DROPPED, dropping_nan, for_cuda, kernels_of
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import kernel_call, largest_magnitude

SMALL_GROUP = 128  # so that small vocabularies span several groups


def along_axes(function: Callable, start: float) -> Callable:
    """A maximum or minimum along axes whose result is NaN only if all numbers are."""

    def reduced(x, *args, **how):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return function(x, *args, **how)
        broken = jnp.isnan(x)
        extreme = function(jnp.where(broken, jnp.asarray(start, x.dtype), x), *args, **how)
        return jnp.where(jnp.all(broken, *args, **how), jnp.nan, extreme)

    return reduced


def of_numbers(function: Callable) -> Callable:
    """A maximum or minimum of two numbers, which is the other one if one is NaN."""

    def of_two(x, y):
        return jnp.where(x != x, y, jnp.where(y != y, x, function(x, y)))

    return of_two


@contextlib.contextmanager
def maxima_as_lowered() -> Iterator[None]:
    """What is traced meanwhile has maxima and minima as Pallas' Triton lowering makes them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, start in (("max", -np.inf), ("min", np.inf)):
            patch.setattr(jnp, name, along_axes(getattr(jnp, name), start))
        for name in ("maximum", "minimum"):
            patch.setattr(jnp, name, of_numbers(getattr(jnp, name)))
        yield


def interpreted(problem: Problem) -> Callable:
    run = jax.jit(functools.partial(problem.kernel, interpret=True))

    def traced(*args):
        with maxima_as_lowered():
            return run(*args)

    return traced


def broken_rows(rows) -> np.ndarray:
    """Which rows of each array have a number that is not finite, bool ``[arrays, rows]``."""
    return np.stack([~np.isfinite(np.asarray(x, np.float32)).reshape(len(x), -1).all(axis=1) for x in rows])


@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(interpreted, id="interpreted"),
        pytest.param(lambda problem: jax.jit(problem.kernel), id="compiled", marks=pytest.mark.gpu),
    ],
)
class TestBadNumbers:
    @pytest.fixture(autouse=True)
    def small(self, implementation, monkeypatch):
        if implementation is interpreted:
            monkeypatch.setattr("jspec.pallas.sampling.warped_logits.GROUP", SMALL_GROUP)
            monkeypatch.setattr("jspec.pallas.sampling.top_k_top_p._BLOCK", 2 * SMALL_GROUP)
            monkeypatch.setattr("jspec.pallas.sampling.top_k_top_p._UNROLL", 2)

    @pytest.mark.parametrize("name", PROBLEMS)
    def test_reaches_its_own_row_and_no_other(self, implementation, name):
        problem = PROBLEMS[name]()
        run, reference = implementation(problem), jax.jit(problem.reference)
        clean = problem.rows(run(*problem.args))
        assert not broken_rows(clean).any()
        others = np.arange(len(clean[0])) != problem.row
        for spot in problem.spots:
            args = list(problem.args)
            args[spot.operand] = args[spot.operand].at[spot.at].set(spot.number)
            wanted = broken_rows(problem.rows(reference(*args)))
            assert wanted[:, problem.row].any() or not np.isnan(spot.number), spot
            actual = problem.rows(run(*args))
            np.testing.assert_array_equal(broken_rows(actual), wanted, err_msg=str(spot))
            for x, y in zip(actual, clean, strict=True):
                np.testing.assert_array_equal(np.asarray(x)[others], np.asarray(y)[others], err_msg=str(spot))


def test_maxima_as_lowered_drop_nan():
    """Interpreted ones that are traced like that, and those that are lowered."""
    x = jnp.array([[1, jnp.nan, 3], [jnp.nan, jnp.nan, jnp.nan]])
    with maxima_as_lowered():
        np.testing.assert_array_equal(jnp.max(x, axis=1), [3, jnp.nan])
        np.testing.assert_array_equal(jnp.min(x, axis=1), [1, jnp.nan])
        np.testing.assert_array_equal(jnp.maximum(x[0], 2.0), [2, 2, 3])
        np.testing.assert_array_equal(jnp.minimum(2.0, x[0]), [1, 2, 2])
    assert jnp.isnan(jnp.max(x)), "the patch is gone"


def _largest(x_ref, out_ref, *, find: Callable):
    ids = jnp.arange(8)
    pltriton.store(out_ref.at[jnp.arange(1)], find(pltriton.load(x_ref.at[ids]), 0))


@pytest.mark.parametrize(
    ("find", "dropping"), [(functools.partial(jnp.max, keepdims=True), ["largest"]), (largest_magnitude, [])]
)
def test_a_lowered_maximum_that_drops_nan_is_detected(find, dropping):
    def largest(x):
        out = jax.ShapeDtypeStruct((1,), jnp.float32)
        return kernel_call(_largest, x, grid=(1,), out_shape=out, num_warps=1, interpret=False, find=find)

    assert dropping_nan(for_cuda(largest, (jax.ShapeDtypeStruct((8,), jnp.float32),))) == dropping


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("quantizing bfloat16", []),
        ("attention, split", ["attend_split", "merge_splits"]),
        ("decode, split", ["decode_split", "merge_splits"]),
        ("sample", ["weigh_groups", "sample"]),
        ("residual masses", ["weigh_residual"]),
        ("routing of 3 among 6: softmax", ["route_small_batch"]),
        ("routing of 5 among 16: softmax", ["choose"]),
    ],
)
def test_which_kernels_have_maxima_that_drop_nan(name, kernels):
    """Those of which ``DROPPED`` says why; tests of lowering look at all others."""
    problem = PROBLEMS[name]()
    lowered = for_cuda(problem.kernel, problem.args)
    assert kernels_of(lowered)
    assert sorted(dropping_nan(lowered)) == sorted(kernels)
    assert set(kernels) <= set(DROPPED)
