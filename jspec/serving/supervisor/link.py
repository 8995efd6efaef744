"""The member's end of its connection to the keeper."""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator

from jspec.serving.supervisor.messages import END, MOST_BYTES, PING, Alive, Report, Task, report_line

ORPHANED = 3  # exit code of a member whose keeper has ended


class Link:
    """Reports to the keeper, and does what it says. A thread listens to it, also while a model is loaded.

    The process ends at once when the keeper does, however that ended: nobody else would end it.

    Args:
      descriptor: of the member's end of a pair of sockets.

    Attributes:
      task: what is to be done.
    """

    def __init__(self, descriptor: int):
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)  # the keeper sees the end of it when this process ends, and no child of it
        self._file = self._socket.makefile("rb")
        line = self._file.readline(MOST_BYTES)
        if not line.endswith(b"\n"):
            os._exit(ORPHANED)
        self.task = Task.of(line)
        self._saying = threading.Lock()
        self._serving: tuple[asyncio.AbstractEventLoop, asyncio.Queue[int]] | None = None
        threading.Thread(target=self._listen, name="jspec.Link.listen", daemon=True).start()

    def say(self, report: Report):
        """Report something to the keeper; any thread may."""
        with self._saying:
            try:
                self._socket.sendall(report_line(report))
            except OSError:
                os._exit(ORPHANED)

    @contextlib.contextmanager
    def answering(self) -> "Iterator[asyncio.Queue[int]]":
        """How often the keeper has said that this is to end, as items of a queue of the event loop that runs here.

        Meanwhile it is this loop that says whether the member is alive: one that hangs answers nobody.
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
                self._do(line)
        sys.stderr.flush()
        os._exit(ORPHANED)

    def _do(self, line: bytes):
        assert line in (PING, END), line
        serving = self._serving
        with contextlib.suppress(RuntimeError):  # the loop has just been closed; the next answer comes from here
            if serving is None:
                if line == PING:
                    self.say(Alive())
            elif line == PING:
                serving[0].call_soon_threadsafe(self.say, Alive())
            else:
                serving[0].call_soon_threadsafe(serving[1].put_nowait, 1)
