"""Groups of input features that share a scale, and the formats of integers in groups by their names.

``int4_64_float16_zeros``, for example, names weights of four bits in groups of 64 input features, each with a scale of
float16 and a zero. The first number after the bits is ``all`` where all inputs of an output channel are one group.
``int4``, which jspec-convert writes, is short for ``int4_128_bfloat16``. This module imports no array library."""

import functools
import re
from typing import NamedTuple

GROUP = 128  # input features of a group of ``int4`` and of ``fp8_block``; codes of four bits are stored by so many
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
    """

    group: int | None
    scale: str
    zeros: bool = False

    @property
    def name(self) -> str:
        """``int4_64_float16_zeros``."""
        return "int4" if self == INT4 else f"int4_{self.group or 'all'}_{self.scale}{'_zeros' * self.zeros}"

    def weight_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the bytes in which the codes of a weight ``shape`` = (out, in) are stored."""
        return shape[0], num_groups(shape[1]) * GROUP // 2

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales, or of the scales and zeros, of a weight ``shape`` = (out, in)."""
        groups = 1 if self.group is None else num_groups(shape[1], self.group)
        return (shape[0], groups, 2) if self.zeros else (shape[0], groups)


INT4 = Grouped(GROUP, "bfloat16")
_NAME = re.compile(rf"int4_(all|{'|'.join(map(str, SIZES))})_({'|'.join(SCALE_BYTES)})(_zeros)?")


@functools.cache
def grouped(name: str) -> Grouped | None:
    """The format of integers in groups with this name; None if it is another format's, or none."""
    if name == "int4":
        return INT4
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    group, scale, zeros = found.groups()
    return Grouped(None if group == "all" else int(group), scale, zeros is not None)


def group_of(inputs: int, groups: int) -> int:
    """How many inputs share a scale where ``inputs`` of an output channel have ``groups`` of them."""
    if groups == 1:
        return inputs
    return next(size for size in SIZES if num_groups(inputs, size) == groups)
