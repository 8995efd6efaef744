"""Writes GGUF files byte by byte, valid or not, without the package gguf."""

import dataclasses
import struct
from collections.abc import Sequence
from typing import Any

UINT32, FLOAT32, BOOL, STRING, ARRAY = 4, 6, 7, 8, 9
FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A string, with another ``length`` in front than its own if that is given."""
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data) if length is None else length) + data


def value(kind: int, given: Any) -> bytes:
    """A value with its type in front; bytes are taken as they are."""
    data = (
        given
        if isinstance(given, bytes)
        else text(given)
        if kind == STRING
        else struct.pack("<" + FORMATS[kind], given)
    )
    return struct.pack("<I", kind) + data


def array(kind: int, given: Sequence[Any], length: int | None = None) -> bytes:
    """An array with its type in front, and another ``length`` than its own if that is given."""
    items = [text(one) if kind == STRING else struct.pack("<" + FORMATS[kind], one) for one in given]
    return struct.pack("<IIQ", ARRAY, kind, len(items) if length is None else length) + b"".join(items)


@dataclasses.dataclass(frozen=True)
class RawTensor:
    """The entry of a tensor; ``axes`` are in the order of the file, the innermost first, and ``count`` says how many."""

    name: str | bytes = "x"
    axes: Sequence[int] = (4,)
    kind: int = 0
    start: int = 0
    count: int | None = None

    @property
    def data(self) -> bytes:
        count = len(self.axes) if self.count is None else self.count
        entry = struct.pack(f"<I{len(self.axes)}QIQ", count, *self.axes, self.kind, self.start)
        return text(self.name) + entry


def raw_gguf(
    keys: Sequence[tuple[str | bytes, bytes]] = (),
    tensors: Sequence[RawTensor] = (),
    content: bytes = b"",
    version: int = 3,
    order: str = "<",
    num_tensors: int | None = None,
    num_keys: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A file: a header of keys with their values and of tensors, and ``content`` behind it, where tensors begin."""
    counts = (given if given is not None else len(own) for given, own in ((num_tensors, tensors), (num_keys, keys)))
    header = b"GGUF" + struct.pack(f"{order}IQQ", version, *counts)
    header += b"".join(text(key) + data for key, data in keys) + b"".join(tensor.data for tensor in tensors)
    return header + bytes(-len(header) % alignment if content else 0) + content
