"""Products and sums whose bits do not depend on how many rows there are, on a CPU.

XLA chooses its kernel for a product there by the columns of the right operand, unless there is a single row or few columns.
So rows are those of the left operand, and a single one has zeros beside it. A reduction of more than a few thousand numbers
is given to another library, which adds in another order, and the exponentials around it with it. A product with ones has
one order, and a maximum that is not spelt as one stays where it is. On other platforms, and where there need not be one
order (``jspec.pallas.dispatch.one_order``), all of these but ``add`` are what their names say."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jspec.pallas.dispatch import of_platform, wants_one_order

# On a CPU, where XLA has other orders of sums for fewer, and from jax 0.12 on for those behind the last whole eights.
_FEWEST_OUTPUTS = 8
_WHOLE_OUTPUTS = 8 if jax.__version_info__ >= (0, 12) else 1
# Of slots there are more or fewer beside the same ones, by the size of pages. With vectors of 256 bits the order of sums of
# all of them is another one for some numbers behind the last whole sixteens.
_WHOLE_SLOTS = 16
_WIDENS_WEIGHTS = jax.__version_info__ < (0, 11)  # of bfloat16, for products that are rounded to it


def linear(x, weight, dtype) -> jax.Array:
    """The linear map ``[..., in], [out, in] -> [..., out]`` of operands of one dtype, in ``dtype``, or in theirs if that
    is None.

    On a CPU, XLA multiplies bfloat16 as it is stored if there are two tokens or more, and with jax 0.10 if the result is
    float32; otherwise it makes a copy of the weight in float32, and in a loop it keeps the copies of all weights. So there
    are always two tokens at least, and with jax 0.10 sums are rounded afterwards."""

    def product(x, weight, dtype=dtype):
        return jnp.einsum("...i,oi->...o", x, weight, precision=_full_precision(x.dtype), preferred_element_type=dtype)

    def of_cpu(x, weight):
        wide = jnp.float32 if _WIDENS_WEIGHTS and x.dtype == jnp.bfloat16 else dtype
        return _padded(functools.partial(product, dtype=wide), x, weight).astype(dtype or x.dtype)

    if not x.size:
        return product(x, weight)
    if x.dtype == jnp.bfloat16:
        return of_platform(x, weight, cpu=of_cpu, default=product)
    return _ordered(of_cpu, product, x, weight)


def rows_product(x, y, axis: int) -> jax.Array:
    """Products of matrices in float32, ``[..., M, n]``: ``x [..., M, K]`` with ``y [..., n, K]`` if ``axis`` is -1, or with
    ``[..., K, n]`` if it is -2."""
    batch = tuple(range(x.ndim - 2))

    def product(x, y, axis=axis):
        dims = ((x.ndim - 1,), (y.ndim + axis,)), (batch, batch)
        precision = _full_precision(x.dtype)
        return jax.lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)

    def padded(x, y):
        (M, _), outputs = x.shape[-2:], y.shape[-3 - axis]
        if axis == -2:  # behind a barrier, so that XLA multiplies what is written there
            y = jax.lax.optimization_barrier(jnp.swapaxes(y, -1, -2))
        x, y = _with_rows(x, 2), _with_rows(y, -(-outputs // _WHOLE_SLOTS) * _WHOLE_SLOTS)
        return product(x, y, -1)[..., :M, :outputs]

    return _ordered(padded, product, x, y)


def _ordered(of_cpu: Callable, otherwise: Callable, *args) -> jax.Array:
    """``of_cpu`` of the arguments on a CPU where there is to be one order, else ``otherwise`` of them."""
    if not wants_one_order():
        return otherwise(*args)
    return of_platform(*args, cpu=of_cpu, default=otherwise)


def _full_precision(dtype) -> jax.lax.Precision | None:
    """That of products of operands of a dtype: fp32 is multiplied in full fp32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _padded(product, x, weight):
    """A product with a second token and further outputs, of zeros, that are discarded: XLA has another order of sums on a
    CPU for one token and for the outputs that ``_padded_outputs`` rounds up. Tokens are one axis, or XLA would transpose
    weights of bfloat16 as it widens them, and then add in another order."""
    tokens, outputs = math.prod(x.shape[:-1]), len(weight)
    weight = _with_rows(weight, _padded_outputs(outputs)) if wants_one_order() else weight
    products = product(_with_rows(x.reshape(tokens, -1), 2), weight)
    return products[:tokens, :outputs].reshape(*x.shape[:-1], outputs)


def _padded_outputs(outputs: int) -> int:
    """How many outputs a product is to have for so many."""
    return max(-(-outputs // _WHOLE_OUTPUTS) * _WHOLE_OUTPUTS, _FEWEST_OUTPUTS)


def _with_rows(x, least: int) -> jax.Array:
    """``[..., rows, n]`` with so many rows at least, by zeros."""
    missing = max(least - x.shape[-2], 0)
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, missing), (0, 0)])


def add(x, y) -> jax.Array:
    """x + y, each of which may be a product, and is rounded first where there is to be one order; on any platform.

    Of a sum and a product in it a compiler makes one instruction, which rounds once. If both are products it chooses one of
    them, anew in each loop that it makes. It does not see that what is chosen by ``where`` is a product."""
    if not wants_one_order():
        return x + y
    x, y = (jnp.where(each == each, each, jnp.nan) for each in (x, y))
    return x + y


def row_sum(x) -> jax.Array:
    """Sums of float32 ``[..., n] -> [..., 1]``."""

    def by_product(x):
        return linear(x, jnp.ones((_FEWEST_OUTPUTS, x.shape[-1]), jnp.float32), None)[..., :1]

    return _ordered(by_product, lambda x: jnp.sum(x, axis=-1, keepdims=True), x)


def column_sum(x) -> jax.Array:
    """Sums of float32 ``[..., m, n] -> [..., n]``."""

    def by_product(x):
        return rows_product(jnp.ones((*x.shape[:-2], 2, x.shape[-2]), jnp.float32), x, -2)[..., 0, :]

    return _ordered(by_product, lambda x: jnp.sum(x, axis=-2), x)


def row_max(x) -> jax.Array:
    """Maxima of float32 ``[..., n] -> [..., 1]``, without a derivative. On a CPU, NaN is the least of all numbers."""

    def by_comparison(x):
        larger = jax.lax.reduce(x, -jnp.inf, lambda a, b: jnp.where(a > b, a, b), (x.ndim - 1,))
        return larger[..., None]

    x = jax.lax.stop_gradient(x)
    return _ordered(by_comparison, lambda x: jnp.max(x, axis=-1, keepdims=True), x)
