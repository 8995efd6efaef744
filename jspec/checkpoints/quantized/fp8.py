"""FP8 weights with a scale for each block, as DeepSeek-V3 and Qwen3 publish them, and llm-compressor writes them; and those
of draft heads, of which a whole output channel or a whole weight may share a scale."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.fp8_numbers import FP8Numbers
from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.quantized.config_fields import Modules, require_one_of
from jspec.checkpoints.quantized.format import (
    BlockFormat,
    PlainModules,
    QuantizedTensor,
    StoredParts,
    WeightTensors,
    read_block,
    read_plain,
    read_scales,
    scales_of_channels,
)
from jspec.quantization.formats import GROUP, KINDS, Format, num_groups

FP8 = "float8_e4m3fn"
EVERY_LINEAR = Modules(frozenset(("Linear",)), (), "")


@dataclasses.dataclass(frozen=True)
class FP8BlockWeight(QuantizedTensor):
    """A weight ``[out, in]`` whose numbers are multiplied by the scales of their blocks.

    Attributes:
      numbers: float8_e4m3fn ``[out, in]``.
      scales: ``[ceil(out / height), ceil(in / width)]``. Blocks at the lower and right edges may be smaller.
      block: height and width of a block.
    """

    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]

    def stored(self) -> StoredParts | None:
        """As ``QuantizedTensor.stored``; None unless blocks have whole groups of inputs."""
        if self.block[1] % GROUP:
            return None
        shape = self.shape[0], num_groups(self.shape[1])
        of_groups = ComputedTensor.of(self.scales, shape, "float32", self.scales_of_groups, self.check)
        return StoredParts(KINDS["fp8_block"], {"weight": self.numbers, "scale": of_groups})

    def scales_of_groups(self, index: Index) -> np.ndarray:
        """A part of the scales repeated for each output channel and each 128 inputs, float32 ``[out, ceil(in / 128)]``. All
        stored scales are read, which are few."""
        (first, stop), (left, right) = bounds_of(index, (self.shape[0], num_groups(self.shape[1])))
        rows, columns = np.arange(first, stop) // self.block[0], np.arange(left, right) * GROUP // self.block[1]
        return read_scales(self.scales)[rows[:, None], columns[None]]

    def check(self):
        read_scales(self.scales)

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads no other numbers, but all scales, which are few."""
        scales, (height, width) = read_scales(self.scales), self.block
        (first, stop), (left, right) = bounds_of(index, self.shape)
        values, columns = self.numbers.read_part(index).astype(np.float32), np.arange(left, right) // width
        for i in range(first // height, -(-stop // height)):
            values[max(i * height - first, 0) : (i + 1) * height - first] *= scales[i, columns]
        return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class FP8Blocks(BlockFormat):
    """FP8 with a scale for each block.

    Attributes:
      block: height and width of a block.
    """

    bits: int = 8
    ends: tuple[str, ...] = (".weight", ".weight_scale")
    dtype: str | None = FP8
    block: tuple[int, int]

    @property
    def summary(self) -> str:
        return f"FP8 with a scale for each block of {self.block[0]} x {self.block[1]}"

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        return shape_of_numbers(parts)

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> FP8BlockWeight:
        blocks = tuple(-(-size // of) for size, of in zip(shape, self.block, strict=True))
        stored, found = FP8Numbers.of(parts.take(".weight", shape, (FP8,))), parts.tensors.get(self.scale_end)
        of_four_axes = (blocks[0], 1, blocks[1], 1)  # as NVIDIA Model Optimizer writes them
        is_such = found is not None and found.shape == of_four_axes
        scales = dataclasses.replace(parts.take(self.scale_end, of_four_axes if is_such else blocks), shape=blocks)
        return FP8BlockWeight(name, stored.file, stored.path, shape, "float32", stored, scales, self.block)


@dataclasses.dataclass(frozen=True)
class ScaledWeight(QuantizedTensor):
    """A weight ``[out, in]`` whose numbers are multiplied by the scales of their output channels.

    Attributes:
      form: ``fp8`` or ``int8``.
      numbers: ``[out, in]``.
      scales: with a number for each output channel, or with one for all.
    """

    form: Format
    numbers: Tensor
    scales: Tensor

    def stored(self) -> StoredParts:
        return StoredParts(self.form, {"weight": self.numbers, "scale": scales_of_channels(self.scales, self.shape[0])})

    def check(self):
        read_scales(self.scales)

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads no other numbers, but all scales, which are few."""
        (first, stop), _ = bounds_of(index, self.shape)
        scales = np.broadcast_to(read_scales(self.scales).reshape(-1), self.shape[:1])
        return self.numbers.read_part(index).astype(np.float32) * scales[first:stop, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scaled(BlockFormat):
    """FP8 or int8 with a scale for each output channel or for each weight. Language models keep it
    (``jspec.checkpoints.quantized.scales``, or ``stored_weights`` where some maps are not quantised), and draft heads
    dequantise it.

    Attributes:
      form: ``fp8`` or ``int8``, as which the weights can be kept.
      scales: whether there is a scale for each output ``channel``, or one for a whole ``tensor``.
      targets: which modules are quantised.
      ignored: which of these are not, after all.
    """

    bits: int = 8
    ends: tuple[str, ...] = (".weight", ".weight_scale")
    form: Format
    scales: Literal["channel", "tensor"]
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
            scales=scales,
            targets=targets,
            ignored=ignored,
        )

    def includes(self, names: Iterable[str]) -> bool:
        """Whether a linear map is quantised, to which the checkpoint may give any of these names."""
        names = tuple(names)
        return self.targets.include(names) and not self.ignored.include(names)

    def shapes_of_scales(self, channels: int) -> list[tuple[int, ...]]:
        """The shapes that the tensor of scales of a weight with so many output channels may have, the usual one first."""
        return [(channels, 1), (channels,)] if self.scales == "channel" else [(1,), (), (1, 1)]

    @property
    def summary(self) -> str:
        kind = {"fp8": "FP8"}.get(self.form.name, self.form.name)
        return f"{kind} with a scale for each {'output channel' if self.scales == 'channel' else 'weight'}"

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        return shape_of_numbers(parts)

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> ScaledWeight:
        known = self.shapes_of_scales(shape[0])
        found = parts.tensors.get(".weight_scale")
        stored = FP8Numbers.of(parts.take(".weight", shape, (self.form.numbers,)))
        scales = parts.take(".weight_scale", found.shape if found is not None and found.shape in known else known[0])
        return ScaledWeight(name, stored.file, stored.path, shape, "float32", self.form, stored, scales)


def shape_of_numbers(parts: WeightTensors) -> tuple[int, ...] | None:
    """The shape of a weight whose numbers are in one tensor of the same shape, as ``BlockFormat.shape`` returns it."""
    stored = parts.tensors.get(".weight")
    return None if stored is None else stored.shape


def read_fp8_blocks(fields: Fields) -> FP8Blocks:
    """The ``quantization_config`` of DeepSeek's layout, whose ``weight_block_size`` is not null.

    Raises:
      Refusal: it says something that is not read.
    """
    require_one_of(fields, "fmt", "e4m3", "float8_e4m3fn", absent="e4m3")
    plain, scales = read_plain(fields, "modules_to_not_convert", "ignored_layers"), ".weight_scale_inv"
    block = read_block(fields, "weight_block_size")
    return FP8Blocks(plain=plain, ends=(".weight", scales), scale_end=scales, block=block)


def blocks_of_model_optimizer(fields: Fields, *lists: str) -> FP8Blocks:
    """The ``FP8_PB_WO`` of NVIDIA Model Optimizer, whose blocks are 128 x 128.

    Args:
      fields: the object that says so.
      lists: what the list of modules that are not quantised may be called.
    """
    return FP8Blocks(plain=read_plain(fields, *lists), block=(128, 128))


def read_compressed_blocks(fields: Fields, weights: Fields) -> FP8Blocks:
    """The ``quantization_config`` of llm-compressor with ``strategy: block``.

    Args:
      fields: the whole of it.
      weights: what it says of weights, of which the caller has checked all but the block.

    Raises:
      Refusal: the block is none.
    """
    return FP8Blocks(plain=read_plain(fields, "ignore"), block=read_block(weights, "block_structure"))
