"""The types of quantised tensors in GGUF files, and the formats that hold the same numbers.

A row of such a tensor is blocks of 32, 64 or 256 weights one after another, each with codes, scales and offsets of its own.
``TYPES`` says of each type where these are in the bytes of a block. Codes have as many bits in the format, or the next that
kernels know; scales of two levels keep their integers and their numbers (``jspec.quantization.levels``). So the format
stands for the same numbers, in about the same bytes.

Sources: ggml's ``ggml-quants.c`` and the package gguf, whose ``dequantize`` the tests compare with."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jspec.quantization.codes import pack_codes, pack_planes
from jspec.quantization.formats import Format, known_format
from jspec.quantization.levels import pack_levels
from jspec.quantization.tables import TABLES

PLAIN = {0: "float32", 1: "float16", 30: "bfloat16"}  # numbers of types that are not quantised -> dtypes
Blocks = np.ndarray  # uint8 [rows, blocks, bytes]


class Planes(NamedTuple):
    """Codes of few bits in the bytes of a block, as ``pack_planes`` takes them.

    Attributes:
      halves: which bytes have the lowest four bits of codes in both halves.
      together: how many of them have as many codes that follow each other in their low halves.
      other: which bytes have the other bits; None if there are none.
    """

    halves: slice
    together: int
    other: slice | None = None


class BlockType(NamedTuple):
    """A type of quantised tensors.

    Attributes:
      name: ``Q4_K``.
      weights, bytes: of a block.
      format: the name of the format that holds the same numbers.
      codes: where they are, or a function of blocks that returns their codes ``[rows, blocks, weights]``: uint8, or int8 of
        eight bits.
      scale: of blocks, what ``Weight.scale`` has of them: ``[rows, blocks, ...]``.
    """

    name: str
    weights: int
    bytes: int
    format: str
    codes: Planes | Callable[[Blocks], np.ndarray]
    scale: Callable[[Blocks], np.ndarray]

    @property
    def form(self) -> Format:
        return known_format(self.format)

    def array(self, part: str, blocks: Blocks) -> np.ndarray:
        """One of the arrays of the format, ``weight`` or ``scale``, for whole rows."""
        form, rows, held = self.form, len(blocks), self.codes
        if part == "scale":
            shape = form.arrays((1, self.weights * blocks.shape[1]))["scale"].shape[1:]
            return self.scale(blocks).reshape(rows, *shape)
        if not isinstance(held, Planes):
            codes = held(blocks).reshape(rows, -1)
            return pack_codes(codes, form.bits) if form.packed else codes
        halves = blocks[..., held.halves].reshape(rows, -1)
        halves = _both_named(form.table)[halves] if form.table else halves
        other = None if held.other is None else blocks[..., held.other].reshape(rows, -1)
        return pack_planes(halves, held.together, other, form.bits)


def _floats(blocks: Blocks, start: int, count: int = 1) -> np.ndarray:
    """``count`` numbers of float16 of each block, from a byte on: ``[rows, blocks, count]``."""
    return np.ascontiguousarray(blocks[..., start : start + 2 * count]).view(np.float16)


def _parts(codes: np.ndarray, bits: int, together: int) -> np.ndarray:
    """Codes of 1, 2 or 4 bits ``[rows, blocks, weights]`` of bytes ``[rows, blocks, n]``, of which each ``together`` bytes
    have the lowest bits of as many codes that follow each other, then the next bits of the next codes."""
    grouped = codes.reshape(*codes.shape[:2], -1, 1, together)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (grouped >> shifts & np.uint8((1 << bits) - 1)).reshape(*codes.shape[:2], -1)


def _five_bits(blocks: Blocks, start: int) -> np.ndarray:
    """Codes of 32 weights whose highest bits are in four bytes from one on, the first in the lowest bit of the first, and
    whose other bits are in the halves of the bytes behind these."""
    high = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
    return _parts(blocks[..., start + 4 :], 4, 16) | high << np.uint8(4)


def _scales_q2(blocks: Blocks) -> np.ndarray:
    """Scales and offsets of Q2_K, whose integers of four bits share bytes."""
    integers = (blocks[..., :16] & 15).view(np.int8), (blocks[..., :16] >> 4).view(np.int8)
    return pack_levels(_floats(blocks, 80, 2) * np.array([1, -1], np.float16), *integers)


def _scales_q6(blocks: Blocks) -> np.ndarray:
    return pack_levels(_floats(blocks, 208), blocks[..., 192:208].view(np.int8))


def _six_bits(blocks: Blocks) -> np.ndarray:
    """Scales and offsets of Q4_K and Q5_K, whose integers of six bits share twelve bytes."""
    low, high, rest = np.split(blocks[..., 4:16], 3, axis=-1)
    integers = (
        np.concatenate([first & 63, more | first >> 2 & 48], axis=-1).view(np.int8)
        for first, more in ((low, rest & 15), (high, rest >> 4))
    )
    return pack_levels(_floats(blocks, 0, 2) * np.array([1, -1], np.float16), *integers)


def _scales_q3(blocks: Blocks) -> np.ndarray:
    low, high = _parts(blocks[..., 96:104], 4, 8), _parts(blocks[..., 104:108], 2, 4)
    return pack_levels(_floats(blocks, 108), (low | high << 4).view(np.int8) - np.int8(32))


def _scales_iq4(blocks: Blocks) -> np.ndarray:
    low = _parts(blocks[..., 4:8], 4, 1)
    high = _parts(blocks[..., 2:4], 2, 1)
    return pack_levels(_floats(blocks, 0), (low | high << 4).view(np.int8) - np.int8(32))


def _codes_q3(blocks: Blocks) -> np.ndarray:
    """Less 4 where a bit of the mask is 0; 8 stands for 0 here."""
    return _parts(blocks[..., 32:96], 2, 32) + (_parts(blocks[..., :32], 1, 32) << 2) + np.uint8(4)


# The numbers of IQ4_NL and IQ4_XS in the order of codes in files.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@functools.cache
def _both_named(table: str) -> np.ndarray:
    """Bytes with two codes of a table as jspec numbers them, by bytes with two of GGUF: uint8 ``[256]``."""
    place = np.array([TABLES[table].numbers.index(number) for number in _IQ4], np.uint8)
    byte = np.arange(256, dtype=np.uint8)
    return place[byte & 15] | place[byte >> 4] << 4


@functools.cache
def _grids() -> Mapping[str, np.ndarray]:
    """By type, the magnitudes int8 ``[codes, 4 or 8]`` that a code of several weights stands for; and signs of eight weights
    by codes of seven bits, which leave the last to parity."""
    with np.load(Path(__file__).with_name("gguf_grids.npz"), allow_pickle=False) as arrays:
        return dict(arrays)


def _of_grid(name: str, codes: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """The weights of codes of a grid, with signs whose bits are those of eight weights."""
    magnitudes = _grids()[name][codes].reshape(*codes.shape[:2], -1)
    negative = np.unpackbits(signs, axis=-1, bitorder="little").reshape(magnitudes.shape)
    return np.where(negative, -magnitudes, magnitudes)


def _signs_of(codes: np.ndarray) -> np.ndarray:
    """Signs of eight weights by codes of seven bits, the eighth such that an even number is negative."""
    seven = (codes & 127).astype(np.uint8)
    odd = np.unpackbits(seven[..., None], axis=-1).sum(axis=-1, dtype=np.uint8) & 1
    return seven | odd << 7


def _words(blocks: Blocks, start: int, stop: int, kind: Any = np.uint32) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., start:stop]).view(kind)


def _odd(scales: np.ndarray) -> np.ndarray:
    """2 s + 1 of scales of four bits: int8."""
    return (2 * scales.astype(np.uint8) + 1).view(np.int8)


def _codes_iq2_xxs(blocks: Blocks) -> np.ndarray:
    words = _words(blocks, 2, 66).reshape(*blocks.shape[:2], 8, 2)
    signs = _signs_of(words[..., 1:] >> np.arange(0, 28, 7, dtype=np.uint32))
    grid = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    return _of_grid("IQ2_XXS", grid, signs.reshape(*blocks.shape[:2], -1))


def _codes_iq2_xs(blocks: Blocks) -> np.ndarray:
    codes = _words(blocks, 2, 66, np.uint16)
    return _of_grid("IQ2_XS", codes & 511, _signs_of(codes >> 9))


def _codes_iq2_s(blocks: Blocks) -> np.ndarray:
    high = (blocks[..., 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).reshape(*blocks.shape[:2], 32)
    return _of_grid("IQ2_S", blocks[..., 2:34] | high.astype(np.uint16) << 8, blocks[..., 34:66])


def _codes_iq3_xxs(blocks: Blocks) -> np.ndarray:
    signs = _signs_of(_words(blocks, 66, 98)[..., None] >> np.arange(0, 28, 7, dtype=np.uint32))
    return _of_grid("IQ3_XXS", blocks[..., 2:66], signs.reshape(*blocks.shape[:2], -1))


def _codes_iq3_s(blocks: Blocks) -> np.ndarray:
    """In five bits, of which 16 stands for 0."""
    high = np.unpackbits(blocks[..., 66:74], axis=-1, bitorder="little")
    codes = _of_grid("IQ3_S", blocks[..., 2:66] | high.astype(np.uint16) << 8, blocks[..., 74:106])
    return (codes + np.int8(16)).view(np.uint8)


def _scales_of_words(blocks: Blocks, start: int, stop: int, by: float) -> np.ndarray:
    """Scales whose integers are in the highest four bits of words, the last of each ``(stop - start) // 8`` bytes."""
    words = _words(blocks, start, stop).reshape(*blocks.shape[:2], 8, -1)
    return pack_levels(_floats(blocks, 0).astype(np.float32) * np.float32(by), _odd(words[..., -1] >> 28))


