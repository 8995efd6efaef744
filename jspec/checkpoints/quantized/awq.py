"""AWQ weights of four bits (Lin et al., 2023), in the layout ``gemm`` of AutoAWQ."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import WeightTensors, read_grouping, read_plain, read_scales
from jspec.checkpoints.quantized.packed_codes import CodesFormat, PackedCodes, each, in_words, unpacked
from jspec.quantization.codes import exchange
from jspec.quantization.formats import INSTEAD

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the place of each code of a number among eight output channels, lowest bits first


@dataclasses.dataclass(frozen=True)
class AWQWeight(PackedCodes):
    """A weight ``[out, in]``, of which the codes of eight output channels are in one number, in the order ``ORDER``.

    Attributes:
      scales: ``[groups, out]``.
      codes: int32 ``[in, out / 8]``.
      zeros: int32 ``[groups, out / 8]``.
    """

    codes: Tensor
    zeros: Tensor

    @property
    def has_zeros(self) -> bool:
        return True

    def words_of(self, outputs: slice, words: slice) -> np.ndarray:
        places, within = in_words(outputs, self.bits)
        rows = self.codes.read_part((slice(8 * words.start, 8 * words.stop), places)).view(np.uint32)
        rows = np.pad(rows, ((0, -len(rows) % 8), (0, 0)))
        # Of eight rows, code i of row j becomes code j of row i.
        for step, bits in ((1, 4), (2, 8), (4, 16)):
            pairs = rows.reshape(-1, 2, step, rows.shape[1])
            exchange(pairs[:, 0], pairs[:, 1], bits)
        eight = rows.reshape(-1, 8, rows.shape[1]).swapaxes(1, 2)[..., np.argsort(ORDER)]
        return eight.reshape(len(eight), -1)[:, within]

    def of_groups(self, outputs: slice, groups: slice) -> tuple[np.ndarray, np.ndarray]:
        words, within = in_words(outputs, self.bits)
        zeros = unpacked(self.zeros.read_part((groups, words)), 1, self.bits, ORDER)[:, within]
        return zeros, read_scales(self.scales, True, (groups, outputs))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AWQ(CodesFormat):
    """AWQ of four bits."""

    ends: tuple[str, ...] = (".qweight", ".qzeros", ".scales")
    scale_end: str = ".scales"
    words: str = "AWQ, {bits} with a scale for each {groups}"

    def shape_of(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return each(self.bits) * numbers[-1], *numbers[:-1]

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> AWQWeight:
        outputs, inputs = shape
        parts.require_multiple("output", outputs, self.bits)
        group = self.group(inputs, parts)
        codes = parts.take(".qweight", (inputs, outputs // each(self.bits)), ("int32",))
        zeros = parts.take(".qzeros", (inputs // group, outputs // each(self.bits)), ("int32",))
        scales = parts.take(".scales", (inputs // group, outputs))
        return self.made(AWQWeight, name, shape, codes=codes, scales=scales, zeros=zeros)


def read_awq(fields: Fields) -> AWQ:
    """The ``quantization_config`` of the method ``awq``.

    Raises:
      Refusal: it says something that is not read.
    """
    require_one_of(fields, "bits", 4)
    require_one_of(fields, "zero_point", True, False, absent=True)  # the layout has zeros in any case
    require_one_of(fields, "desc_act", False, absent=False)
    for key in ("version", "format", "checkpoint_format"):
        if fields.text(key, "gemm").lower() != "gemm":
            raise fields.refuse(key, f"'gemm', because weights lie in other orders elsewhere; {INSTEAD}")
    if fields.raw.get("backend") == "llm-awq":  # which transformers reads as a version
        raise fields.refuse("backend", f"another, because weights lie in another order there; {INSTEAD}")
    return AWQ(plain=read_plain(fields, "modules_to_not_convert"), bits=4, grouping=read_grouping(fields))
