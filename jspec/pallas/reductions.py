"""Sums and maxima over the last axis whose bits do not depend on how many rows there are.

On a CPU XLA gives a reduction of more than a few thousand numbers to another library, which adds in another order, and the
exponentials around it with it. A product with ones has one order (``jspec.pallas.matmul.reference``), and a maximum that is
not spelt as one stays where it is."""

import jax
import jax.numpy as jnp

from jspec.pallas.matmul.reference import FEWEST_OUTPUTS, matmul_reference


def row_sum(x) -> jax.Array:
    """Sums of float32 ``[..., n] -> [..., 1]``."""

    def by_product(x):
        return matmul_reference(x, jnp.ones((FEWEST_OUTPUTS, x.shape[-1]), jnp.float32))[..., :1]

    return jax.lax.platform_dependent(x, cpu=by_product, default=lambda x: jnp.sum(x, axis=-1, keepdims=True))


def row_max(x) -> jax.Array:
    """Maxima of float32 ``[..., n] -> [..., 1]``, without a derivative. On a CPU, NaN is the least of all numbers."""

    def by_comparison(x):
        larger = jax.lax.reduce(x, -jnp.inf, lambda a, b: jnp.where(a > b, a, b), (x.ndim - 1,))
        return larger[..., None]

    x = jax.lax.stop_gradient(x)
    return jax.lax.platform_dependent(x, cpu=by_comparison, default=lambda x: jnp.max(x, axis=-1, keepdims=True))


def row_logsumexp(x) -> jax.Array:
    """Logarithms of sums of exponentials of float32 ``[..., n] -> [..., 1]``."""
    peak = row_max(x)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    return peak + jnp.log(row_sum(jnp.exp(x - peak)))
