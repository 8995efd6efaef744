"""Headers of GGUF files: every type of value is read, and whatever is no header is refused, soon and in little memory."""

import os
import struct
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from raw_gguf import BOOL, FLOAT32, FORMATS, STRING, UINT32, RawTensor, array, raw_gguf, text, value

from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.gguf.header import MAX_STRINGS, read_header

VALUES = {
    0: 255,
    1: -128,
    2: 65535,
    3: -32768,
    4: 2**32 - 1,
    5: -(2**31),
    6: 0.5,
    7: True,
    10: 2**64 - 1,
    11: -(2**63),
    12: 0.1,
}
FOUR = RawTensor("x", (4,)), RawTensor("y", (2, 3), 0, 32)
MEBI = 2**20


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_every_type_of_value_is_read(tmp_path):
    keys = [(f"number {kind}", value(kind, given)) for kind, given in VALUES.items()]
    keys += [(f"array {kind}", array(kind, [given, given])) for kind, given in VALUES.items()]
    keys += [("text", value(STRING, "▁ünï")), ("texts", array(STRING, ["", "a\nb"])), ("none", array(STRING, []))]
    header = read_header(written(tmp_path / "m.gguf", raw_gguf(keys, FOUR, bytes(56))))
    assert [header.metadata[f"number {kind}"] for kind in VALUES] == list(VALUES.values())
    assert all(type(header.metadata[f"number {kind}"]) is type(given) for kind, given in VALUES.items())
    for kind, given in VALUES.items():
        read = header.metadata[f"array {kind}"]
        assert read.dtype == np.dtype(FORMATS[kind])
        assert read.tolist() == [given, given]
    assert header.metadata["text"] == "▁ünï"
    assert header.metadata["texts"] == ["", "a\nb"]
    assert header.metadata["none"] == []
    first = header.size - 56
    assert first % 32 == 0
    assert header.tensors == (("x", (4,), 0, first), ("y", (3, 2), 0, first + 32))


@pytest.mark.parametrize("version", [2, 3])
def test_alignment_of_another_size(tmp_path, version):
    data = raw_gguf([(ALIGNMENT, value(UINT32, 256))], FOUR[:1], bytes(16), version, alignment=256)
    assert read_header(written(tmp_path / "m.gguf", data)).tensors[0].start == len(data) - 16
    assert (len(data) - 16) % 256 == 0


