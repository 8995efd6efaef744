"""``Tensor``: one tensor of a checkpoint on disk, in any file format."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from jspec.checkpoints.files.ranges import Index

FLOAT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
NUMPY_DTYPES = {name: FLOAT_DTYPES[name] for name in ("float32", "bfloat16")}  # of parameters
STORED_DTYPES = FLOAT_DTYPES | {name: np.dtype(name) for name in ("int64", "int32", "int8", "uint32", "uint8", "bool")}
STORED_DTYPES["float8_e4m3fn"] = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Tensor(abc.ABC):
    """A tensor on disk, of which name, shape and dtype are known and the values are not read yet.

    Attributes:
      name: its name in the checkpoint, ``model.norm.weight``.
      file: the bare name of its file, for messages.
      path: the resolved path of its file.
      shape: its shape.
      dtype: its dtype on disk, a key of ``STORED_DTYPES``.
      dequantizes: whether the files hold its values quantised, so that reading it dequantises them.
    """

    dequantizes: ClassVar[bool] = False

    name: str
    file: str
    path: Path
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> np.ndarray:
        """The values, as an array of this shape and dtype."""
        return self.read_part(())

    @abc.abstractmethod
    def read_part(self, index: Index) -> np.ndarray:
        """``read()[index]``. The bytes of that part alone are read, or few others."""

    def check(self):  # noqa: B027 (most tensors are not read with others)
        """Raise a ``Refusal`` if scales are wrong with which the values are read, so that nothing is loaded before."""


@dataclasses.dataclass(frozen=True)
class ComputedTensor(Tensor):
    """A tensor that is computed from others whenever it is read.

    Attributes:
      values: returns the values of a part of it, by its index.
      checked: what ``check`` calls; None if there is nothing to check.
    """

    values: Callable[[Index], np.ndarray]
    checked: Callable[[], object] | None = None

    @classmethod
    def of(cls, tensor: Tensor, shape: tuple[int, ...], dtype: str, values, checked=None) -> "ComputedTensor":
        """One with the name and the file of ``tensor``."""
        return cls(tensor.name, tensor.file, tensor.path, shape, dtype, values, checked)

    def check(self):
        if self.checked is not None:
            self.checked()

    def read_part(self, index: Index) -> np.ndarray:
        return self.values(index)


@dataclasses.dataclass(frozen=True)
class ArrayTensor(Tensor):
    """An array of a caller in the place of a tensor in files.

    Attributes:
      arrays: name -> array, which may be that of a trace.
      key: its name there.
    """

    arrays: dict[str, Any]
    key: str

    @property
    def array(self) -> Any:
        """The array, of this shape."""
        array = self.arrays[self.key]
        return array if array.shape == self.shape else array.reshape(self.shape)

    def read_part(self, index: Index) -> Any:
        return self.array[index]


@dataclasses.dataclass(frozen=True)
class Derived(Tensor):
    """A tensor that was computed from one in the files, and whose ``values`` are in memory."""

    values: np.ndarray

    def read_part(self, index: Index) -> np.ndarray:
        return self.values[index]


def joined(arrays: Sequence[Any], axis: int = 0) -> Any:
    """Arrays one after the other: NumPy's, or those of the library that they are of, which a trace may have."""
    if len(arrays) == 1:
        return arrays[0]
    return arrays[0].__array_namespace__().concatenate(arrays, axis=axis)


def derived(origin: Tensor, values: np.ndarray) -> Derived:
    """A tensor with these ``values`` and with name and file of ``origin``, whose place it takes."""
    return Derived(origin.name, origin.file, origin.path, values.shape, values.dtype.name, values)
