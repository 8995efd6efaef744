"""Standard error and output of a server, which must not end because nothing can be written to them."""

import contextlib
import io
import os
import sys


class BestEffort(io.TextIOBase):
    """A text stream to a file descriptor. What cannot be written is lost: the disk is full, or the reader has gone.

    Nothing is buffered, so that nothing is left to be written when the process ends."""

    encoding = "utf-8"

    def __init__(self, descriptor: int):
        super().__init__()
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        with contextlib.suppress(OSError):
            while data:
                data = data[os.write(self._descriptor, data) :]
        return len(text)


def keep_serving_without_them():
    """Replace ``sys.stderr`` and ``sys.stdout`` by streams that raise nothing, where they are files of this process."""
    for name in ("stderr", "stdout"):
        stream = getattr(sys, name)
        if isinstance(stream, BestEffort):
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no file: a test's, or none at all
            stream.flush()
            setattr(sys, name, BestEffort(stream.fileno()))
