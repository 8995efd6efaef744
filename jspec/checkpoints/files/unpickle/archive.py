"""Reads the two file formats of ``torch.save``.

A file holds one pickled object, the state dict, and storages: runs of numbers that the tensors in the object are views
of. Each storage has a key, a string, by which the object refers to it.

Since PyTorch 1.6 the file is a zip archive. ``name/data.pkl`` holds the object, ``name/data/KEY`` the bytes of the
storage with that key, and ``name/byteorder`` their byte order.

Before 1.6 the file is a sequence of pickles: a magic number, the format's version, a description of the machine, the
object, and the list of the keys. After them comes each storage as its number of elements and its bytes.
"""

import io
import struct
import zipfile
from typing import Any, BinaryIO, NamedTuple

from .machine import Machine, Refused

MAX_PICKLE_BYTES = 16 * 2**20
ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

ZIP_SIGNATURE = b"PK\3\4"
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
BIG_ENDIAN = "stores its numbers big-endian; save it again on a little-endian machine"


class Extent(NamedTuple):
    """The bytes ``start : start + size`` of the file, in which a storage lies."""

    start: int
    size: int


def read_object(file: BinaryIO, file_size: int) -> tuple[Any, dict[str, Extent]]:
    """The object in ``file``, and storage key -> bytes of the file in which that storage lies.

    Args:
      file: the file, at its beginning.
      file_size: its size in bytes.

    Raises:
      Refused: the file holds more than a state dict, or was not written by ``torch.save``.
      Exception: of any kind, if the file is damaged.
    """
    signature = file.read(len(ZIP_SIGNATURE))
    file.seek(0)
    return (_read_zip if signature == ZIP_SIGNATURE else _read_legacy)(file, file_size)


def _read_zip(file: BinaryIO, file_size: int) -> tuple[Any, dict[str, Extent]]:
    with zipfile.ZipFile(file) as archive:
        entries = _entries(archive)
        pickles = [path for path in entries if path.count("/") == 1 and path.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise Refused(f"is a zip archive with {len(pickles)} data.pkl, but torch.save writes one")
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in entries and archive.read(f"{folder}byteorder") != b"little":
            raise Refused(BIG_ENDIAN)
        if entries[pickles[0]].file_size > MAX_PICKLE_BYTES:
            raise Refused(f"holds a data.pkl of more than {MAX_PICKLE_BYTES} bytes")
        stream = io.BytesIO(archive.read(pickles[0]))
    machine = Machine()
    value = machine.run(stream)
    if stream.read(1):
        raise Refused("holds bytes behind the end of data.pkl")
    return value, {key: _extent(file, file_size, entries[f"{folder}data/{key}"]) for key in machine.storages}


def _entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Path in the archive -> entry, after a check that no path occurs twice and no entry is compressed or encrypted."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if entry.filename in entries:
            raise Refused(f"holds {entry.filename!r} twice")
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.compress_size == entry.file_size
        if not stored or entry.flag_bits & 1:
            raise Refused(f"compresses or encrypts {entry.filename!r}, which torch.save does not")
        entries[entry.filename] = entry
    return entries


def _extent(file: BinaryIO, file_size: int, entry: zipfile.ZipInfo) -> Extent:
    """The bytes of an entry's content.

    They follow the entry's local header. The central directory, which ``zipfile`` has read, states where that header
    begins and not how long it is."""
    file.seek(entry.header_offset)
    signature, name_size, extra_size = struct.unpack("<4s22xHH", file.read(30))
    extent = Extent(entry.header_offset + 30 + name_size + extra_size, entry.file_size)
    if signature != ZIP_SIGNATURE or sum(extent) > file_size:
        raise Refused(f"is truncated or damaged at {entry.filename!r}; fetch the file again")
    return extent


def _read_legacy(file: BinaryIO, file_size: int) -> tuple[Any, dict[str, Extent]]:
    stream, machine = io.BytesIO(file.read(MAX_PICKLE_BYTES)), Machine()
    if machine.run(stream) != LEGACY_MAGIC or machine.run(stream) != LEGACY_PROTOCOL:
        raise Refused("was not written by torch.save")
    if machine.run(stream).get("little_endian") is not True:
        raise Refused(BIG_ENDIAN)
    value, keys = machine.run(stream), machine.run(stream)
    extents, position = {}, stream.tell()
    for key in keys:
        file.seek(position)
        [numel] = struct.unpack("<q", file.read(8))
        extents[key] = Extent(position + 8, numel * ITEMSIZES[machine.storages[key].dtype])
        position = sum(extents[key])
        if numel < 0 or position > file_size:
            raise Refused("is truncated or damaged; fetch the file again")
    return value, extents
