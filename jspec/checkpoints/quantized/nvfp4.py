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
from jspec.checkpoints.quantized.e2m1 import E2M1Weight, require_whole_groups
from jspec.checkpoints.quantized.format import BlockFormat, WeightTensors, read_plain, read_scales
from jspec.checkpoints.quantized.fp8 import FP8
from jspec.quantization.nvfp4 import GROUP


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
class NVFP4(BlockFormat):
    """NVFP4.

    Attributes:
      codes_end, overall_end: how the names of the tensors of codes and of the number of the whole weight end.
      divides: whether that number divides the scales.
    """

    codes_end: str
    overall_end: str
    divides: bool

    @property
    def bytes_each(self) -> str:
        return "half a one"

    @property
    def scale_end(self) -> str:
        return ".weight_scale"

    @property
    def summary(self) -> str:
        return f"NVFP4, four bits with a scale for each {GROUP} input features"

    @property
    def ends(self) -> tuple[str, ...]:
        return self.codes_end, ".weight_scale", self.overall_end

    def is_quantized(self, tensors) -> bool:
        codes = tensors.get(self.codes_end)
        return self.overall_end in tensors or (codes is not None and codes.dtype == "uint8")

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        codes = parts.tensors.get(self.codes_end)
        return None if codes is None else (*codes.shape[:-1], 2 * codes.shape[-1])

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> NVFP4Weight:
        outputs, inputs = shape
        require_whole_groups(parts.module, inputs, GROUP, parts.where)
        codes = parts.take(self.codes_end, (outputs, inputs // 2), ("uint8",))
        scales = parts.take(".weight_scale", (outputs, inputs // GROUP), (FP8,))
        found = parts.tensors.get(self.overall_end)
        overall = parts.take(self.overall_end, () if found is not None and found.shape == () else (1,), ("float32",))
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
    return NVFP4(plain, key, fields.where, ".weight_packed", ".weight_global_scale", divides=True)


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
    return NVFP4(plain, key, fields.where, ".weight", ".weight_scale_2", divides=False)
