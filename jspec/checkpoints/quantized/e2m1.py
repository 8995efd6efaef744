"""NVFP4 and MXFP4: numbers of four bits, two in a byte, and a scale for each group of input features.

A code has a sign, two bits of exponent and one of mantissa (E2M1). The first of the two in a byte is in its lower half.

| | NVFP4 | MXFP4 |
|---|---|---|
| written by | compressed-tensors (llm-compressor), NVIDIA Model Optimizer | compressed-tensors |
| inputs of a group | 16 | 32 |
| scale of a group | float8_e4m3fn | a byte n that stands for 2^(n - 127) (E8M0) |
| beside them | one number in float32 for the whole weight | |

That number divides the scales in files of compressed-tensors, and multiplies them in those of Model Optimizer. Experts of
gpt-oss, in MXFP4 too, are stored otherwise, and are read in ``jspec.checkpoints.tensors.stacked_experts``."""

import abc
import dataclasses
from typing import ClassVar

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import (
    BlockFormat,
    StoredParts,
    WeightTensors,
    read_plain,
    read_powers,
    read_scales,
)
from jspec.checkpoints.quantized.stored_codes import CodedTensor, RepackedCodes
from jspec.quantization import mxfp4, nvfp4
from jspec.quantization.formats import KINDS, Format

_POWERS = ("torch.uint8", "uint8")  # the dtype of scales in E8M0, as compressed-tensors calls it


