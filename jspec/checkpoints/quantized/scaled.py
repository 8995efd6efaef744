"""Weights ``[out, in]`` in a tensor of numbers of eight bits, with a tensor of scales of their blocks: FP8, int8, MXFP8.

| | numbers | a scale is shared by |
|---|---|---|
| ``FP8Blocks``, of DeepSeek-V3, Qwen3 and llm-compressor | FP8 | a block of ``weight_block_size`` |
| ``Scaled``, of compressed-tensors, vLLM and Model Optimizer | FP8 or int8 | an output channel, or the whole weight |
| MXFP8, of compressed-tensors and Model Optimizer | FP8 | 32 inputs: a byte n stands for 2^(n - 127) (E8M0) |

Formats with scales for groups of inputs are rows of ``FORMATS`` in ``e2m1.py`` beside this file."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.fp8_numbers import FP8Numbers
from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.tensor import FLOAT_DTYPES, ComputedTensor, Tensor
from jspec.checkpoints.quantized.config_fields import Modules, require_one_of
from jspec.checkpoints.quantized.format import (
    BlockFormat,
    PlainModules,
    QuantizedTensor,
    StoredParts,
    WeightTensors,
    read_block,
    read_plain,
    read_powers,
    read_scales,
)
from jspec.quantization.formats import KINDS, Format

EVERY_LINEAR = Modules(frozenset(("Linear",)), (), "")


@dataclasses.dataclass(frozen=True)
class ScaledWeight(QuantizedTensor):
    """A weight ``[out, in]`` whose numbers are multiplied by the scales of their blocks.

    Attributes:
      form: as which it is kept.
      numbers: of ``form.numbers``, ``[out, in]``.
      scales: ``[ceil(out / height), ceil(in / width)]``. Blocks at the lower and right edges may be smaller.
      block: height and width of a block.
    """

    form: Format
    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]

    def stored(self) -> StoredParts | None:
        """As ``QuantizedTensor.stored``; None unless blocks have whole groups of inputs."""
        if self.form.group is not None and self.block[1] % self.form.group:
            return None
        read = self.scales.read_part if self.form.scales == "powers" else self.scales_of_groups
        scale = self.form.arrays(self.shape)["scale"]
        scales = ComputedTensor.of(self.scales, scale.shape, scale.dtype, read, self.check)
        return StoredParts(self.form, {"weight": self.numbers, "scale": scales})

    def scales_of_groups(self, index: Index) -> np.ndarray:
        """A part of the scales repeated as ``form`` has them: for each output channel, and each group of inputs if it has
        groups."""
        group, whole = self.form.group or self.shape[1], self.form.arrays(self.shape)["scale"].shape
        (first, stop), (left, right) = bounds_of(index, (*whole, 1)[:2])
        rows, columns = np.arange(first, stop) // self.block[0], np.arange(left, right) * group // self.block[1]
        return self._scales_at(rows, columns).reshape([stop - first, right - left][: len(whole)])

    def check(self):
        self._read_scales(())

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads the numbers of that part, and the scales of their blocks alone."""
        values = self.numbers.read_part(index).astype(np.float32)
        values *= self._scales_at(*map(_blocks, bounds_of(index, self.shape), self.block))
        return values

    def _scales_at(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """The scales in these rows and columns, which are in order, float32 ``[rows, columns]``."""
        if not (rows.size and columns.size):
            return np.empty((rows.size, columns.size), np.float32)
        part = self._read_scales((slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)))
        return part[(rows - rows[0])[:, None], columns - columns[0]]

    def _read_scales(self, index: Index) -> np.ndarray:
        if self.form.scales == "powers":
            return read_powers(self.scales, self.form, index)
        return read_scales(self.scales, self.form.scales == "nonzero", index)


