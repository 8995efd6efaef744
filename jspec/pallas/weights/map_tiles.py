"""In kernels: tiles of the map of each head, unpacked in registers from whatever it is stored as.

A tile has the numbers of some output channels and of as many numbers of a latent as share a scale, or fewer. What
multiplies is exact: integers, FP8 numbers, or numbers of four bits times scales of eight. The scale of the group, or of the
output channel, multiplies queries before their product with a tile, and sums after it."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import MMA_SIZE, broadcast_columns, tile_indices
from jspec.pallas.weights.head_maps import HeadMap
from jspec.pallas.weights.unpack import MXFP4_SHRINK, SHRINK, unpack_four_bits, unpack_mxfp4, unpack_nvfp4
from jspec.quantization import mxfp4, nvfp4
from jspec.quantization.codes import in_input_order
from jspec.quantization.formats import group_of
from jspec.quantization.mxfp4 import is_mxfp4

_WHOLE_CODES = 32  # numbers of a latent whose codes of four bits lie in bytes of their own


def tile_width(of: HeadMap, most: int) -> int:
    """How many numbers of a latent a tile of a ``flat`` map has: a power of two, at most ``most``."""
    least = _WHOLE_CODES if _in_four_bits(of) else MMA_SIZE
    width, group = max(least, min(most, pl.next_power_of_2(of.rank))), group_width(of)
    return width if group is None else min(width, group)


def group_width(of: HeadMap) -> int | None:
    """How many numbers of a latent share the factor of their products; None if all do, or there are no factors."""
    if of.scale is None or of.scale.dtype == jnp.uint8 or of.scale.shape[1] == 1:
        return None
    return group_of(of.rank, of.scale.shape[1])


def shrink_of(of: HeadMap) -> float:
    """What sums of products with ``load_numbers`` are to be multiplied by."""
    if not _in_four_bits(of):
        return 1.0
    return MXFP4_SHRINK if is_mxfp4(of.scale) and of.channel_scale is None else SHRINK


def has_factors(of: HeadMap) -> bool:
    """Whether a map has ``load_factors``: all but those that are not quantised and those in MXFP4."""
    return of.scale is not None and (of.channel_scale is not None or not is_mxfp4(of.scale))


def places_of(of: HeadMap, number):
    """Where numbers of a latent that tiles have, int32 ``[n]``, are in a latent; those past its end are anywhere."""
    if of.order is None:
        return number
    return pltriton.load(of.order.at[number], mask=number < of.rank, other=0)


def load_factors(of: HeadMap, output, real, first):
    """What the products of a tile have to be multiplied by, float32 ``[outputs]``, 0 where not ``real``.

    Args:
      of: a ``flat`` map of refs that ``has_factors``.
      output, real: as for ``load_numbers``.
      first: the first number of a latent of the tile.
    """
    if of.channel_scale is not None:
        at = (pltriton.load(of.channel_scale.at[output, i], mask=real, other=1.0) for i in (0, 1))
        return jnp.where(real, functools.reduce(jnp.divide, at), 0.0)
    return _of_group(of, output, real, first, 0).astype(jnp.float32)


def load_numbers(of: HeadMap, output, real, first, width: int, dtype):
    """A tile ``[outputs, width]`` of a map, divided by ``shrink_of`` it, 0 where not ``real`` or past the end of a latent;
    codes there may stand for any number.

    Args:
      of: a ``flat`` map of refs.
      output: int32 ``[outputs]``, output channels, of all heads one after another.
      real: bool ``[outputs]``, which of them are read; None for all.
      first: the first number of a latent, a multiple of ``width``, in the order of ``places_of``.
      width: ``tile_width`` of the map.
      dtype: of the result.
    """
    if _in_four_bits(of):
        return _from_codes(of, output, real, first, width).astype(dtype)
    number = first + jnp.arange(width, dtype=jnp.int32)
    mask = _mask(output, real, number, of.rank)
    numbers = pltriton.load(of.weight.at[tile_indices(output, number)], mask=mask).astype(dtype)
    if of.scale is not None and len(of.scale.shape) == 3:
        numbers -= broadcast_columns(_of_group(of, output, real, first, 1).astype(dtype), width)
    # Triton has no fp8 literal for what a load puts in masked places.
    return numbers if mask is None else jnp.where(mask, numbers, 0.0).astype(dtype)


def _from_codes(of: HeadMap, output, real, first, width: int):
    """``load_numbers`` of codes of four bits, in bfloat16."""

    def load(ref, each: int):
        """What the tile has of an array that has one byte for ``each`` numbers of a latent."""
        column = first // each + jnp.arange(width // each, dtype=jnp.int32)
        mask = _mask(output, real, column, ref.shape[1])
        return pltriton.load(ref.at[tile_indices(output, column)], mask=mask, other=None if mask is None else 0)

    packed = load(of.weight, 2)
    if of.channel_scale is not None:
        unpack = functools.partial(unpack_nvfp4, scale=load(of.scale, nvfp4.GROUP))
    elif is_mxfp4(of.scale):
        unpack = functools.partial(unpack_mxfp4, scale=load(of.scale, mxfp4.GROUP))
    else:
        has_zeros = len(of.scale.shape) == 3
        zero = _of_group(of, output, real, first, 1).astype(jnp.bfloat16) if has_zeros else None
        unpack = functools.partial(unpack_four_bits, zero=zero)
    return in_input_order(unpack(packed, False), unpack(packed, True))


def _mask(output, real, column, columns: int):
    """Which numbers of a tile are read, bool ``[outputs, len(column)]``; None for all."""
    shape, within = (output.shape[0], column.shape[0]), None
    if columns % shape[1]:
        within = jnp.broadcast_to((column < columns)[None], shape)
    if real is None:
        return within
    chosen = broadcast_columns(real, shape[1])
    return chosen if within is None else chosen & within


def _of_group(of: HeadMap, output, real, first, which: int):
    """The scales of the group that a tile is part of, ``[outputs]`` (``which`` = 0), or its zeros (1)."""
    group = jnp.full(output.shape, first // (group_width(of) or of.rank), jnp.int32)
    last = (which,) if len(of.scale.shape) == 3 else ()
    return pltriton.load(of.scale.at[(output, group, *last)], mask=real, other=None if real is None else 0.0)


def _in_four_bits(of: HeadMap) -> bool:
    return of.weight.dtype == jnp.uint8