def _scales_of_halves(blocks: Blocks, start: int, stop: int, by: float) -> np.ndarray:
    """Scales whose integers are four bits of bytes, low halves first."""
    number = _floats(blocks, 0).astype(np.float32) * np.float32(by)
    return pack_levels(number, _odd(_parts(blocks[..., start:stop], 4, 1)))


def _scales_nvfp4(blocks: Blocks) -> np.ndarray:
    """As in the file, but that 127, which is NaN elsewhere, stands for 0 there."""
    scale = blocks[..., :4]
    return np.where(scale == 127, np.uint8(0), scale).view(ml_dtypes.float8_e4m3fn)


# Types whose codes have fewer bits than any that kernels know.
WIDER = "Q2_K", "Q3_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"
# The number of a type in files -> the type.
TYPES = {
    2: BlockType("Q4_0", 32, 18, "int4_32_float16", Planes(slice(2, 18), 16), lambda b: _floats(b, 0)),
    3: BlockType("Q4_1", 32, 20, "int4_32_float16_offsets", Planes(slice(4, 20), 16), lambda b: _floats(b, 0, 2)),
    6: BlockType("Q5_0", 32, 22, "int5_32_float16", lambda b: _five_bits(b, 2), lambda b: _floats(b, 0)),
    7: BlockType("Q5_1", 32, 24, "int5_32_float16_offsets", lambda b: _five_bits(b, 4), lambda b: _floats(b, 0, 2)),
    8: BlockType("Q8_0", 32, 34, "int8_32_float16", lambda b: b[..., 2:].view(np.int8), lambda b: _floats(b, 0)),
    10: BlockType("Q2_K", 256, 84, "int4_16_levels_offsets", lambda b: _parts(b[..., 16:80], 2, 32), _scales_q2),
    11: BlockType("Q3_K", 256, 110, "int4_16_levels", _codes_q3, _scales_q3),
    12: BlockType("Q4_K", 256, 144, "int4_32_levels_offsets", Planes(slice(16, 144), 32), _six_bits),
    13: BlockType("Q5_K", 256, 176, "int5_32_levels_offsets", Planes(slice(48, 176), 32, slice(16, 48)), _six_bits),
    14: BlockType("Q6_K", 256, 210, "int6_16_levels", Planes(slice(0, 128), 64, slice(128, 192)), _scales_q6),
    16: BlockType("IQ2_XXS", 256, 66, "int8_32_levels", _codes_iq2_xxs, lambda b: _scales_of_words(b, 2, 66, 1 / 8)),
    17: BlockType("IQ2_XS", 256, 74, "int8_16_levels", _codes_iq2_xs, lambda b: _scales_of_halves(b, 66, 74, 1 / 8)),
    18: BlockType("IQ3_XXS", 256, 98, "int8_32_levels", _codes_iq3_xxs, lambda b: _scales_of_words(b, 66, 98, 1 / 4)),
    20: BlockType("IQ4_NL", 32, 18, "iq4_32_float16", Planes(slice(2, 18), 16), lambda b: _floats(b, 0)),
    21: BlockType("IQ3_S", 256, 110, "int5_32_levels", _codes_iq3_s, lambda b: _scales_of_halves(b, 106, 110, 1)),
    22: BlockType("IQ2_S", 256, 82, "int8_16_levels", _codes_iq2_s, lambda b: _scales_of_halves(b, 74, 82, 1 / 8)),
    23: BlockType("IQ4_XS", 256, 136, "iq4_32_levels", Planes(slice(8, 136), 16), _scales_iq4),
    39: BlockType("MXFP4", 32, 17, "mxfp4", Planes(slice(1, 17), 16), lambda b: b[..., :1]),
    40: BlockType("NVFP4", 64, 36, "nvfp4", lambda b: _parts(b[..., 4:36], 4, 8), _scales_nvfp4),
}