LONG, ALIGNMENT = 2**40, "general.alignment"
HOSTILE = {
    "nothing": (b"", "has the magic of 4 bytes at 0, beyond its 0 bytes"),
    "another file": (b"PK\3\4" + bytes(40), "is no GGUF file: it does not begin with the letters GGUF"),
    "version 1": (raw_gguf(version=1), "it has version 1: expected a little-endian GGUF file of version 2 or 3"),
    "version 4": (raw_gguf(version=4), "it has version 4: expected a little-endian"),
    "big-endian": (raw_gguf(order=">"), "it is big-endian: expected a little-endian GGUF file of version 2 or 3"),
    "tensors": (raw_gguf(num_tensors=2**63), "says that it has 9223372036854775808 tensors: expected at most 131072"),
    "tensors that are not there": (raw_gguf(num_tensors=1000), "has the length of the name of a tensor of 8 bytes at 24"),
    "keys": (raw_gguf(num_keys=2**32), "says that it has 4294967296 keys: expected at most 16384"),
    "keys that are not there": (raw_gguf(num_keys=9), "has the length of the name of a key of 8 bytes at 24, beyond its 24"),
    "key of a terabyte": (raw_gguf(num_keys=1) + text("k", LONG), f"has the name of a key of {LONG} bytes: expected"),
    "long key": (raw_gguf([("k" * 257, value(UINT32, 1))]), "has the name of a key of 257 bytes: expected at most 256"),
    "key twice": (raw_gguf([("k", value(UINT32, 1))] * 2), "has the key 'k' twice"),
    "empty key": (raw_gguf([("", value(UINT32, 1))]), "has a key with the name ''"),
    "key of two lines": (raw_gguf([("a\nb", value(UINT32, 1))]), r"has a key with the name 'a\nb'"),
    "key to the left": (raw_gguf([("a\u202eb", value(UINT32, 1))]), r"has a key with the name 'a\u202eb'"),
    "key of NUL": (raw_gguf([("a\0", value(UINT32, 1))]), r"has a key with the name 'a\x00'"),
    "key in no UTF-8": (raw_gguf([(b"\xff", value(UINT32, 1))]), "has the name of a key that is not UTF-8"),
    "text in no UTF-8": (raw_gguf([("k", value(STRING, text(b"\xc3")))]), "has 'k' that is not UTF-8"),
    "surrogate": (raw_gguf([("k", array(STRING, [b"\xed\xa0\x80"]))]), "has 'k' that is not UTF-8"),
    "text of a terabyte": (raw_gguf([("k", value(STRING, text("x", LONG)))]), f"has 'k' of {LONG} bytes: expected at most"),
    "text beyond the end": (raw_gguf([("k", value(STRING, text("x", 2**20)))]), "has 'k' of 1048576 bytes at"),
    "template of 17 MB": (
        raw_gguf([("tokenizer.chat_template", value(STRING, "x" * (17 * MEBI)))]),
        "has 'tokenizer.chat_template' of 17825792 bytes: expected at most 16777216",
    ),
    "unknown type": (raw_gguf([("k", struct.pack("<I", 13) + bytes(8))]), "has 'k' of the type 13: expected 0 to 12"),
    "array of an unknown type": (raw_gguf([("k", struct.pack("<IIQ", 9, 99, 1))]), "has 'k' of the type 99"),
    "array of arrays": (raw_gguf([("k", struct.pack("<IIQIQ", 9, 9, 1, 9, 1))]), "has arrays within the array 'k'"),
    "array of gigabytes": (raw_gguf([("k", array(UINT32, [], 2**31))]), "has 'k' of 8589934592 bytes at"),
    "array of 2^64 bytes": (raw_gguf([("k", array(12, [], 2**61))]), f"has 'k' of {2**64} bytes at"),
    "texts of gigabytes": (raw_gguf([("k", array(STRING, [], 2**60))]), f"has 'k' of {2**60} strings: expected at most"),
    "boolean of 2": (raw_gguf([("k", struct.pack("<IB", BOOL, 2))]), "has 'k', a boolean, with other bytes than 0 and 1"),
    "booleans of 2": (raw_gguf([("k", struct.pack("<IIQBB", 9, BOOL, 2, 1, 2))]), "has 'k', a boolean, with other bytes"),
    "alignment of 0": (raw_gguf([(ALIGNMENT, value(UINT32, 0))]), "general.alignment=0: expected an integer in 1..65536"),
    "alignment of 48": (raw_gguf([(ALIGNMENT, value(UINT32, 48))]), "general.alignment=48: expected a power of two"),
    "alignment of 2^20": (raw_gguf([(ALIGNMENT, value(UINT32, 2**20))]), "general.alignment=1048576: expected an"),
    "alignment of text": (raw_gguf([(ALIGNMENT, value(STRING, "3" * MEBI))]), "general.alignment='33"),
    "alignment of true": (raw_gguf([(ALIGNMENT, value(BOOL, True))]), "general.alignment=True: expected an integer"),
    "no axes": (raw_gguf([], [RawTensor(axes=())]), "gives the tensor 'x' 0 axes: expected 1 to 4"),
    "five axes": (raw_gguf([], [RawTensor(axes=(1,) * 5)]), "gives the tensor 'x' 5 axes"),
    "axes that are not there": (raw_gguf([], [RawTensor(axes=(), count=2**32 - 1)]), "gives the tensor 'x' 4294967295 axes"),
    "an axis of 0": (raw_gguf([], [RawTensor(axes=(0, 4))]), "gives the tensor 'x' the shape [4, 0]"),
    "2^64 weights": (raw_gguf([], [RawTensor(axes=(2**32, 2**32))]), "'x' the shape [4294967296, 4294967296]"),
    "2^64 + 4 weights": (raw_gguf([], [RawTensor(axes=(2**62 + 1, 4))]), "which does not lie in its"),
    "a start behind the end": (raw_gguf([], [RawTensor(start=2**64 - 32)]), f"places the tensor 'x' at {2**64 - 32}, "),
    "a start between": (raw_gguf([], [RawTensor(start=16)], bytes(64)), "places the tensor 'x' at 16: expected a multiple"),
    "a tensor twice": (raw_gguf([], [RawTensor(), RawTensor(start=32)], bytes(64)), "has the tensor 'x' twice"),
    "a tensor of two lines": (raw_gguf([], [RawTensor("a\nb")]), r"has a tensor with the name 'a\nb'"),
    "a long name": (raw_gguf([], [RawTensor("x" * 300)]), "has the name of a tensor of 300 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, case):
    """With what is wrong by name, in a short sentence, at once, and with little more memory than the file."""
    data, said = HOSTILE[case]
    path, size = written(tmp_path / "m.gguf", data), len(data)
    del data
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(Refusal) as refused:
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert said in message
    assert message.isprintable()
    assert len(message) < 400
    assert peak < 16 * MEBI + 2 * size
    assert time.monotonic() - start < 5


def test_sparse_files_of_gigabytes_are_not_read(tmp_path):
    """Lengths that the file has, and no header: an array, a text, and more texts than any vocabulary."""
    for keys, said in (
        (
            [("k", array(UINT32, [], 2**30))],
            "has 'k' of 4294967296 bytes at 49, beyond the 134217728 bytes that a header",
        ),
        ([("k", array(STRING, [], MAX_STRINGS + 1))], f"has 'k' of {MAX_STRINGS + 1} strings: expected at most"),
        ([(f"k{i}", array(FLOAT32, [], 2**23)) for i in range(2)], "has a key with the name ''"),
    ):
        path = written(tmp_path / "m.gguf", raw_gguf(keys))
        os.truncate(path, 2**33)
        tracemalloc.start()
        try:
            with pytest.raises(Refusal, match=said):
                read_header(path)
            assert tracemalloc.get_traced_memory()[1] < 160 * MEBI
        finally:
            tracemalloc.stop()


def test_strings_of_all_arrays_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("jspec.checkpoints.gguf.header.MAX_STRINGS", 5)
    keys = [(name, array(STRING, ["x"] * 3)) for name in ("a", "b")]
    assert read_header(written(tmp_path / "m.gguf", raw_gguf(keys[:1]))).metadata["a"] == ["x"] * 3
    with pytest.raises(Refusal, match=r"has 'b' of 3 strings: expected at most 5 in all"):
        read_header(written(tmp_path / "m.gguf", raw_gguf(keys)))


def test_a_file_that_ends_early_is_refused_wherever_it_ends(tmp_path):
    keys = [("number", value(UINT32, 7)), ("text", value(STRING, "some")), ("texts", array(STRING, ["a", "bc"]))]
    data = raw_gguf([*keys, ("numbers", array(FLOAT32, [1, 2]))], FOUR)
    path = tmp_path / "m.gguf"
    for end in range(len(data)):
        with pytest.raises(Refusal, match=rf"beyond its {end} bytes"):
            read_header(written(path, data[:end]))


def test_what_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    for name, said in (("pipe.gguf", "is not a regular file"), ("absent.gguf", r"cannot be read \(No such file")):
        with pytest.raises(Refusal, match=rf"{name}: {said}"):
            read_header(tmp_path / name)
    with pytest.raises(Refusal, match="is not a regular file"):
        Checkpoint.open(tmp_path / "pipe.gguf")


def test_a_file_that_shrinks_while_it_is_read(tmp_path, monkeypatch):
    path = written(tmp_path / "m.gguf", raw_gguf([("k", array(UINT32, range(100)))]))
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0,) * 6 + (path.stat().st_size + 400, 0, 0, 0)))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(Refusal, match="ends within 'k', at 100 bytes"):
        read_header(path)
