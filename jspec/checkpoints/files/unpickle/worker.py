"""The main program of the process: it reads a ``torch.save`` file from standard input and answers with a JSON object.

The answer on standard output is ``{"tensors": {name: {"dtype": .., "start": .., "shape": .., "strides": ..}}}``, where
``start`` is an offset in the file in bytes and the strides are in elements. If the file is refused, the answer is
``{"refusal": sentence}``.
"""

import encodings.cp437  # noqa: F401  zipfile decodes names with it, and after ``limit`` no file can be opened
import json
import os
import resource
import sys
from typing import Any, BinaryIO

from .archive import ITEMSIZES, Extent, read_object
from .machine import Refused, View

MAX_TENSORS = 2**14
MAX_MEMORY = 4 * 2**30  # bytes
LIMITS = {
    resource.RLIMIT_CPU: 20,  # seconds
    resource.RLIMIT_FSIZE: 64 * 2**20,  # bytes of the answer
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_NPROC: 0,
    resource.RLIMIT_NOFILE: 3,  # those that are open already
}


def main():
    """Write the answer about the file on standard input."""
    with open(0, "rb", closefd=False) as file:
        limit()
        try:
            answer = {"tensors": read(file)}
        except Refused as refusal:
            answer = {"refusal": str(refusal)}
    json.dump(answer, sys.stdout)


def limit():
    """Limit this process for the rest of its life to what reading needs.

    The limits are on memory and processor time. Further files, sockets and child processes cannot be opened at all."""
    limits = dict(LIMITS)
    if sys.platform != "darwin":  # macOS has no limit on address space
        limits[resource.RLIMIT_AS] = MAX_MEMORY
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def read(file: BinaryIO) -> dict[str, dict]:
    """Tensor name -> dtype, start, shape and strides, the value of ``tensors`` in the answer.

    Raises:
      Refused: the file is damaged or holds more than a state dict.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        return _places(*read_object(file, size))
    except Refused:
        raise
    except Exception as error:  # damage can raise any exception, and all of them mean that the file is damaged
        raise Refused(f"is truncated or damaged ({type(error).__name__}: {error}); fetch the file again") from None


def _places(value: Any, extents: dict[str, Extent]) -> dict[str, dict]:
    if type(value) is not dict or len(value) > MAX_TENSORS:
        raise Refused(f"holds a {type(value).__name__}, expected a state dict of at most {MAX_TENSORS} tensors")
    places = {}
    for name, view in value.items():
        if type(view) is View:
            places[name] = _place(name, view, extents[view.storage.key])
        elif not (
            view is None or isinstance(view, bool | int | float | str)
        ):  # plain values, a step count, are dropped
            raise Refused(f"holds a {type(view).__name__} under {name!r}, expected a tensor; save the state dict alone")
    return places


def _place(name: str, view: View, extent: Extent) -> dict:
    itemsize = ITEMSIZES[view.storage.dtype]
    if view.storage.numel * itemsize > extent.size:
        raise Refused(f"holds {extent.size} of the {view.storage.numel * itemsize} bytes of tensor {name!r}")
    start = extent.start + view.offset * itemsize
    return {"dtype": view.storage.dtype, "start": start, "shape": view.shape, "strides": view.strides}