@dataclasses.dataclass(frozen=True)
class E2M1Weight(CodedTensor):
    """A weight ``[out, in]``, each number of which is that of a code times the scale of its group.

    Attributes:
      form: how it is stored.
      codes: uint8 ``[out, in / 2]``.
      scales: of groups, of ``form.scale``, ``[out, groups]``.
    """

    form: ClassVar[Format]
    codes: Tensor
    scales: Tensor

    @property
    def group(self) -> int:
        """How many input features share a scale."""
        return self.form.group or self.shape[1]

    @abc.abstractmethod
    def factors(self, rows: slice, groups: slice) -> np.ndarray:
        """What the numbers of some groups are multiplied by, float32 ``[out, groups]``.

        Raises:
          Refusal: some of them cannot be scales.
        """

    def stored(self) -> StoredParts:
        return StoredParts(self.form, {"weight": RepackedCodes.of(self, 0, self.shape[1]), "scale": self.scales})

    def check(self):
        self.factors(slice(0, self.shape[0]), slice(0, self.shape[1] // self.group))

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads the codes of that part and of what shares a scale with it, and their scales alone."""
        (first, stop), (left, right) = bounds_of(index, self.shape)
        if first >= stop or left >= right:
            return np.empty(self.shape, np.float32)[index]
        rows, groups = slice(first, stop), slice(left // self.group, -(-right // self.group))
        codes = self.codes_of(rows, slice(groups.start * self.group, groups.stop * self.group)).T
        values = nvfp4.VALUES[codes].reshape(len(codes), -1, self.group) * self.factors(rows, groups)[:, :, None]
        skipped = groups.start * self.group
        return values.reshape(len(codes), -1)[:, left - skipped : right - skipped]

    def words_of(self, outputs: slice, words: slice) -> np.ndarray:
        packed = self.codes.read_part((outputs, slice(4 * words.start, 4 * words.stop)))
        return np.ascontiguousarray(packed).view(np.uint32).T

    def codes_of(self, outputs: slice, inputs: slice) -> np.ndarray:
        """The codes of some features, uint8 ``[in, out]``; the first and the last of the inputs are even."""
        packed = self.codes.read_part((outputs, slice(inputs.start // 2, inputs.stop // 2)))
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1).T


@dataclasses.dataclass(frozen=True)
class MXFP4Weight(E2M1Weight):
    """A weight in MXFP4."""

    form = KINDS["mxfp4"]

    def factors(self, rows: slice, groups: slice) -> np.ndarray:
        return read_powers(self.scales, self.form, (rows, groups))


@dataclasses.dataclass(frozen=True)
class NVFP4Weight(E2M1Weight):
    """A weight in NVFP4.

    Attributes:
      overall: float32, the number of the whole weight.
      divides: whether it divides the scales.
    """

    form = KINDS["nvfp4"]
    overall: Tensor
    divides: bool

    def stored(self) -> StoredParts:
        channels = ComputedTensor.of(self, (self.shape[0], 2), "float32", self.scales_of_channels)
        return super().stored().having(channel_scale=channels)

    def scales_of_channels(self, index: Index) -> np.ndarray:
        """A part of what multiplies and what divides the scales of each output channel, float32 ``[out, 2]``."""
        number = float(read_scales(self.overall).reshape(()))
        return nvfp4.channel_scales(number, self.divides, self.shape[0])[index]

    def factors(self, rows: slice, groups: slice) -> np.ndarray:
        """As ``E2M1Weight.factors``. A scale of 0 is valid, of a group of zeros."""
        overall, scales = (
            read_scales(self.overall).reshape(()),
            self.scales.read_part((rows, groups)).astype(np.float32),
        )
        if not np.all(np.isfinite(scales) & (scales >= 0)):
            raise Refusal(
                f"{self.scales.file}: tensor {self.scales.name!r} holds numbers that are negative or NaN: expected scales; "
                "fetch it again"
            )
        return scales / overall if self.divides else scales * overall


@dataclasses.dataclass(frozen=True, kw_only=True)
class E2M1Format(BlockFormat):
    """NVFP4 or MXFP4. The first of ``ends`` is that of the tensors of codes, the second that of scales."""

    form: ClassVar[Format]
    bits: int = 4

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        codes = parts.tensors.get(self.ends[0])
        return None if codes is None else (*codes.shape[:-1], 2 * codes.shape[-1])

    def stored(self, name: str, shape: tuple[int, int], parts: WeightTensors):
        """The fields of the ``E2M1Weight`` that is made of ``parts``; arguments and exceptions as for ``weight``."""
        (outputs, inputs), group = shape, self.form.group or 1
        parts.require_whole_groups(inputs, group)
        codes = parts.take(self.ends[0], (outputs, inputs // 2), ("uint8",))
        scales = parts.take(self.ends[1], (outputs, inputs // group), (self.form.scale,))
        return name, codes.file, codes.path, shape, "float32", codes, scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class MXFP4(E2M1Format):
    """MXFP4 of linear maps."""

    form = KINDS["mxfp4"]
    ends: tuple[str, ...] = (".weight_packed", ".weight_scale")

    @property
    def summary(self) -> str:
        return f"MXFP4, four bits with a power of two for each {self.form.group} input features"

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> MXFP4Weight:
        return MXFP4Weight(*self.stored(name, shape, parts))


@dataclasses.dataclass(frozen=True, kw_only=True)
class NVFP4(E2M1Format):
    """NVFP4.

    Attributes:
      divides: whether the number of the whole weight, the last of ``ends``, divides the scales.
    """

    form = KINDS["nvfp4"]
    dtype: str | None = "uint8"
    divides: bool

    @property
    def summary(self) -> str:
        return f"NVFP4, four bits with a scale for each {self.form.group} input features"

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> NVFP4Weight:
        about, end = self.stored(name, shape, parts), self.ends[-1]
        found = parts.tensors.get(end)
        overall = parts.take(end, () if found is not None and found.shape == () else (1,), ("float32",))
        return NVFP4Weight(*about, overall, self.divides)


def read_mxfp4_pack_quantized(fields: Fields, weights: Fields) -> MXFP4:
    """The format ``mxfp4-pack-quantized`` of compressed-tensors; arguments and exceptions are those of ``IN_CODES``."""
    require_microscaling(weights, num_bits=4)
    return MXFP4(plain=read_plain(fields, "ignore"))


def require_microscaling(weights: Fields, num_bits: int):
    """Raise a ``Refusal`` unless what compressed-tensors says of weights is MXFP4 or MXFP8, which have so many bits."""
    _require(weights, num_bits=num_bits, type="float", strategy="group", group_size=mxfp4.GROUP)
    require_one_of(weights, "scale_dtype", *_POWERS, absent=_POWERS[0])


def read_nvfp4_pack_quantized(fields: Fields, weights: Fields) -> NVFP4:
    """The format ``nvfp4-pack-quantized`` of compressed-tensors; arguments and exceptions are those of ``IN_CODES``."""
    _require(weights, num_bits=4, type="float", strategy="tensor_group", group_size=nvfp4.GROUP)
    ends = (".weight_packed", ".weight_scale", ".weight_global_scale")
    return NVFP4(plain=read_plain(fields, "ignore"), ends=ends, divides=True)


def read_nvfp4_of_model_optimizer(fields: Fields, *listed: str) -> NVFP4:
    """The ``quantization_config`` of NVIDIA Model Optimizer with the algorithm NVFP4.

    Args:
      fields: the whole of it.
      listed: what its list of modules that are not quantised may be called.

    Raises:
      Refusal: it says something that is not read.
    """
    require_one_of(fields, "group_size", nvfp4.GROUP, absent=nvfp4.GROUP)
    ends = (".weight", ".weight_scale", ".weight_scale_2")
    return NVFP4(plain=read_plain(fields, *listed), ends=ends, divides=False)


def _require(weights: Fields, **only: object):
    """Raise a ``Refusal`` unless what compressed-tensors says of weights is ``only`` this, and they are symmetric."""
    for name, value in only.items():
        require_one_of(weights, name, value)
    require_one_of(weights, "symmetric", True, absent=True)
    require_one_of(weights, "dynamic", False, absent=False)
