"""The worker's end of its connection to the supervisor."""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

from jspec.serving.supervisor.messages import END, MOST_BYTES, PING, Alive, Report, Task, report_line

ORPHANED = 3  # exit code of a worker whose supervisor has ended


class Link:
    """Sends reports to the supervisor, and handles its messages in a thread, also while the model is loaded.

    The process exits at once when the supervisor has ended, because nothing else would end it.

    Args:
      descriptor: file descriptor of the worker's end of a pair of sockets.

    Attributes:
      task: the task of this worker.
    """

    def __init__(self, descriptor: int):
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)  # so that it closes with this process, whatever children this has
        self._file = self._socket.makefile("rb")
        line = self._file.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            os._exit(ORPHANED)
        self.task = Task.of(line)
        self._sending = threading.Lock()
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Queue[int]] | None = None
        threading.Thread(target=self._listen, name="jspec.Link.listen", daemon=True).start()

    def send(self, report: Report):
        """Send a report to the supervisor; thread-safe."""
        with self._sending:
            try:
                self._socket.sendall(report_line(report))
            except OSError:
                os._exit(ORPHANED)

    @contextlib.contextmanager
    def serving(self) -> "Iterator[asyncio.Queue[int]]":
        """A queue of the running event loop with one item for each ``END`` of the supervisor.

        Meanwhile this loop responds to pings in place of the thread, so that a loop that hangs is noticed.
        """
        loop, stops = asyncio.get_running_loop(), asyncio.Queue()
        self._serving = loop, stops
        try:
            yield stops
        finally:
            self._serving = None

    def _listen(self):
        with contextlib.suppress(OSError):
            while line := self._file.readline(MOST_BYTES):
                self._handle(line)
        sys.stderr.flush()
        os._exit(ORPHANED)

    def _handle(self, line: bytes):
        assert line in (PING, END), line
        serving = self._serving
        with contextlib.suppress(RuntimeError):  # the loop has just been closed; this thread responds to the next ping
            if serving is None:
                if line == PING:
                    self.send(Alive())
            elif line == PING:
                serving[0].call_soon_threadsafe(self.send, Alive())
            else:
                serving[0].call_soon_threadsafe(serving[1].put_nowait, 1)
