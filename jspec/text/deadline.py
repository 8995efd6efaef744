"""``limited``: calls Python code that was not written here, and ends it when it takes too much CPU time."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

T = TypeVar("T")
LOOKS_PER_LIMIT = 20  # how often the CPU time is looked at before it can be over


class TooSlow(Exception):
    """The code took more CPU time than it may."""


class _Ended(BaseException):
    """Raised inside of the code; a BaseException, so that no ``except Exception`` in there goes on."""


class _Watch(threading.Thread):
    """Raises ``_Ended`` in the thread that makes this object, when that has used ``seconds`` of CPU time.

    Args:
      seconds: of CPU time.
      frame: of the call that is to be ended. Nothing is raised once that has returned, though an interrupt may have kept it
        from calling ``stop``.
    """

    def __init__(self, seconds: float, frame: FrameType):
        super().__init__(name="jspec-deadline", daemon=True)
        self._frame: FrameType | None = frame
        self._thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._end, self._pause = time.clock_gettime(self._clock) + seconds, seconds / LOOKS_PER_LIMIT
        self._over, self._lock = threading.Event(), threading.Lock()
        self.raised = False

    def run(self):
        while not self._over.wait(self._pause):
            with self._lock:
                if self._over.is_set():
                    return
                if time.clock_gettime(self._clock) >= self._end:
                    if not self._is_running():
                        return
                    self.raised = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(_Ended))
                    return

    def stop(self):
        """Raise nothing from now on."""
        with self._lock:
            self._over.set()
        self._frame = None  # which holds this object

    def _is_running(self) -> bool:
        """Whether the call is still on the thread's stack."""
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def limited(work: Callable[[], T], seconds: float) -> T:
    """The result of ``work``, which may use so many seconds of this thread's CPU time.

    Only Python code can be ended: a single long call into C, ``"a" * 10**9`` say, ends when it is over. Where the system
    has no clocks of threads, as macOS has none, nothing is ended.

    Raises:
      TooSlow: it was not done by then.
      Exception: what ``work`` raised.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return work()
    watch = _Watch(seconds, sys._getframe())
    try:
        try:
            watch.start()
            return work()
        finally:
            watch.stop()
            if watch.raised and not isinstance(sys.exception(), _Ended):
                _wait_for_it()
    except _Ended:
        raise TooSlow(f"took more than {seconds:g} s of CPU time") from None


def _wait_for_it():
    """Let an exception that is on its way come here and nowhere else: it comes between two instructions of Python."""
    for _ in range(1000):
        time.sleep(0)