def _blocks(bounds: tuple[int, int], size: int) -> np.ndarray:
    """Which block of so many features each of some is in; a single number if all are in one."""
    blocks = np.arange(*bounds) // size
    return blocks[:1] if (blocks == blocks[:1]).all() else blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledFormat(BlockFormat):
    """A format of weights that are a ``ScaledWeight``.

    Attributes:
      form: as which they are kept.
      block: height and width of what shares a scale; None for all output channels or all inputs.
    """

    bits: int = 8
    ends: tuple[str, ...] = (".weight", ".weight_scale")
    form: Format
    block: tuple[int | None, int | None]

    def shapes_of_scales(self, outputs: int, inputs: int) -> list[tuple[int, ...]]:
        """The shapes that the tensor of scales of a weight ``[out, in]`` may have, the usual one first."""
        height, width = self.block
        rows = -(-outputs // (height or outputs))
        if width is None:
            return [(rows, 1), (rows,)] if height else [(1,), (), (1, 1)]
        columns = -(-inputs // width)
        return [(rows, columns), (rows, 1, columns, 1)]  # the latter as NVIDIA Model Optimizer writes them

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> ScaledWeight:
        (outputs, inputs), powers = shape, self.form.scales == "powers"
        if powers:
            parts.require_whole_groups(inputs, self.form.group or 1)
        numbers = parts.take(self.ends[0], shape, (self.form.numbers,))
        usual, *others = self.shapes_of_scales(outputs, inputs)
        scales = parts.take(self.scale_end, usual, (self.form.scale,) if powers else tuple(FLOAT_DTYPES), others)
        block = self.block[0] or outputs, self.block[1] or inputs
        scales = in_blocks(scales, (-(-outputs // block[0]), -(-inputs // block[1])))
        return ScaledWeight.of(
            name, shape, numbers, form=self.form, numbers=FP8Numbers.of(numbers), scales=scales, block=block
        )


def in_blocks(scales: Tensor, shape: tuple[int, int]) -> Tensor:
    """A tensor of scales as one of two axes."""
    if scales.shape == shape:
        return scales
    return ComputedTensor.of(scales, shape, scales.dtype, lambda index: scales.read().reshape(shape)[index])


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8Blocks(ScaledFormat):
    """FP8 with a scale for each block."""

    form: Format = KINDS["fp8_block"]
    dtype: str | None = KINDS["fp8_block"].numbers
    block: tuple[int, int]

    @property
    def summary(self) -> str:
        return f"FP8 with a scale for each block of {self.block[0]} x {self.block[1]}"


def in_groups(
    kind: str, words: str, ends: tuple[str, str] = (".weight", ".weight_scale")
) -> Callable[..., ScaledFormat]:
    """What makes the format of numbers with scales for groups of inputs, given ``plain``.

    Args:
      kind: as which of ``jspec.quantization.formats.KINDS`` it is kept, which says the dtypes and the size of groups.
      words: what it is called.
      ends: the suffixes of the tensors of numbers and of scales.
    """
    form = KINDS[kind]
    more = {"form": form, "block": (1, form.group), "dtype": form.numbers, "words": words}
    return functools.partial(ScaledFormat, ends=ends, scale_end=ends[1], **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(ScaledFormat):
    """FP8 or int8 with a scale for each output channel or for each weight. Language models keep it
    (``jspec.checkpoints.quantized.scales``, or ``stored_weights`` where some maps are not quantised), and draft heads
    dequantise it.

    Attributes:
      targets: which modules are quantised.
      ignored: which of these are not, after all.
    """

    targets: Modules
    ignored: Modules

    @staticmethod
    def of(
        quantization: Literal["fp8", "int8"],
        scales: Literal["channel", "tensor"],
        ignored: Modules,
        where: str,
        targets: Modules = EVERY_LINEAR,
    ) -> "Scaled":
        """The format of these settings, in which the modules that ``ignored`` names are plain."""
        form = KINDS[quantization]
        return Scaled(
            plain=PlainModules(ignored.names - {"Linear"}, ignored.key, where),
            form=form,
            dtype=form.numbers,
            block=(1 if scales == "channel" else None, None),
            targets=targets,
            ignored=ignored,
        )

    def includes(self, names: Iterable[str]) -> bool:
        """Whether a linear map is quantised, to which the checkpoint may give any of these names."""
        names = tuple(names)
        return self.targets.include(names) and not self.ignored.include(names)

    @property
    def each(self) -> str:
        """What has a scale, in words."""
        return "output channel" if self.block[0] else "weight"

    @property
    def summary(self) -> str:
        return f"{'FP8' if self.form.name == 'fp8' else 'int8'} with a scale for each {self.each}"


def read_fp8_blocks(fields: Fields) -> FP8Blocks:
    """The ``quantization_config`` of DeepSeek's layout, whose ``weight_block_size`` is not null.

    Raises:
      Refusal: it says something that is not read.
    """
    require_one_of(fields, "fmt", "e4m3", "float8_e4m3fn", absent="e4m3")
    plain, scales = read_plain(fields, "modules_to_not_convert", "ignored_layers"), ".weight_scale_inv"
    block = read_block(fields, "weight_block_size")
    return FP8Blocks(plain=plain, ends=(".weight", scales), scale_end=scales, block=block)
