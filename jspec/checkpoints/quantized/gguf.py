"""Quantised tensors of GGUF files (``jspec.checkpoints.gguf``), of which each says by itself how it is stored."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of, read_range
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.quantized.format import (
    BlockFormat,
    PlainModules,
    QuantizedTensor,
    StoredParts,
    WeightTensors,
    read_scales,
)
from jspec.checkpoints.quantized.gguf_blocks import BlockType
from jspec.quantization.formats import Format, format_of
from jspec.quantization.levels import shared_numbers
from jspec.quantization.weight import Weight

Order = Callable[[], np.ndarray]  # which rows or columns of a tensor, int [n]


@dataclasses.dataclass(frozen=True)
class BlockWeight(QuantizedTensor):
    """A quantised tensor of a GGUF file, or some rows of one; its leading axes are joined: ``[rows, in]``.

    Attributes:
      type: of its blocks.
      start: the first byte of the tensor in the file.
      held: how many rows that has.
      rows: which of them, in this order; None for all. It is called when they are read.
      columns: column j is column ``columns()[j]`` of the tensor; None for all in their order.
      factors: of NVFP4 numbers that multiply the weight, of equal parts of its rows in the file; None for 1.
    """

    type: BlockType
    start: int
    held: int
    rows: Order | None = None
    columns: Order | None = None
    factors: Tensor | None = None

    @property
    def form(self) -> Format | None:
        """The format that holds the weight; None if none has its columns in another order."""
        return format_of(self.type.format + ("" if self.columns is None else "_ordered"))

    def blocks(self, rows: slice) -> np.ndarray:
        """The bytes of some rows: uint8 ``[rows, blocks, bytes]``."""
        shape = self.held, self.shape[1] // self.type.weights, self.type.bytes
        read = functools.partial(read_range, self.path, np.dtype(np.uint8), shape, start=self.start)
        try:
            if self.rows is None:
                return read((rows,))
            places = self.rows()[rows]
            found, inverse = np.unique(places, return_inverse=True)
            runs = np.split(found, np.flatnonzero(np.diff(found) > 1) + 1)
            parts = [read((slice(int(run[0]), int(run[-1]) + 1),)) for run in runs if run.size]
            return np.concatenate(parts)[inverse] if parts else np.empty((0, *shape[1:]), np.uint8)
        except (OSError, ValueError) as error:
            raise Refusal(f"{self.file}: tensor {self.name!r} cannot be read ({error}); download it again") from None

    def stored(self) -> StoredParts | None:
        form, outputs, inputs = self.form, self.shape[0], self.shape[1]
        if form is None:
            return None
        makers: dict[str, Callable[..., np.ndarray]] = {
            "order": lambda _: self._order(),
            "channel_scale": self._channel_scale,
        }

        def part(name: str, shape: tuple[int, ...], index: Index) -> np.ndarray:
            first, *others = (slice(*bound) for bound in bounds_of(index, shape))
            if name not in makers:
                return self._array(name, self.blocks(first))[(slice(None), *others)]
            return makers[name](first)[(first if name == "order" else slice(None), *others)]

        arrays = {
            name: ComputedTensor.of(self, array.shape, array.dtype, functools.partial(part, name, array.shape))
            for name, array in form.arrays((outputs, inputs)).items()
        }
        return StoredParts(form, arrays)

    def read_part(self, index: Index) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds_of(index, self.shape))
        blocks = self.blocks(rows)
        arrays: dict[str, Any] = {name: self._array(name, blocks) for name in ("weight", "scale")}
        arrays["channel_scale"] = self._channel_scale(rows) if self.type.form.channel_numbers else None
        wide = Weight.of(arrays, self.type.form, self.shape[1]).dequantize()
        return (wide if self.columns is None else wide[:, self.columns()])[:, columns]

    def _channel_scale(self, rows: slice) -> np.ndarray:
        """What sums of some rows are multiplied by, and divided: float32 ``[rows, 2]``."""
        scale = np.ones((rows.stop - rows.start, 2), np.float32)
        if self.factors is not None:
            factors = read_scales(self.factors).reshape(-1)
            places = np.arange(self.held)[rows] if self.rows is None else self.rows()[rows]
            scale[:, 0] = factors[places * len(factors) // self.held]
        return scale

    def _order(self) -> np.ndarray:
        """Which input of the model each column in the file is for."""
        assert self.columns is not None
        return np.argsort(self.columns()).astype(np.int32)

    def _array(self, name: str, blocks: np.ndarray) -> np.ndarray:
        """An array of the format, whose scales are checked."""
        array, form = self.type.array(name, blocks), self.type.form
        if name != "scale":
            return array
        if form.scales == "powers":
            wrong = array > form.largest_power
        else:
            numbers = shared_numbers(array, form) if form.levels else array
            wrong = ~np.isfinite(numbers.astype(np.float32))
        if wrong.any():
            found = f"a scale above {form.largest_power}" if form.scales == "powers" else "a scale that is no number"
            raise Refusal(f"{self.file}: tensor {self.name!r} holds {found}; download it again")
        return array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFBlocks(BlockFormat):
    """The blocks of GGUF files, of any type."""

    bits: int = 8
    ends: tuple[str, ...] = (".weight",)
    bytes_each: ClassVar[str] = "about one or less"  # pyright: ignore[reportIncompatibleMethodOverride]

    def is_quantized(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(isinstance(tensor, BlockWeight) for tensor in tensors.values())

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> QuantizedTensor:
        weight = parts.take(".weight", shape, ("float32",))
        assert isinstance(weight, BlockWeight)
        return dataclasses.replace(weight, name=name)


def blocks_among(tensors: Mapping[str, Tensor], where: str) -> GGUFBlocks | None:
    """The format of the tensors that are blocks, None if none is; ``where`` is the file, for messages."""
    types = dict.fromkeys(tensor.type.name for tensor in tensors.values() if isinstance(tensor, BlockWeight))
    plain = PlainModules(frozenset(), "", where)
    return GGUFBlocks(plain=plain, words=" and ".join(types)) if types else None
