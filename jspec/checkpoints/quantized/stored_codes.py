"""Codes as jspec stores them (``jspec.quantization``), read from the tensors of a checkpoint.

GPTQ, AWQ, compressed-tensors and Model Optimizer pack codes in orders of their own. They are packed anew while they are
read, one weight at a time. Not a code, a zero or a scale is changed."""

import abc
import dataclasses

import numpy as np

from jspec.checkpoints.files.ranges import Index, bounds_of
from jspec.checkpoints.files.tensor import ComputedTensor, Tensor
from jspec.checkpoints.quantized.format import QuantizedTensor, StoredParts
from jspec.quantization.codes import BLOCK, HALF, ZERO, pack_words, unpack_codes
from jspec.quantization.formats import INT4, LEVELS, grouped


@dataclasses.dataclass(frozen=True)
class CodedTensor(QuantizedTensor):
    """A weight of codes, which stand for numbers of a few bits."""

    @abc.abstractmethod
    def words_of(self, outputs: slice, words: slice) -> np.ndarray:
        """The codes of some features, uint32 ``[words, out]``: those of eight input features in a word, or of four if they
        have eight bits, the first in the lowest bits."""

    def input_order(self) -> np.ndarray | None:
        """The input features group by group, int32 ``[in]``; None if those of a group follow each other."""

    def words_by_group(self, outputs: slice, inputs: slice, bits: int = 4) -> np.ndarray:
        """``words_of`` inputs from the first of ``inputs`` on, in an order in which those of a group follow each other."""
        n, order = 32 // bits, self.input_order()
        if order is None and inputs.start % n == 0:
            return self.words_of(outputs, slice(inputs.start // n, -(-inputs.stop // n)))
        wanted = (np.arange(self.shape[1]) if order is None else order)[inputs]
        words = self.words_of(outputs, slice(0, -(-self.shape[1] // n)))
        found = np.zeros((-(-len(wanted) // n), words.shape[1]), np.uint32)
        for i in range(n):
            places, shifts = np.divmod(wanted[i::n], n)
            codes = words[places] >> (bits * shifts[:, None]).astype(np.uint32) & np.uint32((1 << bits) - 1)
            found[: len(places)] |= codes << (bits * i)
        return found


@dataclasses.dataclass(frozen=True)
class RepackedCodes(Tensor):
    """The codes of neighbouring inputs of a weight, packed as jspec packs them: uint8 ``[out, 64 blocks]``.

    Attributes:
      stored: the weight in the files.
      first: the first of these inputs, from which blocks are counted.
      count: how many inputs there are.
    """

    stored: CodedTensor
    first: int
    count: int

    @classmethod
    def of(cls, stored: CodedTensor, first: int, count: int) -> "RepackedCodes":
        shape = INT4.arrays((stored.shape[0], count))["weight"].shape
        return cls(stored.name, stored.file, stored.path, shape, "uint8", stored, first, count)

    def check(self):
        self.stored.check()

    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. It reads the codes of whole blocks of inputs."""
        (first, stop), (left, right) = bounds_of(index, self.shape)
        blocks = slice(left // HALF, -(-right // HALF))
        inputs = slice(self.first + blocks.start * BLOCK, self.first + min(blocks.stop * BLOCK, self.count))
        words = self.stored.words_by_group(slice(first, stop), inputs)
        packed = pack_words(words, inputs.stop - inputs.start)
        return packed[:, left - blocks.start * HALF : right - blocks.start * HALF]


def in_eight_bits(parts: StoredParts, inputs: int) -> StoredParts:
    """A weight with codes of four bits as the same numbers in codes of eight; one in another format unchanged, and one with
    offsets, which codes of eight bits have not.

    Args:
      parts: the weight.
      inputs: how many inputs it has.
    """
    form, codes, scale = parts.form, parts.arrays["weight"], parts.arrays["scale"]
    if form.kind != INT4.kind or form.offsets:
        return parts

    def numbers(index: Index) -> np.ndarray:
        rows, columns = (slice(*bound) for bound in bounds_of(index, (codes.shape[0], inputs)))
        packed = codes.read_part((rows, slice(0, codes.shape[1])))
        return unpack_codes(packed, inputs)[:, columns].view(np.int8) - np.int8(ZERO)

    def scales(index: Index) -> np.ndarray:
        values = scale.read_part(index)
        return values - np.array([0, ZERO], values.dtype) if form.zeros else values

    wide = grouped(8, form.group, LEVELS if form.levels else form.scale, form.zeros, form.ordered)
    return parts._replace(form=wide).having(
        weight=ComputedTensor.of(codes, (codes.shape[0], inputs), "int8", numbers, codes.check),
        scale=ComputedTensor.of(scale, scale.shape, scale.dtype, scales, scale.check),
    )
