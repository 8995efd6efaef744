"""``Weight``: a weight as it is stored, in any format of ``jspec.quantization.formats``, and what it stands for."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jspec.quantization import codes, fp8_block, mxfp4, nvfp4
from jspec.quantization.formats import Format


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight ``[..., out, in]`` as it is stored. With g the group of input i, it stands for

        W[o, i] = (numbers[o, i] - zero[o, g]) * scale[o, g] * channel_scale[o, 0] / channel_scale[o, 1]

    where an array that a format does not have is 1, and the zero is 0; ``scale[o, g, 1]`` is the zero where the format has
    zeros. A number is an integer, a float, or what a code stands for. Leading axes, such as those of experts or heads, are
    those of all arrays but ``order``. The arrays may be of NumPy or of JAX, or shapes.

    Attributes:
      numbers: ``[..., out, in]`` of ``form.numbers``, or packed codes ``[..., out, 64 blocks]``; of ``mxfp4_pairs``
        ``[pairs, ..., out, 32]``; without a format bfloat16 or float32.
      scale: ``[..., out]`` or ``[..., out, groups]`` of ``form.scale``, or with zeros ``[..., out, groups, 2]``; of
        ``mxfp4_pairs`` ``[pairs, ..., out]``. None without a format.
      channel_scale: of NVFP4 float32 ``[..., out, 2]``, else None.
      order: int32 ``[in]``, which number of x each input of the weight is, where that has them in another order; else None.
      form: the format; None for a weight that is not quantised.
      inputs: how many inputs the weight has, which packed codes do not tell; by default as many as there are numbers.
    """

    numbers: Any
    scale: Any = None
    channel_scale: Any = None
    order: Any = None
    form: Format | None = dataclasses.field(default=None, metadata={"static": True})
    inputs: int = dataclasses.field(default=0, metadata={"static": True})

    def __post_init__(self):
        if not self.inputs:
            assert self.form is None or (not self.form.in_codes and not self.in_pairs), "inputs that codes do not tell"
            object.__setattr__(self, "inputs", self.numbers.shape[-1])

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., out, in)`` of what it stands for."""
        before = self.numbers.shape[1:-1] if self.in_pairs else self.numbers.shape[:-1]
        return *before, self.inputs

    @property
    def in_pairs(self) -> bool:
        """Whether pairs of groups come first, as in ``mxfp4_pairs``."""
        return self.form is not None and self.form.kind == "mxfp4_pairs"

    def __getitem__(self, rows) -> "Weight":
        """The output channels ``rows``, or the tokens of an embedding: an index of the first axis."""
        return self._each(lambda array: array[rows])

    def split(self, parts: int) -> "Weight":
        """``[parts out, in]`` as ``[parts, out, in]``: maps of experts or of heads, which are stored one after another."""
        axis = 1 if self.in_pairs else 0

        def by_part(array):
            before, after = array.shape[:axis], array.shape[axis + 1 :]
            return array.reshape(*before, parts, array.shape[axis] // parts, *after)

        return self._each(by_part)

    def dequantize(self) -> Any:
        """What it stands for, float32 ``[..., out, in]`` in the order of x. Arrays of NumPy give one of NumPy, and arrays of
        JAX one of JAX."""
        numbers = self._in_stored_order()
        if self.order is None:
            return numbers
        if isinstance(numbers, jax.Array):
            return numbers.at[..., self.order].set(numbers)
        return numbers[..., np.argsort(self.order)]

    def _in_stored_order(self) -> Any:
        """The same with the inputs in the order of ``numbers``."""
        kind = None if self.form is None else self.form.kind
        if kind is None:
            return self.numbers.astype(np.float32)
        if kind == "nvfp4":
            return nvfp4.dequantize(self.numbers, self.scale, self.channel_scale, self.inputs)
        if kind == "mxfp4":
            return mxfp4.dequantize(self.numbers, self.scale, self.inputs)
        if kind in ("int4", "int8_groups"):
            return codes.dequantize(self.numbers, self.scale, self.inputs)
        if kind == "fp8_block":
            return fp8_block.dequantize(self.numbers, self.scale)
        assert kind in ("int8", "fp8"), kind
        return self.numbers.astype(np.float32) * self.scale[..., None]

    def _each(self, change) -> "Weight":
        """With each array but ``order`` changed."""
        arrays = (self.numbers, self.scale, self.channel_scale)
        numbers, scale, channel_scale = (None if array is None else change(array) for array in arrays)
        return dataclasses.replace(self, numbers=numbers, scale=scale, channel_scale=channel_scale)


def dequantize(weight, scale, inputs: int, channel_scale=None) -> Any:
    """The numbers of output channels, float32 ``[..., inputs]``; arrays of NumPy give one of NumPy, and arrays of JAX one of
    JAX.

    Args:
      weight: entire output channels, or tokens of an embedding, as they are stored: ``[..., inputs]``, or packed codes.
      scale: one scale for each of them, ``[...]``, or those of their groups. None if they are not quantised.
      inputs: how many numbers each of them has.
      channel_scale: of NVFP4, float32 ``[..., 2]``; else None.
    """
    if channel_scale is not None:
        return nvfp4.dequantize(weight, scale, channel_scale, inputs)
    if mxfp4.is_mxfp4(scale):
        return mxfp4.dequantize(weight, scale, inputs)
    if codes.are_codes(weight, scale):
        return codes.dequantize(weight, scale, inputs)
    if scale is not None and scale.ndim == weight.ndim:
        return fp8_block.dequantize(weight, scale)
    weight = weight.astype(np.float32)
    return weight if scale is None else weight * scale[..., None]
