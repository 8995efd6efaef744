"""Weights of four or eight bits in the format ``pack-quantized`` of compressed-tensors, which llm-compressor writes."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import WeightTensors, read_grouping, read_plain, read_scales
from jspec.checkpoints.quantized.packed_codes import CodesFormat, PackedCodes, each, in_words, middle, unpacked

ZEROS = ".weight_zero_point"  # how the name of a tensor of zeros ends


@dataclasses.dataclass(frozen=True)
class PackedWeight(PackedCodes):
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

    def codes_of(self, outputs: slice, inputs: slice) -> np.ndarray:
        self._require_size()
        words, columns = in_words(inputs, self.bits)
        return unpacked(self.codes.read_part((outputs, words)), 1, self.bits)[:, columns].T

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
    """

    symmetric: bool

    ends: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_shape", ZEROS)

    @property
    def summary(self) -> str:
        return f"{self.bits_in_words} with a scale for each {self.groups} (pack-quantized)"

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
        about = name, codes.file, codes.path, shape, "float32", self.bits, self.grouping.size
        return PackedWeight(*about, scales, codes, zeros, size)


def read_pack_quantized(fields: Fields, weights: Fields) -> PackQuantized:
    """The format ``pack-quantized`` of compressed-tensors; arguments and exceptions are those of ``IN_CODES``."""
    require_one_of(weights, "num_bits", 4, 8)
    require_one_of(weights, "type", "int", absent="int")
    require_one_of(weights, "dynamic", False, absent=False)
    require_one_of(weights, "strategy", "group", "channel")
    return PackQuantized(
        grouping=read_grouping(weights, of_all=weights.raw["strategy"] == "channel"),
        plain=read_plain(fields, "ignore"),
        bits=weights.raw["num_bits"],
        symmetric=weights.flag("symmetric", True),
    )
