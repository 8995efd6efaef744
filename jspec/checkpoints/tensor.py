"""One tensor of a checkpoint on disk, whatever the file format."""

import abc
import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np

FLOAT_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
STORED_DTYPES = FLOAT_DTYPES | {name: np.dtype(name) for name in ("int64", "int32", "bool")}


@dataclasses.dataclass(frozen=True)
class Tensor(abc.ABC):
    """A tensor on disk: its name, its file's name and real path, shape, and dtype (a key of ``STORED_DTYPES``)."""

    name: str
    file: str
    path: Path
    shape: tuple[int, ...]
    dtype: str

    @abc.abstractmethod
    def read(self) -> np.ndarray:
        """The values. The file is mapped for this call only, so that its pages do not add up in memory."""
