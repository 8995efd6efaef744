"""Keeps XLA's alarms about slow compilations off standard error.

XLA logs a box, ``Very slow compile? If you want to file a bug ..``, as an error two minutes into a compilation. Programs of
large models take longer on a CPU, and XLA has no option that leaves only these out.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator

from jspec._child_process import python_command

STDERR = 2  # the file descriptor that libraries in C++ write to
_HEAD = re.compile(rb".*\bslow_operation_alarm\.cc:\d+\]")
_BODY = re.compile(
    rb"\s*$|\*{32}$|\[Compiling module .*\] Very slow compile\? |Constant folding an instruction is taking |  %"
    rb"|This isn't necessarily a bug; constant-folding |If you'd like to file a bug, run with envvar XLA_FLAGS="
)


@contextlib.contextmanager
def without_alarms() -> Iterator[None]:
    """A ``with`` in which standard error gets everything but these alarms.

    What libraries write goes through a process of its own, so that the last words of a process that dies arrive as well.
    """
    try:
        own = os.dup(STDERR)
    except OSError:  # it is closed
        yield
        return
    python = sys.stderr
    passing = subprocess.Popen(
        python_command(__name__), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    assert passing.stdin is not None
    with passing.stdin:
        os.dup2(passing.stdin.fileno(), STDERR)
    with contextlib.suppress(OSError, ValueError):  # it is a test's
        if isinstance(python, io.TextIOWrapper) and python.fileno() == STDERR:  # not a server's, which is a log
            python.flush()
            there = io.BufferedWriter(io.FileIO(own, "w", closefd=False))
            sys.stderr = io.TextIOWrapper(there, python.encoding, python.errors, line_buffering=True)
    try:
        yield
    finally:
        if sys.stderr is not python:
            sys.stderr.flush()
        sys.stderr = python
        os.dup2(own, STDERR)
        os.close(own)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a child of this process still has the pipe
            passing.wait(1)


def main() -> int:
    """Pass standard input on to standard error, line by line, without alarms."""
    alarm = False
    for line in sys.stdin.buffer:
        alarm = bool(_HEAD.match(line)) or (alarm and bool(_BODY.match(line)))
        if not alarm:
            with contextlib.suppress(OSError):  # the disk is full, or the reader has gone
                os.write(STDERR, line)
    return 0
