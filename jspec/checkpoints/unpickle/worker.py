"""The process: standard input is the file, standard output one JSON object.

Either ``{"refusal": sentence}``, or ``{"tensors": {name: {"dtype", "start", "shape", "strides"}}}`` with ``start`` in
bytes and strides in elements.
"""

import encodings.cp437  # noqa: F401  zipfile decodes names with it, and no file can be opened once limits are set
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
    """Answer for the file on standard input."""
    with open(0, "rb", closefd=False) as file:
        limit()
        try:
            answer = {"tensors": read(file)}
        except Refused as refusal:
            answer = {"refusal": str(refusal)}
    json.dump(answer, sys.stdout)


def limit():
    """Take from this process, for good, what reading does not need: memory, time, other files, sockets, children."""
    limits = dict(LIMITS)
    if sys.platform != "darwin":  # which has no such limit
        limits[resource.RLIMIT_AS] = MAX_MEMORY
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def read(file: BinaryIO) -> dict[str, dict]:
    """Where the tensors of ``file`` lie, as the answer spells it.

    Raises:
      Refused: it is damaged, or holds more than a state dict.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        return _places(*read_object(file, size))
    except Refused:
        raise
    except Exception as error:  # damage can show anywhere, and means the same everywhere
        raise Refused(f"is truncated or damaged ({type(error).__name__}: {error}); fetch the file again") from None


def _places(value: Any, extents: dict[str, Extent]) -> dict[str, dict]:
    if type(value) is not dict or len(value) > MAX_TENSORS:
        raise Refused(f"holds a {type(value).__name__}, expected a state dict of at most {MAX_TENSORS} tensors")
    places = {}
    for name, view in value.items():
        if type(view) is View:
            places[name] = _place(name, view, extents[view.storage.key])
        elif not (view is None or isinstance(view, bool | int | float | str)):  # a step count or a version is left out
            raise Refused(f"holds a {type(view).__name__} under {name!r}, expected a tensor; save the state dict alone")
    return places


def _place(name: str, view: View, extent: Extent) -> dict:
    itemsize = ITEMSIZES[view.storage.dtype]
    if view.storage.numel * itemsize > extent.size:
        raise Refused(f"holds {extent.size} of the {view.storage.numel * itemsize} bytes of tensor {name!r}")
    start = extent.start + view.offset * itemsize
    return {"dtype": view.storage.dtype, "start": start, "shape": view.shape, "strides": view.strides}
