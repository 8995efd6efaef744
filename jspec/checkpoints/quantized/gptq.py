"""GPTQ weights of four or eight bits (Frantar et al., 2022), as AutoGPTQ, GPTQModel and AutoRound publish them."""

import dataclasses
import functools

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config_fields import require_one_of
from jspec.checkpoints.quantized.format import StoredFormats, WeightTensors, read_grouping, read_plain, read_scales
from jspec.checkpoints.quantized.mixed import PATTERN, read_mixed
from jspec.checkpoints.quantized.packed_codes import CodesFormat, OrderedCodes, each, in_words, middle, unpacked

_ONES = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}  # one in each code of an int32, by bits of a code


@dataclasses.dataclass(frozen=True)
class GPTQWeight(OrderedCodes):
    """A weight ``[out, in]``, of which the codes of n input features are in one number, the first in the lowest bits; n is
    8 for four bits, and 4 for eight.

    Attributes:
      scales: ``[groups, out]``.
      codes: int32 ``[in / n, out]``.
      zeros: int32 ``[groups, out / n]``.
      ordered: whether groups may not follow each other.
      less_one: whether one was subtracted from the zeros, as the first version of the format does.
      symmetric: whether the code in the middle, 8 or 128, is the zero of all numbers, whatever ``less_one`` says.
    """

    codes: Tensor
    zeros: Tensor
    ordered: bool
    less_one: bool
    symmetric: bool

    @property
    def has_zeros(self) -> bool:
        return not self.symmetric

    def input_order(self) -> np.ndarray | None:
        return super().input_order() if self.ordered else None

    def words_of(self, outputs: slice, words: slice) -> np.ndarray:
        return self.codes.read_part((words, outputs)).view(np.uint32)

    def of_groups(self, outputs: slice, groups: slice) -> tuple[np.ndarray, np.ndarray]:
        scales = read_scales(self.scales, True, (groups, outputs))
        if self.symmetric:
            return np.broadcast_to(self._middle, scales.shape), scales
        words, columns = in_words(outputs, self.bits)
        zeros = self.zeros.read_part((groups, words)).view(np.uint32)
        if self.less_one:
            # To whole numbers, as GPTQModel does: it subtracts so when it writes, and a zero of 0 borrows from the next.
            zeros = zeros + _ONES[self.bits]
        return unpacked(zeros, 1, self.bits)[:, columns], scales

    @functools.cached_property
    def _middle(self) -> np.uint8:
        """The zero of all numbers of a symmetric weight.

        Some writers store it as 8 (of eight bits as 128) and some less one, and ``checkpoint_format`` does not tell which it
        was. Kernels for symmetric weights never look at what is stored. All zeros are read once, also where parts of the
        weight are read, so that a file is refused or not whatever the parts are.

        Raises:
          Refusal: something else is stored, which contradicts ``sym``.
        """
        words, zero = self.zeros.read().view(np.uint32), middle(self.bits)
        stored, ones = (int(zero) - 1, int(zero)), _ONES[self.bits]
        if not any(np.all(words == one * ones) for one in stored):
            middles = np.unique(unpacked(words, 1, self.bits)).tolist()
            held = next((one for one in middles if one not in stored), f"both {stored[0]} and {stored[1]}")
            raise Refusal(
                f"{self.file}: tensor {self.zeros.name!r} holds {held}: expected {stored[0]} everywhere or {stored[1]} "
                "everywhere, because quantization_config.sym, which is true unless config.json says otherwise, puts the "
                "zero of each number in the middle; set sym to false if the weights were not quantised symmetrically, else "
                "fetch the file again"
            )
        return zero

    def groups(self) -> np.ndarray:
        groups = super().groups()
        if self.order is not None and not self.ordered and not np.array_equal(groups, self.consecutive()):
            raise Refusal(
                f"{self.file}: tensor {self.order.name!r} has groups that do not follow each other, but desc_act is false; "
                "set it to true in config.json if the weights were quantised in another order"
            )
        return groups


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTQ(CodesFormat):
    """GPTQ of four or eight bits.

    Attributes:
      ordered: whether input features were quantised in another order than they have (``desc_act``).
      less_one, symmetric: as in ``GPTQWeight``.
    """

    ordered: bool
    less_one: bool
    symmetric: bool

    ends: tuple[str, ...] = (".qweight", ".qzeros", ".scales", ".g_idx")
    scale_end: str = ".scales"
    words: str = "GPTQ, {bits} with a scale for each {groups}"

    def shape_of(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        return numbers[-1], *(each(self.bits) * size for size in numbers[:-1])

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> GPTQWeight:
        (outputs, inputs), order = shape, None
        n = each(self.bits)
        parts.require_multiple("input", inputs, self.bits)
        parts.require_multiple("output", outputs, self.bits)
        group = self.group(inputs, parts)
        if self.ordered or ".g_idx" in parts.tensors:
            order = parts.take(".g_idx", (inputs,), ("int32",))
        codes = parts.take(".qweight", (inputs // n, outputs), ("int32",))
        zeros = parts.take(".qzeros", (inputs // group, outputs // n), ("int32",))
        scales = parts.take(".scales", (inputs // group, outputs))
        known = {"ordered": self.ordered, "less_one": self.less_one, "symmetric": self.symmetric}
        return self.made(GPTQWeight, name, shape, codes=codes, scales=scales, zeros=zeros, order=order, **known)


def read_gptq(fields: Fields) -> StoredFormats:
    """The ``quantization_config`` of the method ``gptq``.

    Entries of ``dynamic`` have settings of their own for some modules. One that begins with ``-:`` says that they are not
    quantised, as the tensors in the files do.

    Raises:
      Refusal: it says something that is not read.
    """

    def read(own: Fields) -> GPTQ:
        return _read_alike(dataclasses.replace(own, raw={**fields.raw, **own.raw}))

    def pattern(key: str) -> str | None:
        return None if key.startswith("-:") else PATTERN + key.removeprefix("+:")

    return read_mixed(fields, "dynamic", read, pattern, _read_alike(fields))


def _read_alike(fields: Fields) -> GPTQ:
    """What is said of modules with these settings."""
    require_one_of(fields, "bits", 4, 8)
    require_one_of(fields, "pack_dtype", "int32", absent="int32")
    require_one_of(fields, "is_marlin_format", False, absent=False)
    key = "checkpoint_format" if fields.raw.get("checkpoint_format") is not None else "format"
    require_one_of(fields, key, "gptq", "gptq_v2", absent="gptq")
    return GPTQ(
        plain=read_plain(fields, "modules_to_not_convert"),
        bits=fields.raw["bits"],
        grouping=read_grouping(fields),
        ordered=fields.flag("desc_act"),
        less_one=fields.raw.get(key) != "gptq_v2",
        symmetric=fields.flag("sym", True),  # as in AutoGPTQ, GPTQModel and transformers
    )
