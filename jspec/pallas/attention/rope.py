"""The rotary embedding (RoPE) inside kernels: cosines and sines are loaded with the heads and applied later, so that the
loads overlap."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import broadcast_columns, line_indices


class RopeOperands(NamedTuple):
    """In a kernel: heads and the operands of their rotation. All but ``heads`` and ``half`` are None if nothing is
    rotated.

    Attributes:
      heads: ``[n, H]``.
      partner: ``[n, H]``, the other number of each number's pair.
      cos, sin: float32 ``[n, H]``.
      half: how many of the first numbers are the first ones of their pairs.
    """

    heads: Any
    partner: Any = None
    cos: Any = None
    sin: Any = None
    half: int = 0


def load_rope_operands(qkv_ref, angle_refs, b, at, token, real) -> RopeOperands:
    """In a kernel: the operands of ``apply_rope_in_kernel`` for heads ``at`` of row b.

    Args:
      qkv_ref: ``[B, heads, H]``.
      angle_refs: cosines and sines, float32 ``[B, T, r / 2]`` each; ``()`` if nothing is rotated.
      b: the row.
      at, token: int32 ``[n]``, the heads, and the query tokens that they belong to.
      real: bool ``[n]``; 0 is loaded where it is false.
    """
    H = qkv_ref.shape[2]
    line, column = line_indices(at, H)
    mask = broadcast_columns(real, H)

    def numbers(c):
        return pltriton.load(qkv_ref.at[b, line, c], mask=mask, other=0.0)

    if not angle_refs:
        return RopeOperands(numbers(column))
    half = angle_refs[0].shape[2]
    if 2 * half == H:
        angle, pair, rotates = (b, broadcast_columns(token, H), column & (half - 1)), column ^ half, mask
    else:  # a number that is not rotated is paired with itself, and its sine is 0
        angle = b, broadcast_columns(token, H), jnp.where(column < half, column, column - half)
        pair = jnp.where(column < half, column + half, jnp.where(column < 2 * half, column - half, column))
        rotates = mask & (column < 2 * half)
    x, partner = numbers(column), numbers(pair)
    cos_unrotated = 0.0 if 2 * half == H else 1.0  # the cosine of a number that is not rotated
    cos, sin = (
        pltriton.load(ref.at[angle], mask=rotates, other=unrotated)
        for ref, unrotated in zip(angle_refs, (cos_unrotated, 0.0), strict=True)
    )
    return RopeOperands(x, partner, cos, sin, half)


def apply_rope_in_kernel(operands: RopeOperands):
    """In a kernel: ``jspec.pallas.attention.reference.apply_rope`` of heads ``[n, H]``, computed in fp32."""
    x, partner, cos, sin, half = operands
    if partner is None:
        return x
    column = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
    x32, partner = x.astype(jnp.float32), partner.astype(jnp.float32)
    return (x32 * cos + jnp.where(column < half, -partner, partner) * sin).astype(x.dtype)
