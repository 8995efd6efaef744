"""The rotary embedding in a kernel: heads are loaded with what turns them, and turned later."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.attention.flash import each, rows


class Turning(NamedTuple):
    """In a kernel: heads, and what turns them. All but ``heads`` and ``half`` are None if nothing is rotated.

    Attributes:
      heads: ``[n, H]``.
      other: ``[n, H]``, the number that each number is paired with.
      cos, sin: float32 ``[n, H]``.
      half: how many of the first numbers are the first ones of their pairs.
    """

    heads: Any
    other: Any = None
    cos: Any = None
    sin: Any = None
    half: int = 0


def load_turning(qkv_ref, angle_refs, b, at, token, real) -> Turning:
    """In a kernel: what ``turned`` needs of heads ``at`` of row b.

    Args:
      qkv_ref: ``[B, heads, H]``.
      angle_refs: cosines and sines, float32 ``[B, T, r / 2]`` each; ``()`` if nothing is rotated.
      b: the row.
      at, token: int32 ``[n]``, the heads, and the query tokens that they belong to.
      real: bool ``[n]``; what is loaded is 0 where it is false.
    """
    H = qkv_ref.shape[2]
    row, column = rows(at, H)
    mask = each(real, H)

    def numbers(c):
        return pltriton.load(qkv_ref.at[b, row, c], mask=mask, other=0.0)

    if not angle_refs:
        return Turning(numbers(column))
    half = angle_refs[0].shape[2]
    if 2 * half == H:
        angle, pair, turning = (b, each(token, H), column & (half - 1)), column ^ half, mask
    else:  # a number that is not rotated is paired with itself, and its sine is 0
        angle = b, each(token, H), jnp.where(column < half, column, column - half)
        pair = jnp.where(column < half, column + half, jnp.where(column < 2 * half, column - half, column))
        turning = mask & (column < 2 * half)
    x, other = numbers(column), numbers(pair)
    still = 0.0 if 2 * half == H else 1.0  # the cosine of a number that is not rotated
    cos, sin = (
        pltriton.load(ref.at[angle], mask=turning, other=at_rest)
        for ref, at_rest in zip(angle_refs, (still, 0.0), strict=True)
    )
    return Turning(x, other, cos, sin, half)


def turned(turning: Turning):
    """In a kernel: ``jspec.pallas.attention.reference.rotated`` of heads ``[n, H]``, computed in fp32."""
    x, other, cos, sin, half = turning
    if other is None:
        return x
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    x32, other = x.astype(jnp.float32), other.astype(jnp.float32)
    return (x32 * cos + jnp.where(column < half, -other, other) * sin).astype(x.dtype)
