"""Codes as jspec stores them (``jspec.quantization``), read from the tensors of a checkpoint.

GPTQ, AWQ, compressed-tensors and Model Optimizer pack codes in orders of their own. They are packed anew while they are
read, one weight at a time. Not a code, a zero or a scale is changed."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.tensor import STORED_DTYPES, Tensor
from jspec.checkpoints.quantized.e2m1 import E2M1Weight
from jspec.checkpoints.quantized.format import read_scales
from jspec.checkpoints.quantized.mxfp4 import MXFP4Weight
from jspec.checkpoints.quantized.nvfp4 import NVFP4Weight
from jspec.checkpoints.quantized.packed_codes import PackedCodes
from jspec.checkpoints.quantized.scales import Scales
from jspec.quantization import nvfp4
from jspec.quantization.codes import BLOCK, HALF, pack_codes
from jspec.quantization.formats import INT4, SIZES, grouped


class Kept(NamedTuple):
    """A weight ``[out, in]`` as it is stored.

    Attributes:
      numbers: its numbers ``[out, in]``, or packed codes ``[out, 64 blocks]``.
      scales: ``[out]``, ``[out, groups]`` or, with zeros, ``[out, groups, 2]``.
      quantization: the name of what these are, as in ``ModelConfig.quantization``.
      channel_scales: of NVFP4, ``[out, 2]``; else None.
      order: int32 ``[in]``, which input of x each input is, where they are in another order; else None.
    """

    numbers: Tensor
    scales: Tensor
    quantization: str
    channel_scales: Tensor | None = None
    order: Tensor | None = None

    def rows(self, part: Callable[[Tensor], Tensor]) -> "Kept":
        """Some of its output channels, those that ``part`` takes of a tensor."""
        numbers, scales, quantization, channel_scales, order = self
        of_channels = None if channel_scales is None else part(channel_scales)
        return Kept(part(numbers), part(scales), quantization, of_channels, order)


def _by_group(weight: PackedCodes | E2M1Weight, outputs: slice, inputs: slice) -> np.ndarray:
    """The codes of some features, uint8 ``[in, out]``, of inputs in an order in which those of a group follow each other."""
    order = weight.input_order() if isinstance(weight, PackedCodes) else None
    if order is None:
        return weight.codes_of(outputs, inputs)
    return weight.codes_of(outputs, slice(0, len(order)))[order[inputs]]


@dataclasses.dataclass(frozen=True)
class InputOrder(Tensor):
    """The inputs of a weight, group by group: int32 ``[in]``.

    Attributes:
      stored: the weight in the files, whose inputs are in another order.
    """

    stored: PackedCodes

    def read(self) -> np.ndarray:
        order = self.stored.input_order()
        assert order is not None
        return order


@dataclasses.dataclass(frozen=True)
class RepackedCodes(Tensor):
    """The codes of neighbouring inputs of a weight, packed as jspec packs them: uint8 ``[out, 64 blocks]``.

    Attributes:
      stored: the weight in the files.
      first: the first of these inputs, from which blocks are counted.
      count: how many inputs there are.
    """

    stored: PackedCodes | E2M1Weight
    first: int
    count: int

    @classmethod
    def of(cls, stored: PackedCodes | E2M1Weight, first: int, count: int) -> "RepackedCodes":
        shape = INT4.arrays((stored.shape[0], count))["weight"].shape
        return cls(stored.name, stored.file, stored.path, shape, "uint8", stored, first, count)

    def check(self):
        self.stored.check()

    def read(self) -> np.ndarray:
        return self.read_part(())

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads the codes of whole blocks of inputs."""
        (first, stop), (left, right) = bounds_of(index, self.shape)
        blocks = slice(left // HALF, -(-right // HALF))
        inputs = slice(self.first + blocks.start * BLOCK, self.first + min(blocks.stop * BLOCK, self.count))
        packed = pack_codes(_by_group(self.stored, slice(first, stop), inputs).T)
        return packed[:, left - blocks.start * HALF : right - blocks.start * HALF]


@dataclasses.dataclass(frozen=True)
class ByteCodes(Tensor):
    """The codes of a weight of eight bits less 128: int8 ``[out, in]``.

    Attributes:
      stored: the weight in the files.
    """

    stored: PackedCodes

    def check(self):
        self.stored.check()

    def read(self) -> np.ndarray:
        return self.read_part(())

    def read_part(self, index: Index) -> np.ndarray:
        outputs, inputs = (slice(*bound) for bound in bounds_of(index, self.shape))
        return np.ascontiguousarray(_by_group(self.stored, outputs, inputs).T ^ np.uint8(128)).view(np.int8)


@dataclasses.dataclass(frozen=True)
class CodeScales(Tensor):
    """The scales of the groups of a weight in the dtype of the files, ``[out, groups]``, or scales and zeros ``[out, groups,
    2]``.

    Attributes:
      stored: the weight in the files.
      repeats: how many groups one of the files is: one of 256 inputs is two of 128.
    """

    stored: PackedCodes
    repeats: int

    def check(self):
        self.stored.check()

    def read(self) -> np.ndarray:
        return self.read_part(())

    def read_part(self, index: Index) -> np.ndarray:
        (first, stop), (left, right), *_ = bounds_of(index, self.shape)
        groups = slice(left // self.repeats, -(-right // self.repeats))
        zeros, scales = self.stored.of_groups(slice(first, stop), groups)
        zeros = zeros.astype(np.float32) - (128 if self.stored.bits == 8 else 0)
        arrays = scales if len(self.shape) == 2 else np.stack([scales, zeros], axis=-1)
        found = np.repeat(arrays.swapaxes(0, 1), self.repeats, axis=1)[:, left - groups.start * self.repeats :]
        return found[:, : right - left].astype(STORED_DTYPES[self.dtype])


def kept_codes(weight: PackedCodes) -> Kept | None:
    """A weight of codes as it is stored; None if it cannot be kept, because of its groups or the order of its inputs."""
    size, bits = weight.group_size, weight.bits
    group = None if size == -1 else size if size in SIZES else BLOCK
    order, about = weight.input_order(), (weight.name, weight.file, weight.path)
    even = order is None or np.array_equal(weight.groups()[order], weight.consecutive())
    if (group == BLOCK and size % BLOCK) or not even:
        return None
    form = grouped(bits, group, weight.scales.dtype, weight.has_zeros, order is not None)
    codes: Tensor = (
        RepackedCodes.of(weight, 0, weight.shape[1]) if bits == 4 else ByteCodes(*about, weight.shape, "int8", weight)
    )
    if form == grouped(8, None, form.scale) and (read_scales(weight.scales, True) > 0).all():
        return Kept(
            codes, Scales(*about, weight.shape[:1], form.scale, weight.scales), "int8"
        )  # as jspec stores it itself
    scales = CodeScales(
        *about, form.arrays(weight.shape)["scale"].shape, form.scale, weight, 1 if group is None else size // group
    )
    of_inputs = None if order is None else InputOrder(*about, order.shape, "int32", weight)
    return Kept(codes, scales, form.name, order=of_inputs)


@dataclasses.dataclass(frozen=True)
class ChannelScales(Tensor):
    """What multiplies and what divides the scales of each output channel in NVFP4, float32 ``[out, 2]``.

    Attributes:
      stored: the weight in the files.
    """

    stored: NVFP4Weight

    def read(self) -> np.ndarray:
        number = float(read_scales(self.stored.overall).reshape(()))
        return nvfp4.channel_scales(number, self.stored.divides, self.shape[0])


def kept_nvfp4(weight: NVFP4Weight) -> Kept:
    """A weight in NVFP4 as it is stored."""
    about, outputs = (weight.name, weight.file, weight.path), weight.shape[0]
    codes = RepackedCodes.of(weight, 0, weight.shape[1])
    return Kept(codes, weight.scales, "nvfp4", ChannelScales(*about, (outputs, 2), "float32", weight))


def kept_mxfp4(weight: MXFP4Weight) -> Kept:
    """A weight in MXFP4 as it is stored."""
    return Kept(RepackedCodes.of(weight, 0, weight.shape[1]), weight.scales, "mxfp4")
