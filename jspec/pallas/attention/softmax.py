"""The running softmax of queries in a kernel, and the one order in which its sums are added up.

Tiles of keys and values are added to a *part* of a row's slots one after another, and parts to the result in their order.
Every kernel does both by the functions of this file. Where a product and a sum make one instruction is written out,
because the compiler would choose it anew in every kernel, and the last bits of the results with it. A tile or a part of
which a query sees nothing changes no bit of its softmax."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from jspec.pallas.attention.spec import AttentionSpec
from jspec.pallas.triton import LOG2_E, broadcast_columns, dot, exp2, multiply_add


class Softmax(NamedTuple):
    """A running softmax of a block of queries, float32.

    Attributes:
      acc: the weighted sums of the values seen so far, ``[block, H]``.
      peak: the largest score so far, ``[block]``.
      total: the sum of the weights so far, ``[block]``.
    """

    acc: Any
    peak: Any
    total: Any

    @classmethod
    def empty(cls, block: int, H: int) -> "Softmax":
        """The softmax before any key."""
        return cls(jnp.zeros((block, H), jnp.float32), jnp.full(block, -jnp.inf), jnp.zeros(block, jnp.float32))

    @classmethod
    def of_sinks(cls, sinks, H: int) -> "Softmax":
        """That of the sink of each query, ``[block]``, which is merged last: the score of a key whose value is 0."""
        return cls.empty(len(sinks), H)._replace(
            peak=sinks.astype(jnp.float32) * LOG2_E, total=jnp.ones(len(sinks), jnp.float32)
        )

    def merged(self, part: "Softmax") -> "Softmax":
        """The softmax after the keys of a further part."""
        peak = jnp.maximum(self.peak, part.peak)
        shift = finite(peak)
        before, new = exp2(self.peak - shift), exp2(part.peak - shift)
        total = multiply_add(self.total, before, part.total * new)
        before, new = (broadcast_columns(x, self.acc.shape[1]) for x in (before, new))
        return Softmax(multiply_add(self.acc, before, part.acc * new), peak, total)


class KVTile(NamedTuple):
    """In a kernel: keys and values of some slots.

    Attributes:
      k: the keys in parts ``[slots, n]``, whose sizes n add up to that of a query.
      v: values ``[slots, H]``.
      k_scale: what products with the keys have to be multiplied by, float32 ``[]`` or ``[slots]``; None if they are as
        they should be.
      v_scale: what the weights of the values have to be multiplied by, float32 ``[slots]``; None likewise.
    """

    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None


def add_tile(softmax: Softmax, q, tile: KVTile, seen, spec: AttentionSpec) -> Softmax:
    """In a kernel: the softmax after further keys and values.

    The peak drops a score that is NaN. Its weight is NaN, and so are the sums from then on.

    Args:
      softmax: the softmax before.
      q: the queries in parts ``[block, n]``, of the same sizes n as those of the keys.
      tile: the keys and values.
      seen: bool ``[block, slots]``, which keys each query sees.
      spec: how products of queries and keys become scores.
    """
    (acc, peak, total), (k, v, k_scale, v_scale) = softmax, tile
    products = functools.reduce(jnp.add, (dot(a, b, trans_b=True) for a, b in zip(q, k, strict=True)))
    k_scale = k_scale[None] if k_scale is not None and k_scale.ndim else k_scale
    scores, unit = spec.scores_and_unit(products, sum(part.shape[1] for part in q), LOG2_E, k_scale)
    scores = jnp.where(seen, scores, -jnp.inf)
    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * unit)
    shift = finite(new_peak)
    weights, rescale = exp2(multiply_add(scores, unit, -shift[:, None])), exp2(peak - shift)
    weighed = weights if v_scale is None else weights * v_scale[None]
    acc = acc * rescale[:, None] + dot(weighed.astype(v.dtype), v)
    return Softmax(acc, new_peak, multiply_add(total, rescale, row_sums(weights)))


def row_sums(x):
    """The sums of lines ``[n, m]``, m a power of two of at least 32, in an order that no layout among threads changes: each
    number is a sum of two, first of two halves, down to 32 numbers; then each 8 of these are added up, neighbours first."""
    x = x.reshape(len(x), *[2] * (x.shape[1].bit_length() - 1))
    while x.ndim > 1:
        x = jnp.sum(x, axis=1 if x.ndim > 6 else -1)
    return x


def finite(peak):
    """The peak to subtract from scores: 0 where no slot was seen, whose scores are all -inf."""
    return jnp.where(peak > -jnp.inf, peak, 0.0)


def divisor(total, last):
    """The sum of weights to divide by: 1 for a query that sees no slot, whose ``last`` is -1.

    Another query's sum is 0 if all of its scores are -inf, and its result is then NaN: such scores make no
    distribution."""
    return jnp.where(last < 0, 1.0, total)
