"""Sums that a compiler does not join with the products in them, whatever loop it makes of them."""

import jax
import numpy as np
import pytest

from jspec.pallas.dispatch import one_order
from jspec.pallas.sums import add


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
