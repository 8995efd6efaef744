"""Weights of four or eight bits in the format ``pack-quantized`` of compressed-tensors, which llm-compressor writes, and
with a byte for each code: those of four bits in its ``int-quantized`` (W4A8, W4AFP8), and those of torchao."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import Grouping, WeightTensors, read_grouping, read_plain, read_scales
from jspec.checkpoints.quantized.packed_codes import (
    CodesFormat,
    OrderedCodes,
    SymmetricCodes,
    each,
    in_words,
    middle,
    unpacked,
)
from jspec.quantization.codes import words_of_codes

ZEROS, _ORDER = ".weight_zero_point", ".weight_g_idx"  # how the names of tensors of zeros and of groups end


@dataclasses.dataclass(frozen=True)
class PackedWeight(OrderedCodes):
    """A weight ``[out, in]``, of which the codes of n input features are in one number, the first in the lowest bits; n is
    8 for four bits, and 4 for eight.

    Codes and zeros were -8..7 or -128..127, and 8 or 128 was added to each of them before they were stored.

    Attributes:
      scales: ``[out, groups]``.
      codes: int32 ``[out, ceil(in / n)]``.
      zeros: int32 ``[ceil(out / n), groups]``, or None if 8 or 128 is the zero everywhere.
      size: ``[2]``, the shape of the weight.
    """

    codes: Tensor
    zeros: Tensor | None
    size: Tensor

    @property
    def has_zeros(self) -> bool:
        return self.zeros is not None

    def check(self):
        super().check()
        self._require_size()

    def words_of(self, outputs: slice, words: slice) -> np.ndarray:
        self._require_size()
        return self.codes.read_part((outputs, words)).view(np.uint32).T

    def groups(self) -> np.ndarray:
        """As ``OrderedCodes.groups``; the library writes -1 for each input feature where groups follow each other."""
        if self.order is not None and (self.order.read() == -1).all():
            return self.consecutive()
        return super().groups()

    def of_groups(self, outputs: slice, groups: slice) -> tuple[np.ndarray, np.ndarray]:
        scales = read_scales(self.scales, True, (outputs, groups))
        zeros = np.broadcast_to(middle(self.bits), scales.shape)
        if self.zeros is not None:
            words, rows = in_words(outputs, self.bits)
            zeros = unpacked(self.zeros.read_part((words, groups)), 0, self.bits)[rows]
        return zeros.T, scales.T

    def _require_size(self):
        """Raise a ``Refusal`` unless the files give the weight the shape that it has by config.json."""
        if tuple(size := self.size.read().tolist()) != self.shape:
            raise Refusal(
                f"{self.file}: tensor {self.size.name!r} holds {size}, but config.json asks for a weight {list(self.shape)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackQuantized(CodesFormat):
    """The format ``pack-quantized`` with four or eight bits.

    Attributes:
      symmetric: whether the code in the middle is the zero everywhere.
      ordered: whether the files say the group of each input feature. Others may do so, too.
    """

    symmetric: bool
    ordered: bool = False

    ends: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_shape", ZEROS, _ORDER)
    words: str = "{bits} with a scale for each {groups} (pack-quantized)"

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        size = parts.tensors.get(".weight_shape")
        return None if size is None or size.shape != (2,) else tuple(size.read().tolist())

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> PackedWeight:
        (outputs, inputs), zeros = shape, None
        groups = inputs // self.group(inputs, parts)
        codes = parts.take(".weight_packed", (outputs, -(-inputs // each(self.bits))), ("int32",))
        scales = parts.take(".weight_scale", (outputs, groups))
        size = parts.take(".weight_shape", (2,), ("int64", "int32"))
        if not self.symmetric:
            zeros = parts.take(ZEROS, (-(-outputs // each(self.bits)), groups), ("int32",))
        elif (extra := parts.tensors.get(ZEROS)) is not None:
            key = self.grouping.key.replace("group_size", "symmetric")
            raise Refusal(
                f"{parts.where}/{extra.file}: tensor {extra.name!r} is there, but {key}, which is true unless config.json "
                "says otherwise, says that there are no zeros; set it to false if there are"
            )
        order = parts.take(_ORDER, (inputs,), ("int32",)) if self.ordered or _ORDER in parts.tensors else None
        return self.made(PackedWeight, name, shape, codes=codes, scales=scales, zeros=zeros, order=order, size=size)


@dataclasses.dataclass(frozen=True)
class BytesWeight(SymmetricCodes):
    """A weight ``[out, in]`` with a byte for each code.

    Attributes:
      scales: ``[out, groups]``.
      codes: int8 ``[out, in]``, of four bits -8..7.
      zeros: as the codes, ``[out, groups]``; None if 0 is the zero everywhere.
    """

    codes: Tensor
    zeros: Tensor | None = None

    @property
    def has_zeros(self) -> bool:
        return self.zeros is not None and bool(self.zeros.read().any())

    def words_of(self, outputs: slice, words: slice) -> np.ndarray:
        inputs = slice(each(self.bits) * words.start, each(self.bits) * words.stop)
        return words_of_codes(self._unsigned(self.codes, (outputs, inputs)), self.bits).T

    def of_groups(self, outputs: slice, groups: slice) -> tuple[np.ndarray, np.ndarray]:
        zeros, scales = super().of_groups(outputs, groups)
        return zeros if self.zeros is None else self._unsigned(self.zeros, (outputs, groups)).T, scales

    def _unsigned(self, tensor: Tensor, index: Index) -> np.ndarray:
        """A part of the codes in a tensor, from 0 on."""
        codes, half = tensor.read_part(index), int(middle(self.bits))
        wrong = codes[(codes < -half) | (codes >= half)]
        if wrong.size:
            raise Refusal(
                f"{self.file}: tensor {tensor.name!r} holds {wrong[0]}: expected codes in -8..7, of four bits; fetch it "
                "again"
            )
        return codes.view(np.uint8) + middle(self.bits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodesInBytes(CodesFormat):
    """Codes of four or eight bits with a byte each, as ``int-quantized`` has those of four.

    Attributes:
      zeros_end: the suffix of the tensors of zeros; None if there are none.
    """

    bits: int = 4
    ends: tuple[str, ...] = (".weight", ".weight_scale")
    dtype: str | None = "int8"
    zeros_end: str | None = None
    words: str = "{bits} in a byte each with a scale for each {groups} (int-quantized)"

    @property
    def bytes_each(self) -> str:
        return "one"

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> BytesWeight:
        codes, groups = parts.take(self.ends[0], shape, ("int8",)), shape[1] // self.group(shape[1], parts)
        scales = parts.take(self.scale_end, (shape[0], groups))
        zeros = self.zeros_end and parts.take(self.zeros_end, (shape[0], groups), ("int8",))
        return self.made(BytesWeight, name, shape, codes=codes, scales=scales, zeros=zeros or None)


def read_codes_in_bytes(fields: Fields, weights: Fields) -> CodesInBytes:
    """The format ``int-quantized`` of compressed-tensors with four bits; arguments and exceptions are those of
    ``IN_CODES``."""
    require_one_of(weights, "symmetric", True, absent=True)
    return CodesInBytes(grouping=_read_codes(weights), plain=read_plain(fields, "ignore"))


def read_pack_quantized(fields: Fields, weights: Fields) -> PackQuantized:
    """The format ``pack-quantized`` of compressed-tensors; arguments and exceptions are those of ``IN_CODES``."""
    require_one_of(weights, "num_bits", 4, 8)
    return PackQuantized(
        grouping=_read_codes(weights),
        plain=read_plain(fields, "ignore"),
        bits=weights.raw["num_bits"],
        symmetric=weights.flag("symmetric", True),
        ordered=weights.raw.get("actorder") == "group",
    )


def _read_codes(weights: Fields) -> Grouping:
    """How many input features share a scale, by what is said of weights, the rest of which has to be as it is read here."""
    require_one_of(weights, "type", "int", absent="int")
    require_one_of(weights, "dynamic", False, absent=False)
    require_one_of(weights, "strategy", "group", "channel")
    return read_grouping(weights, of_all=weights.raw["strategy"] == "channel")
