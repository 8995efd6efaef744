"""Weights of four or eight bits: eight or four codes in an int32, and a zero and a scale for each group of input
features."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import STORED_DTYPES, ComputedTensor, Tensor
from jspec.checkpoints.quantized.format import (
    BlockFormat,
    Grouping,
    StoredParts,
    WeightTensors,
    read_scales,
    scales_of_channels,
)
from jspec.checkpoints.quantized.stored_codes import CodedTensor, RepackedCodes
from jspec.quantization.codes import BLOCK
from jspec.quantization.formats import KINDS, SIZES, StoredArray, grouped

IN_WORDS = {4: "four", 8: "eight"}  # numbers of bits


def middle(bits: int) -> np.uint8:
    """The code that stands for 0 where a weight is symmetric."""
    return np.uint8(1 << (bits - 1))


def each(bits: int) -> int:
    """How many codes an int32 holds."""
    return 32 // bits


class Numbers(NamedTuple):
    """What a weight, or a part of one, is computed from.

    Attributes:
      codes: uint8 ``[in, out]``.
      zeros: uint8 ``[groups, out]``, the codes that stand for 0.
      scales: float32 ``[groups, out]``.
      groups: int ``[in]``, the group of each input feature.
    """

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray


@dataclasses.dataclass(frozen=True)
class PackedCodes(CodedTensor):
    """A weight ``[out, in]``, each number of which is ``(code - zero) * scale``.

    Attributes:
      bits: of a code, 4 or 8.
      group_size: how many input features share a zero and a scale; -1 if all do.
      scales: of all groups.
    """

    bits: int
    group_size: int
    scales: Tensor

    @property
    def group(self) -> int:
        """How many input features share a zero and a scale."""
        return self.shape[1] if self.group_size == -1 else self.group_size

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads the codes of that part and of what shares an int32 with it, and their groups alone."""
        outputs, inputs = (slice(*bound) for bound in bounds_of(index, self.shape))
        if outputs.start >= outputs.stop or inputs.start >= inputs.stop:
            return np.empty(self.shape, np.float32)[index]
        groups = self.groups()[inputs]
        used = slice(groups.min(), groups.max() + 1)
        numbers = Numbers(self.codes_of(outputs, inputs), *self.of_groups(outputs, used), groups - used.start)
        return dequantized(numbers, self.bits).T

    def codes_of(self, outputs: slice, inputs: slice) -> np.ndarray:
        """The codes of some features, uint8 ``[in, out]``."""
        words, rows = in_words(inputs, self.bits)
        return unpacked(self.words_of(outputs, words), 0, self.bits)[rows]

    def check(self):
        """Read all but the codes, which are few, and refuse what they cannot be."""
        self.of_groups(slice(0, self.shape[0]), slice(0, self.shape[1] // self.group))
        self.groups()

    @abc.abstractmethod
    def of_groups(self, outputs: slice, groups: slice) -> tuple[np.ndarray, np.ndarray]:
        """The zeros, uint8 ``[groups, out]``, and the scales, float32 ``[groups, out]``, of some output features and
        groups.

        Raises:
          Refusal: some of them contradict config.json, or cannot be scales.
        """

    @property
    @abc.abstractmethod
    def has_zeros(self) -> bool:
        """Whether the code that stands for 0 may be another one than that in the middle."""

    def stored(self) -> StoredParts | None:
        """As ``QuantizedTensor.stored``; None because of its groups or of the order of its inputs."""
        size, bits, scales = self.group_size, self.bits, self.scales
        group = None if size == -1 else size if size in SIZES else BLOCK
        order = self.input_order()
        even = order is None or np.array_equal(self.groups()[order], self.consecutive())
        if (group == BLOCK and size % BLOCK) or not even:
            return None
        form = grouped(bits, group, scales.dtype, self.has_zeros, order is not None)
        codes = RepackedCodes.of(self, 0, self.shape[1])
        if bits == 8:
            codes = ComputedTensor.of(self, self.shape, "int8", self.byte_codes, self.check)
        if form == grouped(8, None, form.scale) and (read_scales(scales, True) > 0).all():
            parts = {"weight": codes, "scale": scales_of_channels(scales, self.shape[0])}
            return StoredParts(KINDS["int8"], parts)  # as jspec stores it itself
        scale = form.arrays(self.shape)["scale"]
        of_groups = functools.partial(self.scales_of_groups, scale, 1 if group is None else size // group)
        parts = {"weight": codes, "scale": ComputedTensor.of(self, scale.shape, scale.dtype, of_groups, self.check)}
        if order is not None:
            parts["order"] = ComputedTensor.of(self, order.shape, "int32", self.part_of_order)
        return StoredParts(form, parts)

    def part_of_order(self, index: Index) -> np.ndarray:
        """A part of ``input_order()``, of a weight that has an order."""
        order = self.input_order()
        assert order is not None
        return order[index]

    def byte_codes(self, index: Index) -> np.ndarray:
        """A part of the codes of eight bits less 128, int8 ``[out, in]``."""
        outputs, inputs = (slice(*bound) for bound in bounds_of(index, self.shape))
        words = self.words_by_group(outputs, inputs, bits=8).T ^ np.uint32(0x80808080)
        return np.ascontiguousarray(words).view(np.int8)[:, : inputs.stop - inputs.start]

    def scales_of_groups(self, scale: StoredArray, repeats: int, index: Index) -> np.ndarray:
        """A part of the scales of the groups, ``[out, groups]``, or of scales and zeros ``[out, groups, 2]``.

        Args:
          scale: shape and dtype of the whole, the dtype that of the files.
          repeats: how many groups one of the files is: one of 256 inputs is two of 128.
          index: of the part.
        """
        (first, stop), (left, right), *_ = bounds_of(index, scale.shape)
        groups = slice(left // repeats, -(-right // repeats))
        zeros, scales = self.of_groups(slice(first, stop), groups)
        zeros = zeros.astype(np.float32) - (128 if self.bits == 8 else 0)
        arrays = scales if len(scale.shape) == 2 else np.stack([scales, zeros], axis=-1)
        found = np.repeat(arrays.swapaxes(0, 1), repeats, axis=1)[:, left - groups.start * repeats :]
        return found[:, : right - left].astype(STORED_DTYPES[scale.dtype])

    def groups(self) -> np.ndarray:
        """The group of each input feature, int ``[in]``."""
        return self.consecutive()

    def consecutive(self) -> np.ndarray:
        """The groups of the input features, ``[in]``, if those of a group follow each other."""
        return np.arange(self.shape[1]) // self.group


@dataclasses.dataclass(frozen=True)
class OrderedCodes(PackedCodes):
    """A weight whose groups of input features need not follow each other.

    Attributes:
      order: int32 ``[in]``, the group of each input feature; None if the groups follow each other.
    """

    order: Tensor | None

    def input_order(self) -> np.ndarray | None:
        groups = self.groups()
        return (
            None if np.array_equal(groups, self.consecutive()) else np.argsort(groups, kind="stable").astype(np.int32)
        )

    def groups(self) -> np.ndarray:
        if self.order is None:
            return self.consecutive()
        groups, count = self.order.read(), self.shape[1] // self.group
        wrong = groups[(groups < 0) | (groups >= count)]
        if len(wrong):
            raise Refusal(
                f"{self.file}: tensor {self.order.name!r} holds {wrong[0]}: expected groups in 0..{count - 1}; fetch it "
                "again"
            )
        return groups


@dataclasses.dataclass(frozen=True)
class SymmetricCodes(PackedCodes):
    """A weight whose scales are ``[out, groups]``, and of which the code in the middle is the zero everywhere."""

    @property
    def has_zeros(self) -> bool:
        return False

    def of_groups(self, outputs: slice, groups: slice) -> tuple[np.ndarray, np.ndarray]:
        scales = read_scales(self.scales, True, (outputs, groups)).T
        return np.broadcast_to(middle(self.bits), scales.shape), scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodesFormat(BlockFormat):
    """How a checkpoint stores weights of four or eight bits.

    Attributes:
      grouping: how many input features share a scale.
      words: with the places ``{bits}``, ``four bits``, and ``{groups}``, what has a scale.
    """

    grouping: Grouping

    @property
    def summary(self) -> str:
        return self.words.format(bits=f"{IN_WORDS[self.bits]} bits", groups=self.groups)

    @property
    def groups(self) -> str:
        """What has a scale, in words."""
        return "output channel" if self.grouping.size == -1 else f"{self.grouping.size} input features"

    def made(self, kind: type[PackedCodes], name: str, shape: tuple[int, int], codes: Tensor, **fields: Any) -> Any:
        """The weight of a ``kind`` in this format."""
        return kind.of(name, shape, codes, bits=self.bits, group_size=self.grouping.size, codes=codes, **fields)

    def group(self, inputs: int, parts: WeightTensors) -> int:
        """How many of the ``inputs`` input features of a linear map share a scale.

        Raises:
          Refusal: the groups would not have the same size.
        """
        size = self.grouping.size
        if size != -1 and inputs % size:
            raise Refusal(
                f"{self.where}: {self.grouping.key}={size}: expected -1 or a divisor of {inputs}, the number of "
                f"input features of {parts.module!r}"
            )
        return inputs if size == -1 else size


def in_words(part: slice, bits: int) -> tuple[slice, slice]:
    """Which int32 hold the codes of consecutive features, and which of the codes in these they are."""
    n = each(bits)
    words = slice(part.start // n, -(-part.stop // n))
    return words, slice(part.start - n * words.start, part.stop - n * words.start)


def unpacked(words: np.ndarray, axis: int, bits: int, order: Sequence[int] | None = None) -> np.ndarray:
    """The codes in ``words``, uint8 with n times the length along ``axis``, n being those in an int32.

    Args:
      words: int32 or uint32, of two dimensions.
      axis: the one along which the n codes of a number follow each other.
      bits: of a code.
      order: the place among these n of the code in the lowest bits, of that in the next, and so on; None is in turn.
    """
    words, n = words.view(np.uint32), each(bits)
    codes = np.empty([n * size if i == axis else size for i, size in enumerate(words.shape)], np.uint8)
    places = codes.swapaxes(0, axis)  # a view, like the next line's
    for i, place in enumerate(range(n) if order is None else order):
        places[place::n] = (words.swapaxes(0, axis) >> np.uint32(bits * i)) & np.uint32((1 << bits) - 1)
    return codes


def dequantized(numbers: Numbers, bits: int) -> np.ndarray:
    """``(code - zero) * scale``, float32 ``[in, out]``."""
    codes, zeros, scales, groups = numbers
    values = np.empty_like(codes, np.float32)
    # Neighbours of one group are multiplied together. Differences of codes of four bits fit into eight.
    codes, zeros = (x.view(np.int8) if bits == 4 else x.astype(np.int16) for x in (codes, zeros))
    starts = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(codes)], strict=True):
        group = groups[start]
        np.multiply(codes[start:stop] - zeros[group], scales[group], out=values[start:stop])
    return values
