"""In kernels: tiles of stored weights, unpacked in registers; first what all kernels share, then tiles of the map of each
head of latent attention.

Such a tile has the numbers of some output channels and of as many numbers of a latent as share a scale, or fewer. What
multiplies is exact: integers, FP8 numbers, or numbers of four bits times scales of eight. The scale of the group, or of the
output channel, multiplies queries before their product with a tile, and sums after it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from jspec.pallas.triton import MMA_SIZE, broadcast_columns, tile_indices
from jspec.pallas.weights.table_codes import shrink_of_table, unpack_table
from jspec.pallas.weights.unpack import (
    CODE_SHRINK,
    MXFP4_SHRINK,
    SHRINK,
    times_plus,
    unpack_eight_bits,
    unpack_four_bits,
    unpack_mxfp4,
    unpack_mxfp8,
    unpack_nvfp4,
    unpack_scaled_codes,
)
from jspec.quantization.codes import ZERO, in_input_order, other_bits_of, place_of_byte
from jspec.quantization.formats import SUPER, Format
from jspec.quantization.tables import TABLES
from jspec.quantization.weight import Weight

_WHOLE_CODES = 32  # numbers of a latent whose codes of four bits lie in bytes of their own, or share a scale of MXFP8


def with_bits_of_scales(weight: Weight) -> Weight:
    """Outside of kernels: a weight whose scales are bits, uint8, if they are those of NVFP4. Triton would not fill masked
    places of float8_e4m3fn."""
    if weight.channel_scale is None:
        return weight
    return dataclasses.replace(weight, scale=jax.lax.bitcast_convert_type(weight.scale, jnp.uint8))


def load_or_zero(at, mask):
    """A block, 0 where ``mask`` is false. Without a mask the load takes fewer instructions."""
    return pltriton.load(at, mask=mask, other=None if mask is None else 0)


def load_packed(form: Format | None, load: Callable[[Any], Any], at) -> tuple[Any, Any]:
    """The bytes with the lowest four bits of codes, uint8 ``[channels, n]``, and the other bits of their two codes, those of
    the low one first; None if there are none.

    Args:
      form: that of the codes.
      load: returns bytes by their places in a row, int32 ``[n]``.
      at: int32 ``[n]``, which of the bytes with lowest bits.
    """
    assert form is not None
    if form.bits == 4:
        return load(at), None
    place, shift = other_bits_of(at, form.bits)
    return load(place_of_byte(at, form.bits)), load(place) >> shift.astype(jnp.uint8)[None, :]


def unpack_half(
    form: Format | None, packed, high: bool, scale=None, zero=None, dtype=jnp.bfloat16, *, offset=None, other=None
):
    """The numbers of the low or the high halves of bytes, uint8 ``[channels, n]``, divided by ``shrink_of`` the format.

    Args:
      form: that of the codes.
      packed, high: as for the functions of ``jspec.pallas.weights.unpack``.
      scale: of NVFP4 and MXFP4, which multiplies the numbers; of others None where it multiplies sums, or as for
        ``unpack_scaled_codes``.
      zero: as for ``unpack_four_bits``, or with a scale as for ``unpack_scaled_codes``.
      dtype: of the result. Only numbers of a table and scaled ones are rounded to bfloat16; it holds all others.
      offset: what is added to scaled numbers, float32 ``[channels, n]``; None for 0.
      other: as ``load_packed`` returns it.
    """
    assert form is not None
    if form.e2m1:
        return (unpack_nvfp4 if form.kind == "nvfp4" else unpack_mxfp4)(packed, high, scale).astype(dtype)
    if scale is not None and (dtype != jnp.bfloat16 or offset is not None or other is not None):
        number = unpack_half(form, packed, high, dtype=dtype, other=other)
        if zero is not None:
            number += ((ZERO - zero) / SHRINK).astype(dtype)
        factor = scale * (shrink_of(form) / shrink_of(form, scaled=True))
        added = jnp.zeros_like(scale) if offset is None else offset / shrink_of(form, scaled=True)
        if dtype != jnp.bfloat16:
            return number * factor + added
        return times_plus(number, factor.astype(dtype), added.astype(dtype))
    if other is not None or (scale is None and form.offsets):
        code = packed >> 4 if high else packed & 15
        if other is not None:
            code |= (other >> (high * (form.bits - 4)) & ((1 << (form.bits - 4)) - 1)) << 4
        return unpack_eight_bits((code - jnp.uint8(form.middle)).astype(jnp.int8)).astype(dtype)
    if form.table:
        return unpack_table(TABLES[form.table], packed, high, dtype, scale)
    unpacked = unpack_four_bits(packed, high, zero) if scale is None else unpack_scaled_codes(packed, high, scale, zero)
    return unpacked.astype(dtype)


def shrink_of(form: Format | None, scaled: bool = False) -> float:
    """What sums of products with codes of ``unpack_half`` are to be multiplied by; 1 for numbers that are no such codes.
    Codes of integers and of tables may be ``scaled``."""
    if form is None or not form.packed:
        return 1.0
    if form.table:
        return shrink_of_table(TABLES[form.table], scaled) / TABLES[form.table].factor
    return MXFP4_SHRINK if form.kind == "mxfp4" else CODE_SHRINK if scaled else SHRINK


def load_group(form: Format | None, load: Callable[..., Any], group, rounded: bool = True) -> tuple[Any, Any, Any]:
    """The scales of a group of codes, float32 ``[channels]``, and their zeros and offsets, or None.

    Args:
      form: that of the codes.
      load: returns numbers of ``Weight.scale`` by their index behind that of the channels.
      group: int32, or for scales of several groups such numbers ``[n]``.
      rounded: whether numbers of levels are rounded to bfloat16, as those that multiply numbers are.
    """
    assert form is not None
    if not form.levels:
        if not (form.zeros or form.offsets):
            return load(group).astype(jnp.float32), None, None
        scale, beside = (load(group, which).astype(jnp.float32) for which in (0, 1))
        return (scale, beside, None) if form.zeros else (scale, None, beside)
    count = SUPER // (form.group or SUPER)
    super_, place = jax.lax.div(group, jnp.int32(count)), jax.lax.rem(group, jnp.int32(count))
    number = load(super_, jnp.zeros_like(place))

    def value(first: int, number):
        word = load(super_, first + jax.lax.div(place, jnp.int32(4)))
        shift = (8 * jax.lax.rem(place, jnp.int32(4))).astype(jnp.uint32)
        byte = jax.lax.shift_right_logical(word, jnp.broadcast_to(shift, word.shape))
        number = number.astype(jnp.bfloat16).astype(jnp.float32) if rounded else number
        return byte.astype(jnp.uint8).astype(jnp.int8).astype(jnp.float32) * number

    if not form.offsets:
        return value(1, jax.lax.bitcast_convert_type(number, jnp.float32)), None, None
    halves = (jax.lax.bitcast_convert_type((number >> i).astype(jnp.uint16), jnp.float16) for i in (0, 16))
    return value(1, next(halves).astype(jnp.float32)), None, value(1 + count // 4, next(halves).astype(jnp.float32))


def load_channel_factor(channel_scale_ref, output, real):
    """What NVFP4 multiplies sums of output channels by, float32 ``[outputs]``, 1 where not ``real``."""
    at = (pltriton.load(channel_scale_ref.at[output, i], mask=real, other=1.0) for i in (0, 1))
    return functools.reduce(jnp.divide, at)


def flat(of: Weight) -> Weight:
    """Outside of kernels: maps of heads ``[N, n, Ck]``, one after another, as the functions below read them: arrays ``[N n,
    ...]``, the bits of scales of eight bits, and scales of output channels as those of a single group."""

    def joined(array):
        return None if array is None else array.reshape(-1, *(array.shape[2:] or (1,)))

    of = with_bits_of_scales(of)
    numbers, scale, channel_scale = (joined(array) for array in (of.numbers, of.scale, of.channel_scale))
    return dataclasses.replace(of, numbers=numbers, scale=scale, channel_scale=channel_scale)


def tile_width(of: Weight, most: int) -> int:
    """How many numbers of a latent a tile of a ``flat`` map has: a power of two, at most ``most``."""
    least = _WHOLE_CODES if of.packed or of.kind == "mxfp8" else MMA_SIZE
    width, group = max(least, min(most, pl.next_power_of_2(of.inputs))), group_width(of)
    return width if group is None else min(width, group)


def group_width(of: Weight) -> int | None:
    """How many numbers of a latent share the factor of their products; None if all do, or there are no factors."""
    return of.group if has_factors(of) and of.channel_scale is None and of.scale.shape[1] > 1 else None


def has_factors(of: Weight) -> bool:
    """Whether a map has ``load_factors``: all but those that are not quantised and those whose scales are powers of two."""
    return of.form is not None and of.form.scales != "powers"


def places_of(of: Weight, number):
    """Where numbers of a latent that tiles have, int32 ``[n]``, are in a latent; those past its end are anywhere."""
    if of.order is None:
        return number
    return pltriton.load(of.order.at[number], mask=number < of.inputs, other=0)


def load_factors(of: Weight, output, real, first):
    """What the products of a tile have to be multiplied by, float32 ``[outputs]``, 0 where not ``real``.

    Args:
      of: a ``flat`` map of refs that ``has_factors``.
      output, real: as for ``load_numbers``.
      first: the first number of a latent of the tile.
    """
    if of.channel_scale is not None:
        return jnp.where(real, load_channel_factor(of.channel_scale, output, real), 0.0)
    return _of_group(of, output, real, first, 0).astype(jnp.float32)


def load_numbers(of: Weight, output, real, first, width: int, dtype):
    """A tile ``[outputs, width]`` of a map, divided by ``shrink_of`` its format, 0 where not ``real`` or past the end of a
    latent; codes there may stand for any number.

    Args:
      of: a ``flat`` map of refs.
      output: int32 ``[outputs]``, output channels, of all heads one after another.
      real: bool ``[outputs]``, which of them are read; None for all.
      first: the first number of a latent, a multiple of ``width``, in the order of ``places_of``.
      width: ``tile_width`` of the map.
      dtype: of the result.
    """
    if of.packed:
        return _from_codes(of, output, real, first, width, dtype)
    number = first + jnp.arange(width, dtype=jnp.int32)
    mask = _mask(output, real, number, of.inputs)
    numbers = pltriton.load(of.numbers.at[tile_indices(output, number)], mask=mask)
    if of.kind == "mxfp8" and of.group:
        numbers = unpack_mxfp8(numbers, _bytes_of(of.scale, output, real, first, width, of.group))
    numbers = numbers.astype(dtype)
    if of.zeros:
        numbers -= broadcast_columns(_of_group(of, output, real, first, 1).astype(dtype), width)
    # Triton has no fp8 literal for what a load puts in masked places.
    return numbers if mask is None else jnp.where(mask, numbers, 0.0).astype(dtype)


def _from_codes(of: Weight, output, real, first, width: int, dtype):
    """``load_numbers`` of codes of four bits."""
    form, scale, zero = of.form, None, None
    assert form is not None

    packed = _bytes_of(of.numbers, output, real, first, width, 2)
    if form.e2m1 and form.group is not None:  # as those all have
        scale = _bytes_of(of.scale, output, real, first, width, form.group)
    elif form.zeros:
        zero = _of_group(of, output, real, first, 1).astype(jnp.bfloat16)
    return in_input_order(*(unpack_half(form, packed, high, scale, zero, dtype) for high in (False, True)))


def _bytes_of(ref, output, real, first, width: int, each: int):
    """What a tile of ``load_numbers`` has of an array that has one byte for ``each`` numbers of a latent."""
    column = first // each + jnp.arange(width // each, dtype=jnp.int32)
    return load_or_zero(ref.at[tile_indices(output, column)], _mask(output, real, column, ref.shape[1]))


def _mask(output, real, column, columns: int):
    """Which numbers of a tile are read, bool ``[outputs, len(column)]``; None for all."""
    shape, within = (output.shape[0], column.shape[0]), None
    if columns % shape[1]:
        within = jnp.broadcast_to((column < columns)[None], shape)
    if real is None:
        return within
    chosen = broadcast_columns(real, shape[1])
    return chosen if within is None else chosen & within


def _of_group(of: Weight, output, real, first, which: int):
    """The scales of the group that a tile is part of, ``[outputs]`` (``which`` = 0), or its zeros (1)."""
    group = jnp.full(output.shape, first // (group_width(of) or of.inputs), jnp.int32)
    last = (which,) if of.zeros else ()
    return pltriton.load(of.scale.at[(output, group, *last)], mask=real, other=None if real is None else 0.0)
