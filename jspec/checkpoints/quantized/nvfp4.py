"""NVFP4 weights, as compressed-tensors (llm-compressor) and NVIDIA Model Optimizer write them.

A code has four bits, a sign and one of eight magnitudes (E2M1). Two are in a byte, the first in its lower half. Each 16
input features of an output channel share a scale in float8_e4m3fn, and the whole weight has one more number in float32.
That number divides the scales in files of compressed-tensors, and multiplies them in those of Model Optimizer."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.e2m1 import E2M1Format, E2M1Weight, require_whole_groups
from jspec.checkpoints.quantized.format import StoredParts, WeightTensors, read_plain, read_scales
from jspec.checkpoints.quantized.fp8 import FP8
from jspec.quantization.formats import KINDS
from jspec.quantization.nvfp4 import GROUP, channel_scales


@dataclasses.dataclass(frozen=True)
class NVFP4Weight(E2M1Weight):
    """A weight ``[out, in]``, each number of which is that of a code times the scale of its group.

    Attributes:
      scales: float8_e4m3fn ``[out, in / 16]``.
      overall: float32, the number of the whole weight.
      divides: whether it divides the scales.
    """

    overall: Tensor
    divides: bool

    @property
    def group(self) -> int:
        return GROUP

    def stored(self) -> StoredParts:
        of_channels = ChannelScales(self.name, self.file, self.path, (self.shape[0], 2), "float32", self)
        return StoredParts(KINDS["nvfp4"], self.repacked, self.scales, of_channels)

    def factors(self, rows: slice, groups: slice) -> np.ndarray:
        overall, scales = read_scales(self.overall).reshape(()), self.read_scales((rows, groups)).astype(np.float32)
        return scales / overall if self.divides else scales * overall

    def read_scales(self, index: Index = ()) -> np.ndarray:
        """The scales of groups, float8_e4m3fn. A scale of 0 is valid, of a group of zeros."""
        scales = self.scales.read_part(index)
        values = scales.astype(np.float32)
        if not np.all(np.isfinite(values) & (values >= 0)):
            raise Refusal(
                f"{self.scales.file}: tensor {self.scales.name!r} holds numbers that are negative or NaN: expected scales; "
                "fetch it again"
            )
        return scales


@dataclasses.dataclass(frozen=True)
class ChannelScales(Tensor):
    """What multiplies and what divides the scales of each output channel in NVFP4, float32 ``[out, 2]``.

    Attributes:
      stored: the weight in the files.
    """

    stored: NVFP4Weight

    def read(self) -> np.ndarray:
        number = float(read_scales(self.stored.overall).reshape(()))
        return channel_scales(number, self.stored.divides, self.shape[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(E2M1Format):
    """NVFP4.

    Attributes:
      divides: whether the number of the whole weight, the last of ``ends``, divides the scales.
    """

    divides: bool

    @property
    def summary(self) -> str:
        return f"NVFP4, four bits with a scale for each {GROUP} input features"

    def is_quantized(self, tensors) -> bool:
        codes = tensors.get(self.ends[0])
        return self.ends[-1] in tensors or (codes is not None and codes.dtype == "uint8")

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> NVFP4Weight:
        (outputs, inputs), (codes_end, scale_end, overall_end) = shape, self.ends
        require_whole_groups(parts.module, inputs, GROUP, parts.where)
        codes = parts.take(codes_end, (outputs, inputs // 2), ("uint8",))
        scales = parts.take(scale_end, (outputs, inputs // GROUP), (FP8,))
        found = parts.tensors.get(overall_end)
        overall = parts.take(overall_end, () if found is not None and found.shape == () else (1,), ("float32",))
        return NVFP4Weight(name, codes.file, codes.path, shape, "float32", codes, scales, overall, self.divides)


def read_nvfp4_pack_quantized(fields: Fields, weights: Fields) -> NVFP4:
    """The ``quantization_config`` of compressed-tensors with ``format: nvfp4-pack-quantized``.

    Args:
      fields: the whole of it.
      weights: what it says of the weights of all linear maps.

    Raises:
      Refusal: it says something that is not read.
    """
    for name, only in (("num_bits", 4), ("type", "float"), ("strategy", "tensor_group"), ("group_size", GROUP)):
        require_one_of(weights, name, only)
    require_one_of(weights, "symmetric", True, absent=True)
    require_one_of(weights, "dynamic", False, absent=False)
    plain, key = read_plain(fields, "ignore")
    return NVFP4(
        plain=plain,
        key=key,
        where=fields.where,
        ends=(".weight_packed", ".weight_scale", ".weight_global_scale"),
        divides=True,
    )


def read_nvfp4_of_model_optimizer(fields: Fields, *listed: str) -> NVFP4:
    """The ``quantization_config`` of NVIDIA Model Optimizer with the algorithm NVFP4.

    Args:
      fields: the whole of it.
      listed: what its list of modules that are not quantised may be called.

    Raises:
      Refusal: it says something that is not read.
    """
    require_one_of(fields, "group_size", GROUP, absent=GROUP)
    plain, key = read_plain(fields, *listed)
    return NVFP4(
        plain=plain, key=key, where=fields.where, ends=(".weight", ".weight_scale", ".weight_scale_2"), divides=False
    )
