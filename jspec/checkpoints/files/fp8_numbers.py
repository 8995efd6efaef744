"""``FP8Numbers``: FP8 numbers in a file, of which none is NaN.

Kernels move the bits of a number into place (``jspec.pallas.weights.unpack``), and those of NaN would become 480."""

import dataclasses

import numpy as np

from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import Tensor

_PIECE = 2**20  # bytes that are looked at together, so that they stay in a CPU's cache
_ONES, _SIGNS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)


@dataclasses.dataclass(frozen=True)
class FP8Numbers(Tensor):
    """The numbers of another tensor, float8_e4m3fn, which is refused by its name if one of those that are read is NaN."""

    origin: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> Tensor:
        """``tensor`` if it holds something else than FP8, or is checked already."""
        if tensor.dtype != "float8_e4m3fn" or isinstance(tensor, cls):
            return tensor
        return cls(tensor.name, tensor.file, tensor.path, tensor.shape, tensor.dtype, tensor)

    def read_part(self, index: Index) -> np.ndarray:
        if has_nan(numbers := self.origin.read_part(index)):
            raise Refusal(
                f"{self.file}: tensor {self.name!r} holds NaN (0x7f or 0xff): expected numbers; fetch it again"
            )
        return numbers


def has_nan(numbers: np.ndarray) -> bool:
    """Whether one of these float8_e4m3fn numbers is NaN: all of its bits but the sign are set."""
    flat = np.ascontiguousarray(numbers).reshape(-1).view(np.uint8)
    whole = len(flat) - len(flat) % 8
    if ((flat[whole:] & 0x7F) == 0x7F).any():
        return True
    # One more than 0x7f sets the highest bit of a byte, and nothing is carried over to the next byte.
    for start in range(0, whole, _PIECE):
        words = flat[start : min(start + _PIECE, whole)].view(np.uint64)
        if (((words & ~_SIGNS) + _ONES) & _SIGNS).any():
            return True
    return False
