"""Which kernel of a target is the first whose bits depend on how many tokens share its pass."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.products import products
from jspec.pallas.dispatch import row_of
from jspec.pallas.matmul.partial_sums import reduce_partial_sums
from jspec.pallas.matmul.table import TABLE, Product, matmul


def first_difference(model: Any, sizes: Sequence[int]) -> str:
    """The first product, in the order of the model, that gives a token other bits among other numbers of tokens, and the
    kernels that compute it; or that no product does, so that attention or what is between products does.

    Args:
      model: the target's module.
      sizes: numbers of tokens, the first of which is 1.
    """
    for name, product in products(model, 1):
        results = {size: _first_row(product, size) for size in sizes}
        groups: list[list[int]] = []
        for size in sizes:
            group = next((group for group in groups if np.array_equal(results[group[0]], results[size])), None)
            if group is None:
                groups.append([size])
            else:
                group.append(size)
        if len(groups) > 1:
            said = " and ".join(f"{_listed(group)} by {_kernels(product, group)}" for group in groups)
            return f"{name} {list(product.weight.shape)} in {product.weight.kind}: its bits are others with {said}"
    return "no product: attention, or what is between products"


def _first_row(product: Product, size: int) -> np.ndarray:
    """The result of the first of ``size`` tokens, which is always the same one."""
    shape = size, product.x.shape[-1]
    x = jax.random.normal(jax.random.key(size), shape, product.x.dtype)
    x = x.at[0].set(jax.random.normal(jax.random.key(0), shape[1:], product.x.dtype))

    @jax.jit
    def compute(x):
        y = matmul(x, product.weight, product.bias, dtype=product.dtype, allow_partial_sums=product.allow_partial_sums)
        return reduce_partial_sums(y, jnp.float32)[0].astype(jnp.float32)

    return np.asarray(compute(x))


def _kernels(product: Product, sizes: Sequence[int]) -> str:
    """The rows of the table that compute a product of so many tokens."""
    names = []
    for size in sizes:
        x = jax.ShapeDtypeStruct((size, product.x.shape[-1]), product.x.dtype)
        names.append(f'"{row_of(TABLE, product._replace(x=x)).name}"')
    return " and ".join(dict.fromkeys(names))


def _listed(sizes: Sequence[int]) -> str:
    return f"{', '.join(map(str, sizes))} token{'s' if list(sizes) != [1] else ''}"
