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

import dataclasses
import functools
from collections.abc import Callable

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
from jspec.checkpoints.quantized.scaled import in_groups
from jspec.checkpoints.quantized.stored_codes import CodedTensor, RepackedCodes
from jspec.quantization import nvfp4
from jspec.quantization.formats import KINDS, Format

_POWERS = ("torch.uint8", "uint8")  # the dtype of scales in E8M0, as compressed-tensors calls it


@dataclasses.dataclass(frozen=True)
class E2M1Weight(CodedTensor):
    """A weight ``[out, in]`` in MXFP4 or NVFP4, each number of which is that of a code times the scale of its group.

    Attributes:
      form: which of the two.
      codes: uint8 ``[out, in / 2]``.
      scales: of groups, of ``form.scale``, ``[out, groups]``.
      overall: of NVFP4 float32, the number of the whole weight; else None.
      divides: whether it divides the scales.
    """

    form: Format
    codes: Tensor
    scales: Tensor
    overall: Tensor | None
    divides: bool

    @property
    def group(self) -> int:
        """How many input features share a scale."""
        return self.form.group or self.shape[1]

    def stored(self) -> StoredParts:
        parts = StoredParts(self.form, {"weight": RepackedCodes.of(self, 0, self.shape[1]), "scale": self.scales})
        if self.overall is None:
            return parts
        channels = ComputedTensor.of(self, (self.shape[0], 2), "float32", self.scales_of_channels)
        return parts.having(channel_scale=channels)

    def check(self):
        self.factors(slice(0, self.shape[0]), slice(0, self.shape[1] // self.group))

    def scales_of_channels(self, index: Index) -> np.ndarray:
        """A part of what multiplies and what divides the scales of each output channel, float32 ``[out, 2]``."""
        assert self.overall is not None
        number = float(read_scales(self.overall).reshape(()))
        return nvfp4.channel_scales(number, self.divides, self.shape[0])[index]

    def factors(self, rows: slice, groups: slice) -> np.ndarray:
        """What the numbers of some groups are multiplied by, float32 ``[out, groups]``. 0 is valid, of groups of zeros.

        Raises:
          Refusal: some of them cannot be scales.
        """
        if self.overall is None:
            return read_powers(self.scales, self.form, (rows, groups))
        overall = read_scales(self.overall).reshape(())
        scales = self.scales.read_part((rows, groups)).astype(np.float32)
        if not np.all(np.isfinite(scales) & (scales >= 0)):
            raise Refusal(
                f"{self.scales.file}: tensor {self.scales.name!r} holds numbers that are negative or NaN: expected scales; "
                "fetch it again"
            )
        return scales / overall if self.divides else scales * overall

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class E2M1Format(BlockFormat):
    """NVFP4 or MXFP4. Of ``ends``, the first is that of the tensors of codes, the second that of scales, and of NVFP4 the
    third that of the number of the whole weight.

    Attributes:
      form: which of the two.
      divides: whether that number divides the scales.
    """

    bits: int = 4
    ends: tuple[str, ...] = (".weight_packed", ".weight_scale")
    dtype: str | None = "uint8"
    form: Format
    divides: bool = True

    def shape_of(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return *numbers[:-1], 2 * numbers[-1]

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> E2M1Weight:
        (outputs, inputs), group, overall = shape, self.form.group or 1, None
        parts.require_whole_groups(inputs, group)
        codes = parts.take(self.ends[0], (outputs, inputs // 2), ("uint8",))
        scales = parts.take(self.ends[1], (outputs, inputs // group), (self.form.scale,))
        for end in self.ends[2:]:
            overall = parts.take(end, (1,), ("float32",), [()])
        known = {"form": self.form, "overall": overall, "divides": self.divides}
        return E2M1Weight.of(name, shape, codes, codes=codes, scales=scales, **known)


# Name of a format -> what makes it as compressed-tensors stores it, given ``plain``.
FORMATS: dict[str, Callable[..., BlockFormat]] = {
    "mxfp4": functools.partial(
        E2M1Format, form=KINDS["mxfp4"], words="MXFP4, four bits with a power of two for each 32 input features"
    ),
    "mxfp8": in_groups("mxfp8", "MXFP8, eight bits with a power of two for each 32 input features"),
    "nvfp4": functools.partial(
        E2M1Format,
        form=KINDS["nvfp4"],
        ends=(".weight_packed", ".weight_scale", ".weight_global_scale"),
        words="NVFP4, four bits with a scale for each 16 input features",
    ),
}


def read_compressed_floats(kind: str, fields: Fields, weights: Fields) -> BlockFormat:
    """The format of compressed-tensors with weights in one of ``FORMATS``; other arguments and exceptions are those of
    ``IN_CODES``."""
    form, powers = KINDS[kind], KINDS[kind].scales == "powers"
    strategy = "group" if powers else "tensor_group"
    only = {"num_bits": form.bits, "type": "float", "strategy": strategy, "group_size": form.group}
    for name, value in only.items():
        require_one_of(weights, name, value)
    require_one_of(weights, "symmetric", True, absent=True)
    require_one_of(weights, "dynamic", False, absent=False)
    if powers:
        require_one_of(weights, "scale_dtype", *_POWERS, absent=_POWERS[0])
    return FORMATS[kind](plain=read_plain(fields, "ignore"))


def read_floats(kind: str, fields: Fields, *listed: str) -> BlockFormat:
    """One of ``FORMATS``, whose name a tool gives, and perhaps its ``group_size``.

    Args:
      kind: the name.
      fields: the object that says so.
      listed: what the list of modules that are not quantised may be called.

    Raises:
      Refusal: the groups have another size.
    """
    require_one_of(fields, "group_size", KINDS[kind].group, absent=KINDS[kind].group)
    return FORMATS[kind](plain=read_plain(fields, *listed))


def read_nvfp4_of_model_optimizer(fields: Fields, *listed: str) -> BlockFormat:
    """``read_floats`` of NVFP4 as NVIDIA Model Optimizer stores it."""
    ends = (".weight", ".weight_scale", ".weight_scale_2")
    form = read_floats("nvfp4", fields, *listed)
    return dataclasses.replace(form, ends=ends, divides=False)
