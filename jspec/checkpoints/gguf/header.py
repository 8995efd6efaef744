"""Reads the header of a GGUF file: its metadata, and of each tensor the name, shape, type and place.

A file is untrusted. Every count and length is compared with the bytes that are there before anything is allocated, values
become Python objects, and nothing is executed. The layout is that of versions 2 and 3 of the format, little-endian:
``github.com/ggml-org/ggml/blob/master/docs/gguf.md``."""

import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.json_files import reason_of
from jspec.checkpoints.files.refusal import Refusal

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 128 << 20  # bytes; the largest vocabularies with their merges take about 20 MB
MAX_KEYS, MAX_TENSORS = 1 << 14, 1 << 17
MAX_NAME = 256  # bytes of the name of a key or of a tensor
MAX_TEXT = 16 << 20  # bytes of a string; chat templates have some 10 kB
MAX_STRINGS = 1 << 21  # in all arrays; the largest vocabularies have 300,000 tokens and 500,000 merges
_READ = 4 << 20  # bytes that are read at a time
_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 16
_ALIGNMENT_KEY = "general.alignment"
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9


class TensorInfo(NamedTuple):
    """Where a tensor of a GGUF file is.

    Attributes:
      name: ``blk.0.attn_q.weight``.
      shape: outermost axis first, ``(out, in)``: the reverse of the order in the file.
      type: the number of its type in ggml.
      start: the first of its bytes, from the beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    start: int


class Header(NamedTuple):
    """The header of a GGUF file.

    Attributes:
      where: the file as the user gave it, for messages.
      path: the resolved path.
      metadata: key -> a number, a boolean, a string, a list of strings, or an array of NumPy.
      tensors: one for each tensor, in the order of the file.
      size: bytes of the file.
    """

    where: str
    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]
    size: int


def read_header(path: str | os.PathLike) -> Header:
    """The header of the file ``path``.

    Raises:
      Refusal: it cannot be read, is no GGUF file of a known version, or is damaged; the message names what is wrong.
    """
    where = str(path)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would be waited for
            raise Refusal(f"{where}: is not a regular file")
        with open(path, "rb") as file:
            cursor = _Cursor(file, os.fstat(file.fileno()).st_size, where)
            return _header(cursor, Path(path).resolve())
    except OSError as error:
        raise Refusal(f"{where}: cannot be read ({reason_of(error)})") from None


def _header(cursor: "_Cursor", path: Path) -> Header:
    if cursor.take(4, "the magic") != MAGIC:
        raise cursor.refuse("is no GGUF file: it does not begin with the letters GGUF")
    version = cursor.integer("u4", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        why = "it is big-endian" if swapped else f"it has version {version}"
        known = " or ".join(map(str, VERSIONS))
        raise Refusal(f"{cursor.where}: {why}: expected a little-endian GGUF file of version {known}; make it anew")
    num_tensors = cursor.count(MAX_TENSORS, "tensors")
    num_keys = cursor.count(MAX_KEYS, "keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.name("a key")
        if key in metadata:
            raise cursor.refuse(f"has the key {key!r} twice")
        metadata[key] = cursor.value(key)
    unplaced = [_tensor(cursor) for _ in range(num_tensors)]
    fields = Fields(metadata, cursor.where)
    alignment = fields.integer(_ALIGNMENT_KEY, _ALIGNMENT, high=_MAX_ALIGNMENT)
    if alignment & (alignment - 1):
        raise fields.refuse(_ALIGNMENT_KEY, "a power of two")
    first = -(-cursor.place // alignment) * alignment
    seen = set()
    for tensor in unplaced:
        if tensor.name in seen:
            raise cursor.refuse(f"has the tensor {tensor.name!r} twice")
        if tensor.start % alignment:
            raise cursor.refuse(
                f"places the tensor {tensor.name!r} at {tensor.start}: expected a multiple of {alignment}"
            )
        seen.add(tensor.name)
    tensors = tuple(tensor._replace(start=first + tensor.start) for tensor in unplaced)
    return Header(cursor.where, path, metadata, tensors, cursor.size)


def _tensor(cursor: "_Cursor") -> TensorInfo:
    """A tensor, of which ``start`` counts from the first of all."""
    name = cursor.name("a tensor")
    dimensions = cursor.integer("u4", f"the axes of {name!r}")
    if not 1 <= dimensions <= 4:
        raise cursor.refuse(f"gives the tensor {name!r} {dimensions} axes: expected 1 to 4")
    shape = tuple(cursor.integer("u8", f"the shape of {name!r}") for _ in range(dimensions))[::-1]
    # No type has more than 16 weights in a byte.
    if 0 in shape or math.prod(shape) > 16 * cursor.size:
        raise cursor.refuse(
            f"gives the tensor {name!r} the shape {list(shape)}, which does not lie in its {cursor.size} bytes"
        )
    kind, start = cursor.integer("u4", f"the type of {name!r}"), cursor.integer("u8", f"the place of {name!r}")
    if start > cursor.size:
        raise cursor.refuse(f"places the tensor {name!r} at {start}, behind its {cursor.size} bytes")
    return TensorInfo(name, shape, kind, start)


class _Cursor:
    """The bytes of a header, one after the other.

    Attributes:
      where: the file, for messages.
      size: bytes of the file.
      place: how many of them were taken.
    """

    def __init__(self, file: Any, size: int, where: str):
        self._file, self.size, self.where, self.place, self._data = file, size, where, 0, bytearray()
        self._strings = 0

    def refuse(self, what: str) -> Refusal:
        return Refusal(f"{self.where}: {what}; download it again")

    def take(self, count: int, what: str) -> memoryview:
        """The next ``count`` bytes; ``what`` they are, for messages."""
        end = self.place + count
        if end > min(self.size, MAX_HEADER):
            limit = (
                f"the {MAX_HEADER} bytes that a header may have" if self.size > MAX_HEADER else f"its {self.size} bytes"
            )
            raise self.refuse(f"has {what} of {count} bytes at {self.place}, beyond {limit}")
        while len(self._data) < end:
            read = self._file.read(max(_READ, end - len(self._data)))
            if not read:
                raise self.refuse(f"ends within {what}, at {len(self._data)} bytes")
            self._data = self._data + read  # views of the former bytes stay as they are
        taken = memoryview(self._data)[self.place : end]
        self.place = end
        return taken

    def integer(self, kind: str, what: str) -> int:
        return int.from_bytes(self.take(int(kind[1]), what), "little")

    def count(self, most: int, what: str) -> int:
        count = self.integer("u8", f"the number of {what}")
        if count > most:
            raise self.refuse(f"says that it has {count} {what}: expected at most {most}")
        return count

    def text(self, most: int, what: str) -> str:
        length = self.integer("u8", f"the length of {what}")
        if length > most:
            raise self.refuse(f"has {what} of {length} bytes: expected at most {most}")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            raise self.refuse(f"has {what} that is not UTF-8") from None

    def name(self, what: str) -> str:
        name = self.text(MAX_NAME, f"the name of {what}")
        if not name or not name.isprintable():
            raise self.refuse(f"has {what} with the name {name!r}")
        return name

    def value(self, key: str) -> Any:
        """The value of a key."""
        kind = self.integer("u4", f"the type of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind == _STRING:
            return self.text(MAX_TEXT, repr(key))
        return self._numbers(kind, 1, key)[0].item()

    def _array(self, key: str) -> Any:
        kind, length = self.integer("u4", f"the type of {key!r}"), self.integer("u8", f"the length of {key!r}")
        if kind == _ARRAY:
            raise self.refuse(f"has arrays within the array {key!r}, which are not read")
        if kind != _STRING:
            return self._numbers(kind, length, key)
        self._strings += length
        if self._strings > MAX_STRINGS:
            raise self.refuse(f"has {key!r} of {length} strings: expected at most {MAX_STRINGS} in all")
        texts: list[str] = []
        while len(texts) < length:
            texts += self._texts(length - len(texts))
            if len(texts) < length:  # the next one is not whole in what was read, or not as it has to be
                texts.append(self.text(MAX_TEXT, repr(key)))
        return texts

    def _texts(self, most: int) -> list[str]:
        """The next strings that are whole in the bytes that were read; vocabularies have hundreds of thousands."""
        data, place, end, texts = self._data, self.place, min(len(self._data), MAX_HEADER), []
        try:
            while len(texts) < most and place + 8 <= end:
                stop = place + 8 + int.from_bytes(data[place : place + 8], "little")
                if stop > end or stop > place + 8 + MAX_TEXT:
                    break
                texts.append(str(data[place + 8 : stop], "utf-8"))
                place = stop
        except UnicodeDecodeError:
            pass
        self.place = place
        return texts

    def _numbers(self, kind: int, length: int, key: str) -> np.ndarray:
        if kind not in _NUMBERS:
            raise self.refuse(f"has {key!r} of the type {kind}: expected 0 to 12")
        dtype = np.dtype(_NUMBERS[kind])
        data = self.take(length * dtype.itemsize, repr(key))
        if dtype == np.bool_ and np.frombuffer(data, np.uint8).max(initial=0) > 1:
            raise self.refuse(f"has {key!r}, a boolean, with other bytes than 0 and 1")
        return np.frombuffer(bytes(data), dtype)
