"""Codes of four to six or of eight bits in groups: how they are stored, and what they stand for.

Checkpoints of GPTQ, AWQ and compressed-tensors are kept so, and jspec's own ``int4`` is one of these formats
(``jspec.quantization.formats``). An output channel has a code n for each input feature, 0 .. 15 in four bits and -128 .. 127
in eight, and its inputs are in groups. A code stands for the number ``(n - zero) * scale + offset`` of its group, exactly:
the difference is an integer that bfloat16 holds. Of up to six bits, and of eight in small groups, products with x of
bfloat16 round it and the scale to bfloat16 (``Weight.multiplied``); else they multiply sums by the scale in float32.

| array | shape | |
|---|---|---|
| weight | uint8 ``[out, 64 blocks]`` | codes of four bits, packed by ``pack_codes``; a block is 128 inputs |
| | uint8 ``[out, 80 blocks]`` or ``[out, 96 blocks]`` | codes of five or six bits, packed likewise |
| | int8 ``[out, in]`` | codes of eight bits |
| scale | ``[out, groups]`` | of float16, bfloat16 or float32; the zero of every group is 8, and 0 in eight bits |
| | ``[out, groups, 2]`` | the scale of a group and its zero, an integer that each of these dtypes holds, or its offset |
| | uint32 ``[out, supers, words]`` | scales of two levels (``jspec.quantization.levels``) |

A block has 64 bytes, 16 for each 32 inputs one after another, in an order in which a thread of Hopper's tensor cores reads
at once what it multiplies at once. Of 16 inputs these multiply, thread q = 0 .. 3 of a line has inputs 2 q and 2 q + 1,
and 8 + 2 q and 9 + 2 q. Its four bytes of 32 inputs are

| byte | low half | high half |
|---|---|---|
| 0 | 2 q | 8 + 2 q |
| 1 | 16 + 2 q | 24 + 2 q |
| 2 | 1 + 2 q | 9 + 2 q |
| 3 | 17 + 2 q | 25 + 2 q |

so that four bits of a word and those 16 bits above them are neighbours, which a bfloat16 pair is made of.

Of codes of five and six bits these are the lowest four. The others follow in a block, in words of 32 bits: of six, word q
of the first four is that of thread q for the first 64 inputs, and word 4 + q for the other 64; of five, word q is that of
thread q for all 128. Codes whose lowest bits are below bit 16 in their words have theirs below bit 16, one after the other.

Nothing but the functions of this file and ``other_bits_of`` knows which bits of which byte are the code of which input."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.quantization.formats import GROUP, num_groups

STORED = np.dtype(np.uint8)
ZERO = 8  # the code that stands for 0 where groups have no zeros of their own
BLOCK = GROUP  # inputs whose codes are packed together
HALF = BLOCK // 2  # bytes of a block
_AT_ONCE = 1 << 15  # words that are packed together, so that they stay in a CPU's cache


# The axes of the inputs of a block: 32 of them, 16 of these, 8 of these, a thread of the tensor cores, one of its pair.
_INPUTS = 4, 2, 2, 4, 2
_TO_BYTES = 0, 3, 4, 1, 2  # the same axes in the order of bytes, of which the last is the half
SHARING = {5: 4, 6: 2}  # bits of a code -> how many words of a thread have those beyond four in one word


def pack_codes(codes: np.ndarray, bits: int = 4) -> np.ndarray:
    """Codes of so many bits, packed in blocks: uint8 ``[..., in]`` -> uint8 ``[..., 16 bits blocks]``.

    Where the inputs do not fill the last block, the missing codes are 8."""
    *before, inputs = codes.shape
    if missing := -inputs % BLOCK:
        codes = np.pad(codes, [(0, 0)] * len(before) + [(0, missing)], constant_values=ZERO)

    def pack(some: np.ndarray, into: np.ndarray):
        pairs = some.view(np.uint16).reshape(len(some), -1, 4, 4)
        other = [pairs[..., i, :] >> 4 & np.uint16(0x0F0F) for i in range(4)] if bits > 4 else []
        _write(into, pairs & np.uint16(0x0F0F), _side_by_side(other, bits - 4) if other else None, bits)

    packed = _in_parts(pack, [np.ascontiguousarray(codes).reshape(-1, inputs + missing)], inputs, bits)
    return packed.reshape(*before, -1)


def pack_planes(halves: np.ndarray, together: int, other: np.ndarray | None = None, bits: int = 4) -> np.ndarray:
    """What ``pack_codes`` makes of codes ``[rows, in]`` whose lowest four bits are in other bytes than the rest.

    Args:
      halves: uint8 ``[rows, in / 2]``, of which each ``together`` bytes, 16, 32 or 64, have as many codes in their low
        halves, and those that follow in their high halves.
      other: of five or six bits the other ones, uint8: 32 bytes have the lowest of as many codes, then those of the next 32,
        one or two bits higher, and so on. None for codes of four bits.
      bits: of a code.
    """
    each, inputs = bits - 4, 2 * halves.shape[1]

    def pack(some: np.ndarray, *others_and_into: np.ndarray):
        *others, into = others_and_into
        pairs, parts = some.view(np.uint16).reshape(len(some), -1, together // 2, 1), None
        low = np.stack([pairs & np.uint16(0x0F0F), pairs >> 4 & np.uint16(0x0F0F)], axis=2)
        for bytes_ in others:
            words = bytes_.view(np.uint16).reshape(len(some), -1, 4, 4)
            mask = np.uint16(0x0101 * ((1 << each) - 1))
            chunks = ([words[..., i, :] >> shift & mask for i in range(4)] for shift in range(0, 8, each))
            parts = np.stack([_side_by_side(chunk, each) for chunk in chunks], axis=2)
        _write(into, low.reshape(len(some), -1, 4, 4), parts, bits)

    rows = [np.ascontiguousarray(plane) for plane in (halves, other) if plane is not None]
    return _in_parts(pack, rows, inputs, bits)


def _in_parts(pack: Callable[..., None], rows: Sequence[np.ndarray], inputs: int, bits: int) -> np.ndarray:
    """What ``pack(*some, into)`` writes of rows, some of them at a time so that they stay in a CPU's cache: uint8 ``[rows,
    16 bits blocks]``. ``into`` is uint32 ``[rows, blocks, 4 bits]``, which begins with codes that are 8."""
    packed = np.full((len(rows[0]), num_groups(inputs), 4 * bits), 0x11111111 * ZERO if bits == 4 else 0, np.uint32)
    some = max(8 * _AT_ONCE // inputs, 1)
    for start in range(0, len(packed), some):
        part = slice(start, start + some)
        pack(*(each[part] for each in rows), packed[part])
    return packed.view(STORED).reshape(len(packed), -1)


def _write(into: np.ndarray, low: np.ndarray, other: np.ndarray | None, bits: int):
    """Write codes as words of blocks.

    Args:
      into: as of ``_in_parts``.
      low: uint16 ``[rows, words, 4, 4]``, of 32 inputs pairs of lowest bits, each 8 inputs those of four threads.
      other: uint16 ``[rows, words, 4]`` as ``_side_by_side`` has them; None for codes of four bits.
    """
    words = _interleaved(*(low[..., i, :] | low[..., i + 1, :] << 4 for i in (0, 2))).reshape(len(into), -1)
    if other is None:
        into.reshape(len(into), -1)[:, : words.shape[1]] = words
        return
    into[..., : HALF // 4] = words.reshape(*into.shape[:2], -1)
    shared = SHARING[bits]
    parts = other.reshape(*into.shape[:2], -1, shared, 4)  # words that share one
    halves = (parts[..., : shared // 2, :], parts[..., shared // 2 :, :])
    first, second = (half[..., 0, :] | half[..., -1, :] << 4 * (bits - 4) * (shared // 2 - 1) for half in halves)
    into[..., HALF // 4 :] = _interleaved(first, second).reshape(*into.shape[:2], -1)


def _side_by_side(pairs: Sequence[np.ndarray], bits: int) -> np.ndarray:
    """Bits of four pairs of codes of a thread, each in the bytes of uint16, one after the other in these bytes."""
    return functools.reduce(np.bitwise_or, (pair << bits * i for i, pair in enumerate(pairs)))


def _interleaved(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Words whose bytes are those of two uint16 in turn."""
    wide = (half.astype(np.uint32) for half in (first, second))
    low, high = (half & np.uint32(0xFF) | (half & np.uint32(0xFF00)) << 8 for half in wide)
    return low | high << 8


