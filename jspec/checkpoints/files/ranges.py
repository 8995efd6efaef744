"""Parts of an array that lies in a file number by number, read without the bytes of its other parts.

Both safetensors and the uncompressed arrays of a converted folder are such files. A part is cut into *runs*, which are
bytes that follow each other in the file and in the part. Several threads read them side by side, because one alone neither
keeps a disk busy nor copies as fast as memory allows."""

import collections
import functools
import itertools
import math
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jspec._interrupts import Answer, Threads

Index = tuple[slice, ...]  # of the first axes of an array, with steps of 1; all of the others

PIECE = 8 << 20  # bytes that a thread reads at a time
THREADS = 8
TOGETHER = 16 << 20  # bytes of a parameter that are read together
SHORTEST = 1 << 10  # bytes of a run that is read alone: disks read whole pages, and a call costs more than shorter ones


def bounds_of(index: Index, shape: Sequence[int]) -> list[tuple[int, int]]:
    """First place and one past the last of a part of an array, along each of its axes."""
    slices = [*index, *[slice(None)] * (len(shape) - len(index))]
    return [part.indices(size)[:2] for part, size in zip(slices, shape, strict=True)]


def pieces(index: Index, shape: Sequence[int], itemsize: int) -> list[Index]:
    """A part of an array in pieces of at most ``TOGETHER`` bytes, or of one row.

    They are cut along axis 0, which rows in files follow; of three axes along the longest, that of outputs."""
    bounds = bounds_of(index, shape)
    sizes = [stop - first for first, stop in bounds]
    axis = sizes.index(max(sizes)) if len(sizes) > 2 else 0
    if not sizes or math.prod(sizes) * itemsize <= TOGETHER:
        return [index]
    first, stop = bounds[axis]
    most = max(TOGETHER * sizes[axis] // (math.prod(sizes) * itemsize), 1)
    step = 1 << most.bit_length() - 1  # a power of two, so that most arrays have no other piece at their end
    before, after = [slice(*bound) for bound in bounds[:axis]], [slice(*bound) for bound in bounds[axis + 1 :]]
    return [(*before, slice(at, min(at + step, stop)), *after) for at in range(first, stop, step)]


def read_range(path: Path, dtype: np.dtype, shape: tuple[int, ...], index: Index = (), start: int = 0) -> np.ndarray:
    """A part of the array of this dtype and shape in the file ``path``, in C order from the byte ``start`` on.

    Args:
      path, dtype, shape, start: of the whole array.
      index: which part. Where its rows have runs of less than ``SHORTEST`` bytes, the bytes between these are read too.

    Raises:
      OSError: the file cannot be read.
      ValueError: it ends before the part does.
    """
    bounds = bounds_of(index, shape)
    out = np.empty([max(stop - first, 0) for first, stop in bounds], dtype)
    if out.size == 0:
        return out
    # Axis ``cut`` is the last that the part has not all of. A run is what the part has of it, and a row all of it.
    cut = max((axis for axis, size in enumerate(shape) if bounds[axis] != (0, size)), default=0)
    unit = dtype.itemsize * math.prod(shape[cut + 1 :])
    first, stop = bounds[cut] if shape else (0, 1)
    row, skipped, run = unit * (shape[cut] if shape else 1), unit * first, unit * (stop - first)
    rows = _rows(bounds[:cut], shape[:cut])
    into = out.reshape(-1).view(np.uint8).reshape(len(rows), run)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if run >= SHORTEST or len(rows) == 1:
            reads = _of_runs(descriptor, start + rows * row + skipped, into)
        else:
            reads = _of_rows(descriptor, start + rows * row, row, skipped, into)
        collections.deque(results(list(reads), THREADS), maxlen=0)
    finally:
        os.close(descriptor)
    return out


def _rows(bounds: list[tuple[int, int]], shape: tuple[int, ...]) -> np.ndarray:
    """The numbers, int ``[rows]``, of the rows that a part has, from what it has of the axes before those of a row."""
    rows = np.zeros(1, np.int64)
    for (first, stop), size in zip(bounds, shape, strict=True):
        rows = (rows[:, None] * size + np.arange(first, stop)).reshape(-1)
    return rows


def _of_runs(descriptor: int, starts: np.ndarray, into: np.ndarray) -> Iterator[Callable[[], None]]:
    """Functions that read the runs from ``starts`` on, int ``[rows]``, into uint8 ``[rows, run]``."""
    run = into.shape[1]
    each = max(PIECE // run, 1)
    for row, offset in itertools.product(range(0, len(starts), each), range(0, run, PIECE)):
        place = slice(row, row + each), slice(offset, offset + PIECE)
        yield functools.partial(_read_runs, descriptor, starts[place[0]] + offset, into[place])


def _read_runs(descriptor: int, starts: np.ndarray, into: np.ndarray):
    for start, run in zip(starts.tolist(), into, strict=True):
        _fill(descriptor, start, run)


def _of_rows(
    descriptor: int, starts: np.ndarray, row: int, skipped: int, into: np.ndarray
) -> Iterator[Callable[[], None]]:
    """Functions that read whole rows of ``row`` bytes, and copy what lies behind the first ``skipped`` of each."""
    ends = np.flatnonzero(np.diff(starts) != row) + 1  # of rows that follow each other in the file
    each = max(PIECE // row, 1)
    for first, stop in itertools.pairwise([0, *ends.tolist(), len(starts)]):
        for begin in range(first, stop, each):
            place = slice(begin, min(begin + each, stop))
            yield functools.partial(_read_rows, descriptor, int(starts[begin]), row, skipped, into[place])


def _read_rows(descriptor: int, start: int, row: int, skipped: int, into: np.ndarray):
    rows = np.empty((len(into), row), np.uint8)
    _fill(descriptor, start, rows.reshape(-1))
    into[:] = rows[:, skipped : skipped + into.shape[1]]


def _fill(descriptor: int, start: int, into: np.ndarray):
    """Read bytes from ``start`` on until ``into``, uint8 of one dimension, is full."""
    view, done = into.data, 0
    while done < len(view):
        read = os.preadv(descriptor, [view[done:]], start + done)
        if read == 0:
            raise ValueError(f"it ends {len(view) - done} bytes early")
        done += read


def results(calls: Sequence[Callable[[], Any]], most: int) -> Iterator[Any]:
    """What each of ``calls`` returns, in turn. If there are several, threads call them, at most ``most`` at a time and ahead
    of what is taken."""
    if len(calls) == 1:
        yield calls[0]()
        return
    threads, left, waiting = Threads(most, "read"), iter(calls), collections.deque[queue.SimpleQueue[Answer]]()
    try:
        for _ in calls:
            for call in itertools.islice(left, most - len(waiting)):
                waiting.append(queue.SimpleQueue())
                threads.call(call, (), waiting[-1])
            yield waiting.popleft().get().result()
    finally:
        threads.end(wait=True)  # what they read into and from may go
