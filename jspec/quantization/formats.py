"""Groups of input features that share a scale, and the formats of integers in groups by their names.

``int4_64_float16_zeros``, for example, names weights of four bits in groups of 64 input features, each with a scale of
float16 and a zero, and ``int8_64_float16_zeros`` those of eight. The first number after the bits is ``all`` where all inputs
of an output channel are one group. ``int4``, which jspec-convert writes, is short for ``int4_128_bfloat16``. This module
imports no array library."""

import functools
import math
import re
from typing import NamedTuple

GROUP = 128  # input features of a group of ``int4`` and of ``fp8_block``; codes of four bits are stored by so many
NVFP4_GROUP, MXFP4_GROUP = 16, 32
E2M1 = ("nvfp4", "mxfp4")  # formats whose codes name numbers with a sign, two bits of exponent and one of mantissa
SIZES = (32, 64, GROUP)  # of groups that kernels know; larger ones are several of the last, with the same scale
SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


def num_groups(inputs: int, group: int = GROUP) -> int:
    """How many groups the inputs of an output channel make; the last one may not be full."""
    return -(-inputs // group)


class Grouped(NamedTuple):
    """A format of integers in groups (``jspec.quantization.codes``).

    Attributes:
      group: how many input features share a scale, one of ``SIZES``; None if all of an output channel do.
      scale: the dtype of scales, a key of ``SCALE_BYTES``.
      zeros: whether each group has a code that stands for zero. If not, the code in the middle does.
      bits: of a code, 4 or 8.
      ordered: whether the inputs are group by group in another order than x has them, which an array of int32 ``[in]``
        tells: GPTQ with ``desc_act``.
    """

    group: int | None
    scale: str
    zeros: bool = False
    bits: int = 4
    ordered: bool = False

    @property
    def name(self) -> str:
        """``int4_64_float16_zeros``."""
        name = f"int{self.bits}_{self.group or 'all'}_{self.scale}{'_zeros' * self.zeros}{'_ordered' * self.ordered}"
        return "int4" if self == INT4 else name

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the bytes in which the codes of a weight ``shape`` = (out, in) are stored."""
        return (shape[0], num_groups(shape[1]) * GROUP // 2) if self.bits == 4 else (shape[0], shape[1])

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales, or of the scales and zeros, of a weight ``shape`` = (out, in)."""
        groups = 1 if self.group is None else num_groups(shape[1], self.group)
        return (shape[0], groups, 2) if self.zeros else (shape[0], groups)


INT4 = Grouped(GROUP, "bfloat16")
_NAME = re.compile(rf"int([48])_(all|{'|'.join(map(str, SIZES))})_({'|'.join(SCALE_BYTES)})(_zeros)?(_ordered)?")


@functools.cache
def grouped(name: str) -> Grouped | None:
    """The format of integers in groups with this name; None if it is another format's, or none."""
    if name == "int4":
        return INT4
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    bits, group, scale, zeros, ordered = found.groups()
    return Grouped(None if group == "all" else int(group), scale, zeros is not None, int(bits), ordered is not None)


def group_of(inputs: int, groups: int) -> int:
    """How many inputs share a scale where ``inputs`` of an output channel have ``groups`` of them."""
    if groups == 1:
        return inputs
    return next(size for size in SIZES if num_groups(inputs, size) == groups)


def group_size(quantization: str | None) -> int | None:
    """How many inputs share a scale in weights that are stored so; None if all of an output channel do, or if they have no
    scales."""
    if (form := grouped(quantization or "")) is not None:
        return form.group
    return {"fp8_block": GROUP, "nvfp4": NVFP4_GROUP, "mxfp4": MXFP4_GROUP}.get(quantization or "")


def has_groups(quantization: str | None) -> bool:
    """Whether weights that are stored so have scales for groups of inputs, ``[out, groups]``."""
    return group_size(quantization) is not None


def has_order(quantization: str | None) -> bool:
    """Whether weights are stored with an order of their inputs."""
    form = grouped(quantization or "")
    return form is not None and form.ordered


def in_codes(quantization: str | None) -> bool:
    """Whether weights are stored as codes, as those of checkpoints in four bits and in eight with groups are."""
    return quantization in E2M1 or grouped(quantization or "") is not None


class Companion(NamedTuple):
    """An array besides a weight and its scales: how its name ends, its shape and its dtype."""

    end: str
    shape: tuple[int, ...]
    dtype: str


def companion(shape: tuple[int, ...], quantization: str) -> Companion | None:
    """The array that weights ``shape`` = (out, in) have besides their scales: numbers of output channels in NVFP4, and the
    order of inputs where it is not that of x; None for all others."""
    if quantization == "nvfp4":
        return Companion("channel_scale", (shape[0], 2), "float32")
    form = grouped(quantization)
    return Companion("order", (shape[1],), "int32") if form is not None and form.ordered else None


def stored_bytes(shape: tuple[int, ...], quantization: str) -> int:
    """Bytes of a weight ``shape`` = (out, in) with its scales."""
    outputs, inputs = shape
    if quantization == "nvfp4":
        return outputs * (
            num_groups(inputs) * GROUP // 2 + num_groups(inputs, NVFP4_GROUP) + 2 * SCALE_BYTES["float32"]
        )
    if quantization == "mxfp4":
        return outputs * (num_groups(inputs) * GROUP // 2 + num_groups(inputs, MXFP4_GROUP))
    if (form := grouped(quantization)) is not None:
        scales = math.prod(form.scale_shape(shape))
        return math.prod(form.weight_shape(shape)) + SCALE_BYTES[form.scale] * scales + 4 * shape[1] * form.ordered
    scales = num_groups(inputs) if quantization == "fp8_block" else 1
    return outputs * (inputs + SCALE_BYTES["float32"] * scales)
