"""Quantised tensors of GGUF files (``jspec.checkpoints.gguf``), of which each says by itself how it is stored."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.ranges import Index, bounds_of, read_range
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.quantized.format import BlockFormat, PlainModules, QuantizedTensor, StoredParts, WeightTensors
from jspec.checkpoints.quantized.gguf_blocks import BlockType
from jspec.quantization.weight import Weight

METHOD = "gguf"  # quant_method of the fields of config.json that a GGUF file stands for


@dataclasses.dataclass(frozen=True)
class BlockWeight(QuantizedTensor):
    """A quantised tensor of a GGUF file, its leading axes joined: ``[rows, in]``.

    Attributes:
      type: of its blocks.
      start: the first of its bytes in the file.
    """

    type: BlockType
    start: int

    def blocks(self, rows: slice) -> np.ndarray:
        """The bytes of some rows: uint8 ``[rows, blocks, bytes]``."""
        shape = self.shape[0], self.shape[1] // self.type.weights, self.type.bytes
        try:
            return read_range(self.path, np.dtype(np.uint8), shape, (rows,), self.start)
        except (OSError, ValueError) as error:
            raise Refusal(f"{self.file}: cannot be read ({error}); download it again") from None

    def stored(self) -> StoredParts:
        declared = self.type.form.arrays((self.shape[0], self.shape[1]))

        def part(name: str, index: Index) -> np.ndarray:
            rows, *others = (slice(*bound) for bound in bounds_of(index, declared[name].shape))
            return self.type.array(name, self.blocks(rows))[(slice(None), *others)]

        arrays = {
            name: ComputedTensor.of(self, array.shape, array.dtype, functools.partial(part, name))
            for name, array in declared.items()
            if name in ("weight", "scale")
        }
        return StoredParts(self.type.form, arrays)

    def read_part(self, index: Index) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds_of(index, self.shape))
        blocks = self.blocks(rows)
        arrays = {name: self.type.array(name, blocks) for name in ("weight", "scale")}
        return Weight.of(arrays, self.type.form, self.shape[1]).dequantize()[:, columns]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFBlocks(BlockFormat):
    """The blocks of GGUF files, of any type."""

    bits: int = 8
    ends: tuple[str, ...] = (".weight",)
    words: str = "blocks of GGUF"
    bytes_each: ClassVar[str] = "about one or less"  # pyright: ignore[reportIncompatibleMethodOverride]

    def is_quantized(self, tensors: Mapping[str, Tensor]) -> bool:
        return any(tensor.dequantizes for tensor in tensors.values())

    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> QuantizedTensor:
        weight = parts.take(".weight", shape, ("float32",))
        return dataclasses.replace(weight, name=name)  # pyright: ignore[reportReturnType]


def read_blocks(fields: Fields) -> GGUFBlocks:
    """The format of the weights of a GGUF file."""
    return GGUFBlocks(plain=PlainModules(frozenset(), "", fields.where))
