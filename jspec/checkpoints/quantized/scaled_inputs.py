"""AWQ of NVIDIA Model Optimizer (``W4A16_AWQ``, ``W4A8_AWQ``): codes of four bits, and numbers that multiply inputs.

AWQ (Lin et al., 2023) divides the inputs of a map by numbers that it multiplies the weight by before this is rounded. Most
are part of the norm before the map. Those of the output projection and of the down projection are in files, and multiply
what attention and the activation give."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import Grouping, StoredParts, WeightTensors, read_plain, read_scales
from jspec.checkpoints.quantized.packed_codes import CodesFormat, SymmetricCodes
from jspec.quantization.codes import words_of_codes
from jspec.quantization.formats import GROUP

INPUTS, _OVERALL = ".pre_quant_scale", ".weight_scale_2"


@dataclasses.dataclass(frozen=True)
class ScaledInputsWeight(SymmetricCodes):
    """A weight ``[out, in]``, whose codes are -8..7, those of two output channels in a byte, the first in its lower half.

    Attributes:
      scales: ``[out, groups]``.
      codes: uint8 ``[out / 2, in]``.
      of_inputs: ``[in]``, what each input is multiplied by; None for 1.
    """

    codes: Tensor
    of_inputs: Tensor | None

    def check(self):
        super().check()
        if self.of_inputs is not None:
            read_scales(self.of_inputs)

    def stored(self) -> StoredParts | None:
        parts = super().stored()
        form = parts and parts.form.with_scaled_inputs()
        if parts is None or form is None or self.of_inputs is None:
            return parts

        def numbers(index: Index) -> np.ndarray:
            assert self.of_inputs is not None
            return read_scales(self.of_inputs, index=index)

        of_inputs = ComputedTensor.of(self.of_inputs, self.of_inputs.shape, "float32", numbers, self.check)
        return StoredParts(form, parts.arrays).having(input_scale=of_inputs)

    def read_part(self, index: Index) -> np.ndarray:
        values = super().read_part(index)
        if self.of_inputs is None:
            return values
        return values * read_scales(self.of_inputs, index=(slice(*bounds_of(index, self.shape)[1]),))

    def words_of(self, outputs: slice, words: slice) -> np.ndarray:
        pairs = slice(outputs.start // 2, -(-outputs.stop // 2))
        packed = self.codes.read_part((pairs, slice(8 * words.start, 8 * words.stop)))
        both = np.stack([words_of_codes(packed & 15), words_of_codes(packed >> 4)], axis=1)
        both = both.reshape(-1, both.shape[-1]) ^ np.uint32(0x88888888)  # 8 in each
        return both[outputs.start - 2 * pairs.start :][: outputs.stop - outputs.start].T


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledInputs(CodesFormat):
    """AWQ of Model Optimizer. With activations in FP8 it has a number for the whole weight besides, by which the product in
    FP8 is scaled, and which has no part in the weight."""

    bits: int = 4
    ends: tuple[str, ...] = (".weight", ".weight_scale", _OVERALL, INPUTS)
    dtype: str | None = "uint8"
    words: str = "AWQ of Model Optimizer, {bits} with a scale for each {groups}"

    def shape_of(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return 2 * numbers[0], *numbers[1:]

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> ScaledInputsWeight:
        outputs, inputs = shape
        if outputs % 2:
            raise Refusal(
                f"{parts.where}/config.json: {parts.module!r} has {outputs} output features: expected an even number, "
                "because codes of two are stored in a byte"
            )
        codes = parts.take(".weight", (outputs // 2, inputs), ("uint8",))
        scales = parts.take(".weight_scale", (outputs, inputs // self.group(inputs, parts)))
        if _OVERALL in parts.tensors:
            parts.take(_OVERALL, ())
        of_inputs = parts.take(INPUTS, (inputs,)) if INPUTS in parts.tensors else None
        return self.made(ScaledInputsWeight, name, shape, codes=codes, scales=scales, of_inputs=of_inputs)


def read_awq_of_model_optimizer(fields: Fields, *listed: str) -> ScaledInputs:
    """The ``quantization_config`` of NVIDIA Model Optimizer with AWQ in four bits; arguments and exceptions are those of
    ``read_nvfp4_of_model_optimizer``."""
    require_one_of(fields, "has_zero_point", False, absent=False)
    size = fields.integer("group_size", GROUP, low=1)
    return ScaledInputs(plain=read_plain(fields, *listed), grouping=Grouping(size, f"{fields.prefix}group_size"))