def words_of_codes(codes: np.ndarray, bits: int = 4) -> np.ndarray:
    """Eight codes of four bits, or four of eight, in a word each, the first in the lowest bits: uint8 ``[..., in]`` ->
    uint32 ``[..., ceil(in bits / 32)]``."""
    if missing := -codes.shape[-1] % (32 // bits):
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)])
    if bits == 8:
        return np.ascontiguousarray(codes).view(np.uint32)
    words = np.ascontiguousarray(codes).view(np.uint64)
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0x00000000FFFFFFFF)):
        words = (words | words >> np.uint64(shift)) & np.uint64(mask)
    return words.astype(np.uint32)


def pack_words(words: np.ndarray, inputs: int) -> np.ndarray:
    """What ``pack_codes`` makes of codes that are eight in a word, the first in the lowest bits.

    Args:
      words: uint32 ``[ceil(in / 8), out]``, by any strides.
      inputs: how many inputs there are; other codes in the last word do not count.
    """
    size = num_groups(inputs) * BLOCK // 8
    packed = np.empty((words.shape[1], size), np.uint32)
    some = max(_AT_ONCE // size, 1)
    for start in range(0, len(packed), some):
        of_some = packed[start : start + some]
        four = np.full((size, len(of_some)), 0x11111111 * ZERO, np.uint32)
        four[: len(words)] = words[:, start : start + some]
        if last := inputs % 8:
            kept = np.uint32((1 << 4 * last) - 1)
            four[len(words) - 1] = four[len(words) - 1] & kept | np.uint32(0x11111111 * ZERO) & ~kept
        four = four.reshape(-1, 4, len(of_some))  # the words of 32 inputs, whose bytes are transposed
        exchange(four[:, ::2], four[:, 1::2], 8)
        exchange(four[:, :2], four[:, 2:], 16)
        for shift, mask in ((4, 0x00F000F0), (8, 0x0000FF00)):  # then all low halves of a word's bytes come first
            differing = (four ^ four >> shift) & np.uint32(mask)
            four ^= differing ^ differing << shift
        of_some[:] = four.reshape(size, -1).T
    return packed.view(STORED)


def exchange(a: np.ndarray, b: np.ndarray, bits: int):
    """Exchange, in place, every other ``bits`` bits of words: the upper of two such fields of ``a``, the lower of ``b``."""
    mask = np.uint32({4: 0x0F0F0F0F, 8: 0x00FF00FF, 16: 0x0000FFFF}[bits])
    differing = (a >> bits ^ b) & mask
    b ^= differing
    a ^= differing << bits


def unpack_codes(packed, inputs: int, bits: int = 4):
    """The codes, uint8 ``[..., inputs]``, of bytes that ``pack_codes`` made, ``[..., 16 bits blocks]``.

    An array of NumPy gives one of NumPy, and one of JAX gives one of JAX."""
    if bits == 4:
        return in_input_order(packed & 15, packed >> 4)[..., :inputs]
    before = packed.shape[:-1]
    blocks = packed.reshape(*before, -1, BLOCK * bits // 8)
    low = blocks[..., :HALF].reshape(*before, -1)
    xp: Any = np if isinstance(packed, np.ndarray) else jnp  # a kernel cannot hold an array of NumPy
    place, shift = other_bits_of(xp.arange(low.shape[-1], dtype=np.int32), bits)
    other = packed[..., place]
    other = other >> xp.broadcast_to(shift.astype(STORED), other.shape)
    mask = (1 << (bits - 4)) - 1
    halves = (half | (other >> at & mask) << 4 for half, at in ((low & 15, 0), (low >> 4, bits - 4)))
    return in_input_order(*halves)[..., :inputs]


def other_bits_of(byte, bits: int):
    """Of a byte with the lowest bits of two codes of five or six bits, by its number among such bytes: which byte of a row
    has their other bits, and how many bits lie below those of its low half. Those of its high half follow. It works of
    numbers of NumPy, and in kernels."""
    sharing, place = SHARING[bits], byte & 63
    word, half, odd = place >> 4 & sharing - 1, place >> 1 & 1, place & 1
    bit = (4 * word + 2 * odd) * (bits - 4)
    words = (place >> 3 + sharing.bit_length() << 2) + (place >> 2 & 3)  # before this one
    return (byte >> 6) * (16 * bits) + HALF + 4 * words + 2 * half + (bit >> 3), bit & 7


def place_of_byte(byte, bits: int):
    """Where the byte of that number with the lowest bits of two codes is in a row."""
    return byte if bits == 4 else (byte >> 6) * (16 * bits) + (byte & 63)


def in_input_order(low, high):
    """Numbers of the codes in the low and in the high halves of bytes, ``[..., bytes]`` each, in the order of their inputs:
    ``[..., 2 bytes]``. The bytes are those of whole 32 inputs. It works in kernels and outside, of NumPy and of JAX."""
    *before, size = low.shape
    xp: Any = np if isinstance(low, np.ndarray) else jnp
    halves = xp.stack([low, high], axis=-1).reshape(*before, -1, *(_INPUTS[axis] for axis in _TO_BYTES[1:]))
    return _permuted(halves, tuple(int(axis) for axis in np.argsort(_TO_BYTES))).reshape(*before, 2 * size)


def in_code_order(x) -> tuple[jax.Array, jax.Array]:
    """Numbers of inputs ``[M, in]`` in the order of their codes: those of the low halves of bytes, and those of the high
    halves, each ``[M, 64 blocks]``. Where the inputs do not fill the last block, the missing ones are 0."""
    M, inputs = x.shape
    x = jnp.pad(x, ((0, 0), (0, -inputs % BLOCK)))
    halves = _permuted(x.reshape(M, -1, *_INPUTS), _TO_BYTES)
    return halves[..., 0].reshape(M, -1), halves[..., 1].reshape(M, -1)


def place_of(i, inputs: int):
    """Where input i of ``inputs``, which fill all blocks, is in the two results of ``in_code_order`` side by side; int32."""
    byte = (i >> 7 << 6) + ((i >> 5 & 3) << 4) + ((i >> 1 & 3) << 2) + ((i & 1) << 1) + (i >> 4 & 1)
    return (i >> 3 & 1) * (inputs // 2) + byte


def _permuted(x, order: tuple[int, ...]):
    """``x`` with its last five axes in another order."""
    first = x.ndim - len(order)
    return x.transpose(*range(first), *(first + axis for axis in order))
