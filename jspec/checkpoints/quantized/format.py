"""``BlockFormat`` and ``QuantizedTensor``: the base classes of formats of quantised weights, and of such weights."""

import abc
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import FLOAT_DTYPES, ComputedTensor, Tensor
from jspec.quantization import mxfp4
from jspec.quantization.formats import OF_INPUTS, Format

MAX_BLOCK = 2**20  # no weight has more rows or columns


class StoredParts(NamedTuple):
    """A weight ``[out, in]`` as it is stored: its format, and its arrays by the keys of ``Format.arrays``."""

    form: Format
    arrays: Mapping[str, Tensor]

    def having(self, **arrays: Tensor) -> "StoredParts":
        """The same with these ``arrays`` besides, or in place of those of their names."""
        return self._replace(arrays={**self.arrays, **arrays})

    def rows(self, part: Callable[[Tensor], Tensor]) -> "StoredParts":
        """Some of its output channels, those that ``part`` takes of a tensor."""
        return self.having(**{name: part(array) for name, array in self.arrays.items() if name not in OF_INPUTS})


class PlainModules(NamedTuple):
    """The modules that config.json says are not quantised. Which others are not, the tensors in the files say.

    Attributes:
      names: their whole names.
      key: the key that lists them, for messages.
      where: the file, for messages.
    """

    names: frozenset[str]
    key: str
    where: str


@dataclasses.dataclass(frozen=True)
class QuantizedTensor(Tensor):
    """The weight ``[out, in]`` of a linear map that the files hold quantised; ``read`` dequantises it to float32."""

    dequantizes = True
    # That of the tensors in the files; None of a weight that is in no layout.
    format: "BlockFormat | None" = dataclasses.field(default=None, kw_only=True, compare=False, repr=False)

    @classmethod
    def of(cls, name: str, shape: tuple[int, int], origin: Tensor, **fields: Any) -> Self:
        """The weight of this name and shape, of which ``origin`` holds the numbers, with these further ``fields``."""
        return cls(name, origin.file, origin.path, shape, "float32", **fields)

    @abc.abstractmethod
    def stored(self) -> StoredParts | None:
        """The weight as it is stored; None if there is no kernel for it."""


