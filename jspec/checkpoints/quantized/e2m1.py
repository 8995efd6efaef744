"""``E2M1Weight``: weights of numbers of four bits, two in a byte, and a scale for each group of input features.

A code has a sign, two bits of exponent and one of mantissa (E2M1). The first of the two in a byte is in its lower half."""

import abc
import dataclasses

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.format import BlockFormat, WeightTensors
from jspec.checkpoints.quantized.stored_codes import CodedTensor, RepackedCodes
from jspec.quantization.nvfp4 import VALUES


@dataclasses.dataclass(frozen=True)
class E2M1Weight(CodedTensor):
    """A weight ``[out, in]``, each number of which is that of a code times the scale of its group.

    Attributes:
      codes: uint8 ``[out, in / 2]``.
      scales: of groups, ``[out, groups]``.
    """

    codes: Tensor
    scales: Tensor

    @property
    @abc.abstractmethod
    def group(self) -> int:
        """How many input features share a scale."""

    @abc.abstractmethod
    def factors(self, rows: slice, groups: slice) -> np.ndarray:
        """What the numbers of some groups are multiplied by, float32 ``[out, groups]``.

        Raises:
          Refusal: some of them cannot be scales.
        """

    @property
    def repacked(self) -> RepackedCodes:
        """All codes as jspec packs them."""
        return RepackedCodes.of(self, 0, self.shape[1])

    def check(self):
        self.factors(slice(0, self.shape[0]), slice(0, self.shape[1] // self.group))

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads the codes of that part and of what shares a scale with it, and their scales alone."""
        (first, stop), (left, right) = bounds_of(index, self.shape)
        if first >= stop or left >= right:
            return np.empty(self.shape, np.float32)[index]
        rows, groups = slice(first, stop), slice(left // self.group, -(-right // self.group))
        codes = self.codes_of(rows, slice(groups.start * self.group, groups.stop * self.group)).T
        values = VALUES[codes].reshape(len(codes), -1, self.group) * self.factors(rows, groups)[:, :, None]
        skipped = groups.start * self.group
        return values.reshape(len(codes), -1)[:, left - skipped : right - skipped]

    def codes_of(self, outputs: slice, inputs: slice) -> np.ndarray:
        """The codes of some features, uint8 ``[in, out]``; the first and the last of the inputs are even."""
        packed = self.codes.read_part((outputs, slice(inputs.start // 2, inputs.stop // 2)))
        return np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1).T


@dataclasses.dataclass(frozen=True, kw_only=True)
class E2M1Format(BlockFormat):
    """A format of such weights. The first of ``ends`` is that of the tensors of codes."""

    bits: int = 4

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        codes = parts.tensors.get(self.ends[0])
        return None if codes is None else (*codes.shape[:-1], 2 * codes.shape[-1])


def require_whole_groups(module: str, inputs: int, group: int, where: str):
    """Raise a ``Refusal`` unless groups of so many input features fill the inputs of a linear map."""
    if inputs % group:
        raise Refusal(
            f"{where}/config.json: {module!r} has {inputs} input features: expected a multiple of {group}, because so many "
            "share a scale"
        )
