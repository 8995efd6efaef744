"""Reads the tensors of a ``torch.save`` file without torch and without unpickling it in this process.

Another process interprets the pickle and answers at which bytes of the file each tensor lies
(``jspec.checkpoints.files.unpickle``). This process does not trust that answer: it checks that every tensor lies inside
the file, and then reads the values itself."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.ranges import Index
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.files.tensor import STORED_DTYPES, Tensor

MAX_SECONDS = 300
MAX_ANSWER_BYTES = 64 * 2**20
MAX_REASON = 500  # characters

# The other process ignores the environment and has no site-packages: it can import the standard library and the one
# package ``unpickle``.
_START = "import sys; sys.path.append(sys.argv[1]); from unpickle.worker import main; main()"
_COMMAND = (sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parent))


@dataclasses.dataclass(frozen=True)
class PickledTensor(Tensor):
    """A tensor in a ``torch.save`` file, a strided view of the file's bytes.

    Attributes:
      start: offset of its first element in the file, in bytes.
      strides: the distance between neighbours along each axis, in elements.
    """

    start: int
    strides: tuple[int, ...]

    def read_part(self, index: Index) -> np.ndarray:
        dtype = STORED_DTYPES[self.dtype]
        if 0 in self.shape:
            return np.empty(self.shape, dtype)[index]
        try:
            data = np.memmap(self.path, np.uint8, "r", self.start, (self.span * dtype.itemsize,)).view(dtype)
        except (OSError, ValueError) as error:
            raise Refusal(f"{self.file}: truncated or damaged ({error}); fetch the file again") from None
        strides = [stride * dtype.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(data, self.shape, strides, writeable=False)[index].copy()

    @property
    def span(self) -> int:
        """The number of elements in the file from the tensor's first to its last; the tensor must not be empty."""
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


def read_pickle_header(folder: Folder, name: str, named_by: str | None = None) -> dict[str, Tensor]:
    """Tensor name -> tensor, for every tensor in a ``torch.save`` file; no values are read yet.

    Args:
      folder: the folder that holds the file.
      name: a bare file name, ``pytorch_model.bin``.
      named_by: the file that contains this name, such as an index of shards, for messages.

    Raises:
      Refusal: the pickle asks for anything but tensors, the file is damaged or exceeds the limits of the other process,
        or a tensor has a dtype that cannot be converted.
    """
    path, where = folder.path(name, named_by), f"{folder.given}/{name}"
    size, tensors = path.stat().st_size, {}
    for key, place in _places(path, where).items():
        tensor = PickledTensor(
            key, name, path, tuple(place["shape"]), place["dtype"], place["start"], tuple(place["strides"])
        )
        _require_inside(tensor, size, where)
        tensors[key] = tensor
    return tensors


def _places(path: Path, where: str) -> dict[str, dict[str, Any]]:
    """Tensor name -> dtype, start, shape and strides, as the other process answers.

    The types in the answer are checked here; whether the tensors lie inside the file is checked later."""
    answer = _ask(path, where)
    if isinstance(answer, dict) and isinstance(refusal := answer.get("refusal"), str):
        reason = "".join(letter if letter.isprintable() else "?" for letter in refusal[:MAX_REASON])
        raise Refusal(f"{where}: {reason}")
    places = answer.get("tensors") if isinstance(answer, dict) else None
    if not isinstance(places, dict) or not all(map(_is_place, places.values())):
        raise Refusal(f"{where}: the process that reads it gave no sound answer; use a safetensors copy")
    return places


def _ask(path: Path, where: str) -> Any:
    """The JSON answer of the other process about a file; None if it is no JSON."""
    with open(path, "rb") as file, tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                _COMMAND,
                stdin=file,
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env=_environment(),
                timeout=MAX_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Refusal(f"{where}: reading it took more than {MAX_SECONDS} s; use a safetensors copy") from None
        if done.returncode != 0 or os.fstat(output.fileno()).st_size > MAX_ANSWER_BYTES:
            raise Refusal(
                f"{where}: the process that reads it ended with code {done.returncode}, out of its bounds of time and "
                "memory; use a safetensors copy"
            )
        output.seek(0)
        try:
            return json.load(output)
        except ValueError:
            return None


def _environment() -> dict[str, str]:
    """The one variable that a Python interpreter may need to start: the path of its own shared library."""
    return {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}


def _is_place(place: Any) -> bool:
    """Whether ``place`` has the keys and types that describe a tensor, with no negative number."""
    keys = {"dtype", "start", "shape", "strides"}
    if not isinstance(place, dict) or place.keys() != keys or not isinstance(place["dtype"], str):
        return False
    lists = isinstance(place["shape"], list) and isinstance(place["strides"], list)
    return lists and all(type(n) is int and n >= 0 for n in (place["start"], *place["shape"], *place["strides"]))


def _require_inside(tensor: PickledTensor, file_size: int, where: str):
    """Raise a ``Refusal`` unless the tensor lies inside a file of ``file_size`` bytes and has a name and dtype to read."""
    if not tensor.name.isprintable():
        raise Refusal(f"{where}: the tensor name {tensor.name!r} is refused")
    if tensor.dtype not in STORED_DTYPES:
        known = ", ".join(STORED_DTYPES)
        raise Refusal(f"{where}: tensor {tensor.name!r} is stored as {tensor.dtype}; only {known} can be converted")
    itemsize = STORED_DTYPES[tensor.dtype].itemsize
    sane = len(tensor.shape) == len(tensor.strides) and math.prod(n or 1 for n in tensor.shape) <= file_size
    sane = sane and all(stride <= file_size for stride in tensor.strides)
    if not sane or (0 not in tensor.shape and tensor.start + tensor.span * itemsize > file_size):
        raise Refusal(f"{where}: tensor {tensor.name!r} of shape {list(tensor.shape)} does not lie in the file")