@dataclasses.dataclass(frozen=True)
class WeightTensors:
    """The stored tensors from which the weight ``[out, in]`` of one linear map is computed.

    Attributes:
      module: name of the linear map in the checkpoint.
      tensors: suffix of its name, ``.qweight`` -> tensor, for those in the files.
      where: the folder, for messages.
    """

    module: str
    tensors: Mapping[str, Tensor]
    where: str

    def take(
        self, end: str, shape: tuple[int, ...], dtypes: Collection[str] = tuple(FLOAT_DTYPES), or_shapes=()
    ) -> Tensor:
        """The tensor whose name ends with ``end``.

        Raises:
          Refusal: it is missing, or has another shape than ``shape`` or one of ``or_shapes``, or none of the ``dtypes``.
        """
        tensor = self.tensors.get(end)
        if tensor is None:
            others = ", ".join(repr(self.module + suffix) for suffix in self.tensors)
            raise Refusal(
                f"{self.where}: tensor {self.module + end!r} is missing, and {others} needs it; fetch it again"
            )
        if tensor.shape not in (shape, *or_shapes) or tensor.dtype not in dtypes:
            raise Refusal(
                f"{self.where}/{tensor.file}: tensor {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}, but "
                f"config.json asks for {' or '.join(dtypes)} {list(shape)}; fetch both again"
            )
        return tensor

    def require_whole_groups(self, inputs: int, group: int):
        """Raise a ``Refusal`` unless groups of so many input features fill all ``inputs``."""
        if inputs % group:
            raise Refusal(
                f"{self.where}/config.json: {self.module!r} has {inputs} input features: expected a multiple of {group}, "
                "because so many share a scale"
            )

    def require_multiple(self, what: str, size: int, bits: int):
        """Raise a ``Refusal`` unless codes of so many ``bits``, of ``size`` features ``what``, fill an int32 each."""
        if size % (of := 32 // bits):
            raise Refusal(
                f"{self.where}/config.json: {self.module!r} has {size} {what} features: expected a multiple of {of}, "
                f"because {'eight codes of four' if bits == 4 else 'four codes of eight'} bits are stored in one number"
            )


class StoredFormats(abc.ABC):
    """How the linear maps of a checkpoint are quantised: in a ``BlockFormat``, or in several (``mixed.py`` beside this)."""

    ends: tuple[str, ...]  # the suffixes of the tensors from which weights are computed

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """The file that says so, for messages."""

    @property
    @abc.abstractmethod
    def bytes_each(self) -> str:
        """Of a number in the files, in words: ``one``."""

    @abc.abstractmethod
    def of_module(self, module: str, tensors: Mapping[str, Tensor]) -> "BlockFormat | None":
        """The format of a linear map, if that is quantised; None if it is not, by config.json. ``tensors`` are those in the
        files, by name."""

    @property
    @abc.abstractmethod
    def summary(self) -> str:
        """The format in words, for messages: ``FP8 with a scale for each block of 128 x 128``."""

    @property
    def note(self) -> str:
        """The sentence for the user: what is stored, that it is dequantised, and what that costs."""
        return (
            f"the weights are stored in {self.summary}, for which there is no kernel, so they are dequantised as they are "
            f"read: in bfloat16 they take two bytes each instead of {self.bytes_each}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat(StoredFormats):
    """A format of stored weights, in which many numbers share a scale.

    Weights are dequantised while they are read, unless ``jspec.checkpoints.quantized.stored_weights`` keeps them.

    Attributes:
      plain: the modules that are not quantised, by config.json.
      bits: of a number or code.
      ends: the suffixes of the tensors from which a weight is computed, those of numbers first.
      scale_end: that of the tensors of scales.
      dtype: of the numbers, if they have the names that plain weights have; they are quantised if they have this dtype, or
        there is a tensor with the last of ``ends``. If None, all tensors with these ends are of quantised weights.
      words: what it is called, for ``summary``.
    """

    plain: PlainModules
    bits: int
    ends: tuple[str, ...]
    scale_end: str = ".weight_scale"
    dtype: str | None = None
    words: str = ""

    def of_module(self, module: str, tensors: Mapping[str, Tensor]) -> "BlockFormat":
        return self

    def has_numbers(self, module: str, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the files hold numbers or codes of a linear map that are those of this format, by name and dtype."""
        numbers = tensors.get(module + self.ends[0])
        return numbers is not None and self.dtype in (None, numbers.dtype)

    @property
    def where(self) -> str:
        return self.plain.where

    @property
    def bytes_each(self) -> str:
        return "half a one" if self.bits == 4 else "one"

    @property
    def summary(self) -> str:
        return self.words

    def shape(self, parts: WeightTensors) -> tuple[int, ...] | None:
        """The shape of the weight that is made of ``parts``, by their own shapes; None if those that tell it are missing.

        For checkpoints whose config.json does not say it, as those of draft heads."""
        numbers = parts.tensors.get(self.ends[0])
        return None if numbers is None else self.shape_of(numbers.shape)

    def shape_of(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a weight by that of the tensor of its numbers or codes."""
        return numbers

    @abc.abstractmethod
    def weight(self, name: str, shape: tuple[int, int], parts: WeightTensors) -> QuantizedTensor:
        """The weight that is made of ``parts``.

        Args:
          name: its name, ``<module>.weight``.
          shape: ``[out, in]``.
          parts: the tensors in the files.

        Raises:
          Refusal: a tensor is missing, or does not fit the weight.
        """

    def is_quantized(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether ``tensors``, some of the tensors of a linear map by the ends of their names, are those of this format."""
        numbers = tensors.get(self.ends[0])
        if self.dtype is None:
            return bool(tensors)
        return self.ends[-1] in tensors or (numbers is not None and numbers.dtype == self.dtype)


def read_scales(tensor: Tensor, signed: bool = False, index: Index = ()) -> np.ndarray:
    """The values of a tensor of scales, as float32.

    Args:
      tensor: the tensor.
      signed: whether a scale may be negative, as some quantisers of four bits choose it.
      index: which part of it.

    Raises:
      Refusal: one of them is zero, NaN or infinite, or negative where none may be.
    """
    values = tensor.read_part(index).astype(np.float32)
    wrong = values[~(np.isfinite(values) & ((values != 0) if signed else (values > 0)))]
    if wrong.size:
        expected = "numbers other than 0" if signed else "positive numbers"
        raise Refusal(
            f"{tensor.file}: tensor {tensor.name!r} holds {wrong.flat[0]}: expected {expected}; fetch it again"
        )
    return values


def read_powers(tensor: Tensor, form: Format, index: Index = ()) -> np.ndarray:
    """The powers of two that the bytes of a tensor of scales stand for, as float32.

    A scale of 0 is valid, which quantisers write for groups of zeros.

    Args:
      tensor: the tensor.
      form: the format of the weight.
      index: which part of it.

    Raises:
      Refusal: one of them is larger than ``form.largest_power``.
    """
    scales, most = tensor.read_part(index), form.largest_power
    if (largest := scales.max(initial=0)) > most:
        raise Refusal(
            f"{tensor.file}: tensor {tensor.name!r} holds the scale {largest}: expected at most {most}, for weights up to "
            f"{form.largest * 2 ** (most - 127)}; 255 is no number in {form.name.upper()}"
        )
    return mxfp4.twice_powers(scales) / 2


def scales_of_channels(tensor: Tensor, channels: int, signed: bool = False) -> ComputedTensor:
    """The scales of ``channels`` output channels, ``[channels]``, as ``read_scales`` reads those in the files: as many
    numbers, or one that counts for all of them."""
    read = functools.partial(read_scales, tensor, signed)

    def values(index: Index) -> np.ndarray:
        return np.broadcast_to(read().reshape(-1), channels)[index]

    return ComputedTensor.of(tensor, (channels,), tensor.dtype, values, read)


def read_plain(fields: Fields, *keys: str) -> PlainModules:
    """The modules that config.json lists as not quantised.

    Args:
      fields: the ``quantization_config``.
      keys: what the list may be called; the first one that is there counts. Patterns in the list have no effect.
    """
    key = next((key for key in keys if fields.raw.get(key) is not None), keys[0])
    listed = fields.raw.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise fields.refuse(key, "a list of module names")
    return PlainModules(frozenset(listed), fields.prefix + key, fields.where)


def read_block(fields: Fields, key: str) -> tuple[int, int]:
    """The height and the width of a block, from the list under ``key``, or as older files have it, ``128x128``."""
    block = fields.raw.get(key)
    if isinstance(block, str) and (sizes := re.fullmatch(r"([0-9]{1,7})x([0-9]{1,7})", block)):
        block = [int(size) for size in sizes.groups()]
    if not isinstance(block, list) or len(block) != 2 or not all(type(b) is int and 0 < b <= MAX_BLOCK for b in block):
        raise fields.refuse(key, f"two integers in 1..{MAX_BLOCK}, the height and the width of a block")
    return block[0], block[1]


class Grouping(NamedTuple):
    """How many input features share a scale, ``size``, -1 if all do; and the ``key`` of config.json that says so."""

    size: int
    key: str


def read_grouping(fields: Fields, *, of_all: bool = False) -> Grouping:
    """The ``Grouping`` under ``group_size``, which is not asked if ``of_all`` input features share a scale."""
    size = -1 if of_all else fields.integer("group_size", low=-1)
    if size == 0:
        raise fields.refuse("group_size", "a positive integer, or -1 for one group of all input features")
    return Grouping(size, f"{fields.prefix}group_size")
