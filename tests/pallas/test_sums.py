"""Sums that a compiler does not join with the products in them, whatever loop it makes of them; and products of the sizes of
real models, for which XLA has other kernels than for tiny ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.engine.runner.compile import one_order_options
from jspec.pallas.dispatch import one_order
from jspec.pallas.sums import add, linear, rows_product


def difference(rows: int, ordered: bool) -> int:
    """How many sums of two products are not those of products that are rounded first, among so many rows."""
    rng = np.random.default_rng(rows)
    a, b, x, y = rng.normal(size=(4, rows, 64)).astype(np.float32)
    found = jax.jit(one_order(ordered)(lambda a, b, x, y: add(a * b, x * y)))(a, b, x, y)
    return int((np.asarray(found) != a * b + x * y).sum())


@pytest.mark.parametrize("rows", [1, 5, 48])
def test_products_are_rounded_before_they_are_added(rows):
    assert difference(rows, ordered=True) == 0


def test_nan_and_infinities_stay():
    x, y = np.meshgrid(*[np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)] * 2)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(jax.jit(one_order()(add))(x, y), x + y)


@pytest.mark.parametrize(("dtype", "made"), [("float32", None), ("bfloat16", None), ("bfloat16", jnp.float32)])
@pytest.mark.parametrize(("inputs", "outputs"), [(320, 2560), (1280, 320), (320, 2048)])
def test_a_product_has_the_same_bits_among_any_number_of_tokens(inputs, outputs, dtype, made):
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=(size, inputs)).astype(jnp.dtype(dtype)) for size in (32, outputs))
    product = one_order()(lambda x, weight: linear(x, weight, made))
    compiled = jax.jit(product, compiler_options=one_order_options(True))
    first = np.asarray(compiled(x[:1], weight))[0]
    for shape in ((2, 1), (1, 3), (4, 1), (5, 1), (8, 1), (4, 4), (32, 1)):
        found = np.asarray(compiled(x[: shape[0] * shape[1]].reshape(*shape, inputs), weight))
        np.testing.assert_array_equal(found[0, 0], first, err_msg=str(shape))


@pytest.mark.parametrize(("queries", "inputs"), [(1, 4), (4, 8), (3, 64)])
def test_scores_of_slots_have_the_same_bits_beside_any_number_of_others(queries, inputs):
    """Pages of another size make another number of slots, the last of which nobody sees."""
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=(3, size, inputs)).astype(np.float32) for size in (queries, 160))
    product = one_order()(lambda q, k: rows_product(q, k, -1))
    compiled = jax.jit(product, compiler_options=one_order_options(True))
    whole = np.asarray(compiled(q, k))
    for slots in (8, 10, 20, 24, 28, 36, 40, 41, 42, 48, 50, 56, 64, 72, 136):
        np.testing.assert_array_equal(compiled(q, k[:, :slots]), whole[..., :slots], err_msg=str(slots))
