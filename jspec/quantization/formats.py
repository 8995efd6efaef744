"""The formats in which weights are stored, by their names: what arrays a weight ``[out, in]`` takes in each.

``format_of("int4_64_float16_zeros")``, for example, has codes of four bits in groups of 64 inputs, each with a scale of
float16 and a zero. Formats of one ``kind`` differ in such settings alone, and ``KINDS`` has a row for each kind:

| kind | names | |
|---|---|---|
| ``int8``, ``fp8`` | as the kind | a scale for each output channel |
| ``fp8_block`` | as the kind | a scale for each 128 inputs |
| ``int4``, ``int5``, ``int6`` | ``int4_<group>_<scale>[_zeros]...`` | ``jspec.quantization.codes``; see ``grouped`` |
| ``int8_groups`` | ``int8_<group>_<scale>...`` | the same; ``int4`` is short for ``int4_128_bfloat16`` |
| ``table`` | ``<table>_<group>...`` | codes that name one of sixteen numbers (``jspec.quantization.tables``) |
| ``nvfp4``, ``mxfp4`` | as the kind | ``jspec.quantization.nvfp4``, ``jspec.quantization.mxfp4`` |
| ``mxfp8`` | as the kind | FP8 numbers, and for each 32 inputs a byte n that stands for 2^(n - 127) |
| ``mxfp4_pairs`` | as the kind | experts of gpt-oss (``jspec.quantization.mxfp4_pairs``) |

A name may end with ``_scaled``: each input is then multiplied by a number of its own before the product (AWQ of NVIDIA Model
Optimizer). The numbers cannot be part of the weight, because the scales of groups were chosen for what they leave.

Checkpoints of DeepSeek-V3, and those that follow it, have one scale for a block of 128 output channels and 128 inputs. In
``fp8_block`` it stands at each of these output channels, so that parts of a weight can begin and end anywhere: queries, keys
and values one after another, the experts of a layer, the shards of a model. The scales take 3% of the bytes of the numbers.

Configs read this module, so it imports no array library: dtypes are names."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

GROUP = 128  # input features of a group of ``int4`` and of ``fp8_block``; codes of four bits are stored by so many
# For messages: which quantised checkpoints are read.
INSTEAD = (
    "of quantised checkpoints jspec reads FP8 (compressed-tensors float-quantized, fp8, modelopt), int8 (compressed-tensors "
    "int-quantized), GPTQ, AWQ, AutoRound and compressed-tensors pack-quantized in four bits, NVFP4 (compressed-tensors, "
    "modelopt), MXFP4 (compressed-tensors mxfp4-pack-quantized), MXFP8 (compressed-tensors mxfp8-quantized, modelopt), "
    "gpt-oss in MXFP4, and bitsandbytes and torchao in four and eight bits; else use the original bfloat16 "
    "checkpoint, with jspec-convert --quantize int8 or fp8"
)
# Of groups of integers that kernels know; larger ones are several of the last, with the same scale.
SIZES = (32, 64, GROUP)
SUPER = 256  # inputs whose scales of two levels are stored together
LEVELS = "levels"  # what stands in names for such scales
ITEM_BYTES = {
    **{"int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float16": 2, "bfloat16": 2},
    **{"float32": 4, "int32": 4, "uint32": 4},
}


class StoredArray(NamedTuple):
    """One of the arrays of a stored weight: its shape, and the name of its dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Format:
    """A format in which weights ``[out, in]`` are stored.

    Attributes:
      name: by which configs name it.
      kind: which row of ``KINDS`` it is.
      bits: of a number or code. Codes of five and six are packed as those of four, with their other bits behind these.
      numbers: dtype of the array of numbers, or of packed codes.
      scale: dtype of the scales.
      scales: what they may be: ``positive``; ``nonzero``, of either sign; ``nonnegative``; ``finite``; or ``powers``, bytes
        n each of which stands for 2^(n - 127).
      largest_power: of scales that are powers, the largest byte that kernels know.
      group: how many inputs share a scale; None if all of an output channel do.
      per_channel: whether scales are ``[out]``, without an axis of groups.
      zeros: whether each group has a code that stands for zero, beside its scale. If not, the code in the middle does.
      offsets: whether each group has a number, beside its scale, that is added to products of codes and scales, which then
        are 0 for the code 0.
      levels: whether scales are products of an integer and a number that ``SUPER`` inputs share, and offsets likewise.
      ordered: whether the inputs are group by group in another order than x has them, which an array of int32 ``[in]``
        tells: GPTQ with ``desc_act``.
      in_codes: whether the numbers are codes, rather than floats or integers with a scale for each output channel.
      packed: whether codes of four bits are packed two in a byte, in blocks of 128 inputs (``jspec.quantization.codes``).
      in_pairs: whether pairs of groups come first, as of experts of gpt-oss (``jspec.quantization.mxfp4_pairs``). No other
        weights are stored so.
      table: the name of the table of sixteen numbers that codes stand for; None if they stand for others.
      e2m1: whether codes name numbers with a sign, two bits of exponent and one of mantissa, rather than integers.
      channel_numbers: whether each output channel has two float32 numbers, which multiply and divide its scales.
      scaled_inputs: whether each input has a float32 number, by which it is multiplied.
    """

    name: str
    kind: str
    bits: int
    numbers: str
    scale: str = "float32"
    scales: Literal["positive", "nonzero", "nonnegative", "finite", "powers"] = "positive"
    largest_power: int = 254
    group: int | None = None
    per_channel: bool = False
    zeros: bool = False
    offsets: bool = False
    levels: bool = False
    ordered: bool = False
    in_codes: bool = False
    packed: bool = False
    in_pairs: bool = False
    table: str | None = None
    e2m1: bool = False
    channel_numbers: bool = False
    scaled_inputs: bool = False

    @property
    def largest(self) -> int:
        """The largest magnitude of a number of eight bits, or of a code of E2M1."""
        return 6 if self.e2m1 else {"int8": 127, "float8_e4m3fn": 448}[self.numbers]

    @property
    def scales_numbers(self) -> bool:
        """Whether kernels multiply numbers by the scales of their groups, which bfloat16 holds, rather than sums."""
        return self.e2m1 or self.scales == "powers"

    @property
    def rounds_products(self) -> bool:
        """Whether kernels multiply numbers by their scales and round these products to bfloat16: those of few bits, and
        integers of eight in groups of less than 64, which are as exact as weights of bfloat16 then."""
        return self.in_codes and not self.e2m1 and (self.packed or (self.group or GROUP) < 64)

    @property
    def indivisible(self) -> int:
        """How many inputs are stored together, so that no shard has a part of them; 1 if any may be by themselves."""
        return 1 if self.per_channel else SUPER if self.levels else GROUP

    @property
    def middle(self) -> int:
        """The code that stands for 0 where groups have no zeros of their own; of eight bits, which have a sign, it is 0."""
        return 0 if self.offsets or not self.packed else 1 << (self.bits - 1)

    @property
    def block_bytes(self) -> int:
        """Of the codes of ``GROUP`` inputs of a packed format."""
        return GROUP * self.bits // 8

    @property
    def zero_codes(self) -> range:
        """What the code that stands for zero may be, of integers in groups."""
        return range(17) if self.bits == 4 else range(-128, 129)

    @property
    def serves_latents(self) -> bool:
        """Whether the maps between heads and their latents may be stored so."""
        return not (self.scaled_inputs or self.levels or self.offsets or self.bits in (5, 6))

    def serves_head(self, tied: bool) -> bool:
        """Whether an output head may be stored so; if it is ``tied``, rows of it are looked up as embeddings, too."""
        return not (self.ordered or self.scaled_inputs or (tied and self.e2m1))

    def arrays(self, shape: tuple[int, ...]) -> Mapping[str, StoredArray]:
        """The arrays of a weight ``shape`` = (out, in): ``weight`` and ``scale``, and where the format has them
        ``channel_scale`` ``[out, 2]``, ``order`` and ``input_scale`` ``[in]``."""
        outputs, inputs = shape
        if self.in_pairs:
            group = self.group or 1
            pairs = num_groups(inputs, 2 * group), outputs
            return {"weight": StoredArray((*pairs, group), "uint8"), "scale": StoredArray(pairs, "uint32")}
        width = num_groups(inputs) * self.block_bytes if self.packed else inputs
        groups = () if self.per_channel else (1 if self.group is None else num_groups(inputs, self.group),)
        scale = *groups, *((2,) if self.zeros or self.offsets else ())
        if self.levels:  # a word of numbers, and one of four integers each
            scale = num_groups(inputs, SUPER), 1 + (1 + self.offsets) * SUPER // (self.group or SUPER) // 4
        arrays = {
            "weight": StoredArray((outputs, width), self.numbers),
            "scale": StoredArray((outputs, *scale), self.scale),
        }
        if self.channel_numbers:
            arrays["channel_scale"] = StoredArray((outputs, 2), "float32")
        if self.ordered:
            arrays["order"] = StoredArray((inputs,), "int32")
        if self.scaled_inputs:
            arrays["input_scale"] = StoredArray((inputs,), "float32")
        return arrays

    def with_scaled_inputs(self) -> "Format | None":
        """The same with a number for each input; None where there is none, of experts and of inputs that have one."""
        if self.in_pairs or self.scaled_inputs:
            return None
        return dataclasses.replace(self, name=self.name + _SCALED, scaled_inputs=True)

    def bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of all arrays of a weight ``shape`` = (out, in)."""
        return sum(array.bytes for array in self.arrays(shape).values())


_codes = functools.partial(Format, **{"bits": 4, "numbers": "uint8", "in_codes": True, "packed": True})
# A format of each kind. Those of integers in groups have settings in their names.
KINDS = {
    one.kind: one
    for one in (
        Format("int8", "int8", 8, "int8", scales="nonzero", per_channel=True),
        Format("fp8", "fp8", 8, "float8_e4m3fn", per_channel=True),
        Format("fp8_block", "fp8_block", 8, "float8_e4m3fn", group=GROUP),
        Format("mxfp8", "mxfp8", 8, "float8_e4m3fn", "uint8", "powers", largest_power=134, group=32),
        _codes("int4", "int4", scale="bfloat16", scales="nonzero", group=GROUP),
        _codes("int5_32_float16", "int5", bits=5, scale="float16", scales="finite", group=32),
        _codes("int6_16_levels", "int6", bits=6, scale="uint32", scales="finite", group=16, levels=True),
        Format("int8_128_bfloat16", "int8_groups", 8, "int8", "bfloat16", "nonzero", group=GROUP, in_codes=True),
        _codes("nf4_64", "table", scales="finite", group=64, table="nf4"),
        _codes(
            "nvfp4", "nvfp4", scale="float8_e4m3fn", scales="nonnegative", group=16, e2m1=True, channel_numbers=True
        ),
        _codes("mxfp4", "mxfp4", scale="uint8", scales="powers", largest_power=133, group=32, e2m1=True),
        Format("mxfp4_pairs", "mxfp4_pairs", 4, "uint8", "uint32", group=32, in_pairs=True, e2m1=True),
    )
}
INT4 = KINDS["int4"]
OF_INPUTS = ("order", "input_scale")  # arrays that all output channels share
_NAMED = {one.name: one for one in KINDS.values()}
_SCALES, _SCALED = ("float16", "bfloat16", "float32"), "_scaled"
_SIZES = "|".join(map(str, (16, *SIZES)))
_GROUPED = re.compile(rf"int([4568])_(all|{_SIZES})_({'|'.join((*_SCALES, LEVELS))})(_zeros|_offsets)?(_ordered)?")
_TABLED = re.compile(rf"(nf4|fp4|iq4)_({_SIZES})(?:_(float16|{LEVELS}))?(_ordered)?")


@functools.cache
def format_of(name: str | None) -> Format | None:
    """The format with this name; None if there is none, as for the name None of weights that are not quantised."""
    if name is None or name in _NAMED:
        return _NAMED.get(name or "")
    if name.endswith(_SCALED):
        form = format_of(name.removesuffix(_SCALED))
        return form and form.with_scaled_inputs()
    if found := _TABLED.fullmatch(name):
        return tabled(found[1], int(found[2]), found[3] or "float32", found[4] is not None)
    found = _GROUPED.fullmatch(name)
    if found is None:
        return None
    bits, group, scale, beside, ordered = found.groups()
    unknown = group not in ("16", "32") if scale == LEVELS else group == "16"
    if unknown or (bits == "8" and beside == "_offsets"):
        return None
    size = None if group == "all" else int(group)
    return grouped(int(bits), size, scale, beside == "_zeros", ordered is not None, beside == "_offsets")


def form_of_maps(name: str | None) -> Format | None:
    """The format with this name in which linear maps may be stored; None if there is none."""
    form = format_of(name)
    return form if form and not form.in_pairs else None


def known_format(name: str) -> Format:
    """The format with this name, which is one."""
    if not (form := format_of(name)):
        raise AssertionError(name)
    return form


def grouped(
    bits: int, group: int | None, scale: str, zeros: bool = False, ordered: bool = False, offsets: bool = False
) -> Format:
    """The format of integers in groups with these settings, which its name has in this order:
    ``int<bits>_<group>_<scale>[_zeros or _offsets][_ordered]``. A group that is None, of all inputs, is called ``all``.

    Args:
      bits: 4, 5, 6 or 8.
      scale: a dtype, or ``LEVELS`` (``jspec.quantization.levels``), with which groups may have 16 inputs.
      group, zeros, ordered, offsets: as of ``Format``.
    """
    kind = KINDS[{4: "int4", 8: "int8_groups"}.get(bits, f"int{bits}")]
    beside = "_zeros" * zeros + "_offsets" * offsets
    name = f"int{bits}_{group or 'all'}_{scale}{beside}{'_ordered' * ordered}"
    name = "int4" if name == "int4_128_bfloat16" else name
    settings = {"group": group, "zeros": zeros, "ordered": ordered, "offsets": offsets, **_scale_of(scale)}
    # Those of GGUF, whose groups of zeros have the scale 0.
    if scale == LEVELS or (scale == "float16" and group == 32 and not zeros):
        settings["scales"] = "finite"
    return dataclasses.replace(kind, name=name, **settings)


def tabled(table: str, group: int, scale: str = "float32", ordered: bool = False) -> Format:
    """The format of codes of a table of sixteen numbers, with a scale for each ``group`` of inputs."""
    name = f"{table}_{group}{f'_{scale}' * (scale != 'float32')}{'_ordered' * ordered}"
    return dataclasses.replace(KINDS["table"], name=name, table=table, group=group, ordered=ordered, **_scale_of(scale))


def _scale_of(scale: str) -> dict[str, Any]:
    """The settings of a format whose names say this of scales."""
    return {"scale": "uint32" if scale == LEVELS else scale, "levels": scale == LEVELS}


def num_groups(inputs: int, group: int = GROUP) -> int:
    """How many groups the inputs of an output channel make; the last one may not be full."""
    return -(-inputs // group)
