"""Parts of arrays in files: the right numbers, no bytes of others, and files that end too early."""

import itertools
import os

import ml_dtypes
import numpy as np
import pytest

from jspec.checkpoints.files import ranges
from jspec.checkpoints.files.ranges import read_range

DTYPES = [np.dtype(dtype) for dtype in (np.float32, np.uint8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)]


@pytest.fixture
def counted(monkeypatch):
    """The list of how many bytes each call has read."""
    read, preadv = [], os.preadv

    def counting(*args):
        read.append(preadv(*args))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return read


def stored(path, shape, dtype, start=0):
    """An array of random bytes, which is also written to ``path`` from the byte ``start`` on."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(size).integers(0, 256, start + size, np.uint8)
    path.write_bytes(data.tobytes())
    return data[start:].view(dtype).reshape(shape)


@pytest.mark.parametrize(("piece", "shortest"), [(8 << 20, 1 << 10), (64, 16), (7, 1)])
@pytest.mark.parametrize("shape", [(), (9,), (5, 8), (3, 4, 6), (2, 3, 2, 5), (0, 3)], ids=str)
def test_parts_equal_slices_of_the_array(tmp_path, monkeypatch, shape, piece, shortest):
    """Every part of a few along each axis, with pieces that end between rows and within them."""
    monkeypatch.setattr(ranges, "PIECE", piece)
    monkeypatch.setattr(ranges, "SHORTEST", shortest)
    some = (slice(None), slice(0, 1), slice(1, 3), slice(2, None), slice(3, 3))
    for start, dtype in zip((0, 3, 8, 1), DTYPES, strict=True):
        array = stored(tmp_path / "x", shape, dtype, start)
        for index in itertools.product(some, repeat=len(shape)):
            found = read_range(tmp_path / "x", dtype, shape, index, start)
            assert (found.shape, found.dtype) == (array[index].shape, dtype)
            assert found.tobytes() == array[index].tobytes()


@pytest.mark.parametrize(
    ("index", "read"),
    [
        ((), 64 * 4096),
        ((slice(3, 5),), 2 * 4096),
        ((slice(3, 5), slice(0, 1024)), 2 * 1024),
        ((slice(None), slice(2048, None)), 64 * 2048),
        ((slice(3, 5), slice(0, 1023)), 2 * 4096),  # shorter than a run that is read alone
    ],
    ids=str,
)
def test_other_bytes_are_not_read(tmp_path, counted, index, read):
    array = stored(tmp_path / "x", (64, 4096), np.dtype(np.uint8))
    np.testing.assert_array_equal(read_range(tmp_path / "x", array.dtype, array.shape, index), array[index])
    assert sum(counted) == read


def test_short_reads_are_continued(tmp_path, monkeypatch):
    """As Linux does from 2 GiB on."""
    array, preadv = stored(tmp_path / "x", (5, 100), np.dtype(np.uint8)), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:7]], at))
    np.testing.assert_array_equal(read_range(tmp_path / "x", array.dtype, array.shape), array)


def test_a_truncated_file_is_an_error(tmp_path, monkeypatch):
    """The thread that notices it is not the one that asked."""
    monkeypatch.setattr(ranges, "PIECE", 100)
    array = stored(tmp_path / "x", (6, 100), np.dtype(np.uint8))
    assert read_range(tmp_path / "x", array.dtype, (7, 100), (slice(0, 6),)).shape == (6, 100)
    with pytest.raises(ValueError, match="it ends 100 bytes early"):
        read_range(tmp_path / "x", array.dtype, (7, 100))
    with pytest.raises(FileNotFoundError):
        read_range(tmp_path / "y", array.dtype, (7, 100))
