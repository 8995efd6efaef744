"""Weights of four bits in the format ``pack-quantized`` of the library compressed-tensors, which llm-compressor writes."""

import dataclasses

import numpy as np

from jspec.checkpoints.dequantize.format import WeightTensors, read_group_size, read_plain, read_scales
from jspec.checkpoints.dequantize.four_bits import MIDDLE, FourBitFormat, FourBitWeight, in_words, unpacked
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.huggingface.quantization_fields import require_one_of

ZEROS = ".weight_zero_point"  # how the name of a tensor of zeros ends


@dataclasses.dataclass(frozen=True)
class PackedWeight(FourBitWeight):
    """A weight ``[out, in]``, of which the codes of eight input features are in one number, the first in the lowest bits.

    Codes and zeros were -8..7, and ``MIDDLE`` was added to each of them before they were stored.

    Attributes:
      codes: int32 ``[out, ceil(in / 8)]``.
      scales: ``[out, groups]``.
      zeros: int32 ``[ceil(out / 8), groups]``, or None if code 8 is the zero everywhere.
      size: ``[2]``, the shape of the weight.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    size: Tensor

    def numbers(self, outputs: slice, inputs: slice, groups: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if tuple(size := self.size.read().tolist()) != self.shape:
            raise Refusal(
                f"{self.file}: tensor {self.size.name!r} holds {size}, but config.json asks for a weight {list(self.shape)}"
            )
        words, columns = in_words(inputs)
        codes = unpacked(self.codes.read_part((outputs, words)), 1)[:, columns]
        scales = read_scales(self.scales, True, (outputs, groups))
        zeros = np.broadcast_to(MIDDLE, scales.shape)
        if self.zeros is not None:
            words, rows = in_words(outputs)
            zeros = unpacked(self.zeros.read_part((words, groups)), 0)[rows]
        return codes.T, zeros.T, scales.T


@dataclasses.dataclass(frozen=True)
class PackQuantized(FourBitFormat):
    """The format ``pack-quantized`` with four bits.

    Attributes:
      symmetric: whether code 8 is the zero everywhere.
    """

    symmetric: bool

    @property
    def ends(self) -> tuple[str, ...]:
        return ".weight_packed", ".weight_scale", ".weight_shape", ZEROS

    @property
    def summary(self) -> str:
        return f"four bits with a scale for each {self.groups} (pack-quantized)"

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        size = parts.tensors.get(".weight_shape")
        return None if size is None or size.shape != (2,) else tuple(size.read().tolist())

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> PackedWeight:
        (outputs, inputs), zeros = shape, None
        groups = inputs // (group := self.group(inputs, parts))
        codes = parts.take(".weight_packed", (outputs, -(-inputs // 8)), ("int32",))
        scales = parts.take(".weight_scale", (outputs, groups))
        size = parts.take(".weight_shape", (2,), ("int64", "int32"))
        if not self.symmetric:
            zeros = parts.take(ZEROS, (-(-outputs // 8), groups), ("int32",))
        elif (extra := parts.tensors.get(ZEROS)) is not None:
            key = self.group_key.replace("group_size", "symmetric")
            raise Refusal(
                f"{parts.where}/{extra.file}: tensor {extra.name!r} is there, but {key}, which is true unless config.json "
                "says otherwise, says that there are no zeros; set it to false if there are"
            )
        return PackedWeight(name, codes.file, codes.path, shape, "float32", group, codes, scales, zeros, size)


def read_pack_quantized(fields: Fields, weights: Fields) -> PackQuantized:
    """The ``quantization_config`` of compressed-tensors with ``format: pack-quantized``.

    Args:
      fields: the whole of it.
      weights: what it says of the weights of all linear maps.

    Raises:
      Refusal: it says something that is not read.
    """
    require_one_of(weights, "num_bits", 4)
    require_one_of(weights, "type", "int", absent="int")
    require_one_of(weights, "dynamic", False, absent=False)
    require_one_of(weights, "actorder", False, "weight", "static", absent=False)
    require_one_of(weights, "strategy", "group", "channel")
    size = read_group_size(weights) if weights.raw["strategy"] == "group" else -1
    plain, listed = read_plain(fields, "ignore")
    symmetric = weights.flag("symmetric", True)
    return PackQuantized(plain, listed, fields.where, size, f"{weights.prefix}group_size", symmetric)
