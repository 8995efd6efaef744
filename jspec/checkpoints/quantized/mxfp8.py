"""MXFP8 of compressed-tensors (llm-compressor) and of NVIDIA Model Optimizer: FP8 numbers, and for each 32 inputs of an
output channel a byte n that stands for 2^(n - 127) (E8M0)."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.fp8_numbers import FP8Numbers
from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.e2m1 import require_microscaling
from jspec.checkpoints.quantized.format import (
    BlockFormat,
    QuantizedTensor,
    StoredParts,
    WeightTensors,
    read_plain,
    read_powers,
)
from jspec.checkpoints.quantized.fp8 import shape_of_numbers
from jspec.quantization.formats import KINDS

_FORM = KINDS["mxfp8"]
_GROUP = 32


@dataclasses.dataclass(frozen=True)
class MXFP8Weight(QuantizedTensor):
    """A weight ``[out, in]`` whose numbers are multiplied by the powers of two of their groups.

    Attributes:
      numbers: float8_e4m3fn ``[out, in]``.
      scales: uint8 ``[out, in / 32]``.
    """

    numbers: Tensor
    scales: Tensor

    def stored(self) -> StoredParts:
        read = self.scales.read_part
        scales = ComputedTensor.of(self.scales, self.scales.shape, _FORM.scale, read, self.check)
        return StoredParts(_FORM, {"weight": self.numbers, "scale": scales})

    def check(self):
        read_powers(self.scales, _FORM)

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads the numbers of that part, and the scales of their groups alone."""
        (first, stop), (left, right) = bounds_of(index, self.shape)
        groups = slice(left // _GROUP, -(-right // _GROUP))
        powers = np.repeat(read_powers(self.scales, _FORM, (slice(first, stop), groups)), _GROUP, axis=1)
        skipped = groups.start * _GROUP
        return self.numbers.read_part(index).astype(np.float32) * powers[:, left - skipped : right - skipped]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP8(BlockFormat):
    """MXFP8 of linear maps."""

    bits: int = 8
    ends: tuple[str, ...] = (".weight", ".weight_scale")
    dtype: str | None = _FORM.numbers

    @property
    def summary(self) -> str:
        return f"MXFP8, eight bits with a power of two for each {_GROUP} input features"

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        return shape_of_numbers(parts)

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> MXFP8Weight:
        parts.require_whole_groups(shape[1], _GROUP)
        numbers = FP8Numbers.of(parts.take(".weight", shape, (_FORM.numbers,)))
        scales = parts.take(self.scale_end, (shape[0], shape[1] // _GROUP), (_FORM.scale,))
        return MXFP8Weight(name, numbers.file, numbers.path, shape, "float32", numbers, scales)


def read_mxfp8_quantized(fields: Fields, weights: Fields) -> MXFP8:
    """The format ``mxfp8-quantized`` of compressed-tensors; arguments and exceptions are those of ``IN_CODES``."""
    require_microscaling(weights, num_bits=8)
    return MXFP8(plain=read_plain(fields, "ignore"))


def read_mxfp8_of_model_optimizer(fields: Fields, *listed: str) -> MXFP8:
    """The ``quantization_config`` of NVIDIA Model Optimizer with the algorithm MXFP8; arguments and exceptions are those of
    ``read_nvfp4_of_model_optimizer``."""
    require_one_of(fields, "group_size", _GROUP, absent=_GROUP)
    return MXFP8(plain=read_plain(fields, *listed))
