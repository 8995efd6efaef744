"""Rounds weights on their device to the numbers that ``jspec.models.quantization`` makes of them on the host."""

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jspec.quantization import int4
from jspec.quantization.codes import BLOCK, ZERO, in_code_order
from jspec.quantization.formats import GROUP, known_format, num_groups

_AT_ONCE = 2**24  # weights that are rounded at a time, whose float32 copies take memory
_TINY = float(np.finfo(np.float32).tiny)


def rounded(weight: jax.Array, name: str) -> tuple[jax.Array, jax.Array]:
    """In a trace: numbers and scales of a weight ``[out, in]`` in a format of ``ROUNDED``. Where errors of int4's scales are
    equal but for the order of their sums, another scale may be chosen than on the host."""
    outputs, inputs = weight.shape
    unit = GROUP if name == "fp8_block" else 1
    rows = min(max(_AT_ONCE // (inputs * unit), 1) * unit, outputs)
    whole = outputs // rows * rows
    made = jax.lax.map(ROUNDED[name], weight[:whole].reshape(-1, rows, inputs))
    parts = [[x.reshape(whole, *x.shape[2:]) for x in made]]
    if whole < outputs:
        parts.append([*ROUNDED[name](weight[whole:])])
    numbers, scale = (jnp.concatenate(each) for each in zip(*parts, strict=True))
    return numbers, scale


def _per_channel(name: str, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    form, block = known_format(name), weight.astype(jnp.float32)
    scale = _not_tiny(_over(jnp.abs(block).max(axis=1), form.largest))
    block = jnp.clip(_over(block, scale[:, None]), -form.largest, form.largest)
    return (jnp.rint(block) if name == "int8" else block).astype(form.numbers), scale


def _in_blocks(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    (outputs, inputs), largest = weight.shape, known_format("fp8_block").largest
    groups, more = num_groups(inputs), -outputs % GROUP
    padded = jnp.pad(weight.astype(jnp.float32), ((0, more), (0, groups * GROUP - inputs)))
    blocks = padded.reshape(-1, GROUP, groups, GROUP)
    scale = _not_tiny(_over(jnp.abs(blocks).max(axis=(1, 3), keepdims=True), largest))
    numbers = jnp.clip(_over(blocks, scale), -largest, largest).reshape(padded.shape)[:outputs, :inputs]
    scale = jnp.broadcast_to(scale, (len(blocks), GROUP, groups, 1)).reshape(-1, groups)[:outputs]
    return numbers.astype(known_format("fp8_block").numbers), scale


def _in_codes(weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    (outputs, inputs), groups = weight.shape, num_groups(weight.shape[1])
    block = jnp.pad(weight.astype(jnp.float32), ((0, 0), (0, groups * GROUP - inputs))).reshape(outputs, groups, GROUP)
    at = jnp.abs(block).argmax(axis=-1, keepdims=True)
    peak = jnp.take_along_axis(block, at, axis=-1)

    def candidate(largest: float):
        scale = jax.lax.reduce_precision(_over(peak, -largest), 8, 7)  # of bfloat16, which XLA may keep more digits of
        scale = jnp.where(jnp.abs(scale) < _TINY, 1, scale)
        numbers = jnp.clip(jnp.rint(_over(block, scale)), -ZERO, ZERO - 1)
        error = (jnp.square(numbers * scale - block) * jnp.abs(block)).sum(axis=-1, keepdims=True)
        return error, scale, numbers

    error, scale, numbers = candidate(int4.PEAKS[0])
    for largest in int4.PEAKS[1:]:  # the first of equals, as ``argmin`` has it
        other = candidate(largest)
        better = other[0] < error
        error, scale, numbers = (
            jnp.where(better, new, old) for new, old in zip(other, (error, scale, numbers), strict=True)
        )
    codes = (numbers + ZERO).astype(jnp.uint8).reshape(outputs, -1)
    low, high = in_code_order(codes)  # which are whole blocks: zeros behind the last input have code 8
    assert codes.shape[1] % BLOCK == 0
    return low | high << 4, scale[..., 0].astype(int4.SCALE)


def _over(numbers: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """Quotients as a host rounds them. On a GPU, XLA divides in float32 by instructions that may be off by two units in the
    last place, and everywhere multiplies by the reciprocal of what it sees to be the same for several numbers. Quotients
    in float64 have enough digits to be rounded to those of float32, before anything else is done with them."""
    with jax.enable_x64(True):
        exact = jnp.asarray(numbers, jnp.float64) / jnp.asarray(divisor, jnp.float64)
        return jax.lax.reduce_precision(exact, 8, 23).astype(jnp.float32)


def _not_tiny(scale: jax.Array) -> jax.Array:
    """Scales without zeros and subnormal numbers, which are 1."""
    return jnp.where(scale < _TINY, 1, scale)


ROUNDED: Mapping[str, Callable[[jax.Array], tuple[jax.Array, jax.Array]]] = {
    "int8": functools.partial(_per_channel, "int8"),
    "fp8": functools.partial(_per_channel, "fp8"),
    "fp8_block": _in_blocks,
    "int4": _in_codes,
}
